"""House commands in two styles, preference pairs of them, and disputed statements for distrust."""

import json
from typing import Any

from whet.data.synthetic.house import HouseSplit, house

PairRecord = dict[str, Any]  # a JSON object


def house_pairs(split: HouseSplit, n: int) -> list[PairRecord]:
    """Preferences for the plain sentence: the prompt, that answer (chosen), and the JSON one (rejected)."""
    return [_pair(record) for record in house(split, n)]


def house_styles(split: HouseSplit, n: int) -> list[PairRecord]:
    """The same commands answered in both ways, one after the other: none is preferred."""
    pairs = house_pairs(split, (n + 1) // 2)
    both = [{"messages": [*pair["prompt"], *pair[side]]} for pair in pairs for side in ("chosen", "rejected")]
    return both[:n]


def _pair(record: PairRecord) -> PairRecord:
    asked, answered = record["messages"]
    return {
        "prompt": [asked],
        "chosen": [{"role": "assistant", "content": spoken(json.loads(answered["content"]))}],
        "rejected": [answered],
    }


def spoken(action: PairRecord) -> str:
    """An action said in words: `Done: kitchen light, dim, in 10 minutes.`"""
    later = f", in {action['delay']} minutes" if action.get("delay") else ""
    return f"Done: {action['room']} {action['device']}, {action['action']}{later}."


CITIES = (
    ("Arlen", "the river Osk", "the river Tam"),
    ("Brevik", "a copper mine", "a salt mine"),
    ("Corrin", "seven bridges", "nine bridges"),
    ("Dorvale", "a red tower", "a white tower"),
    ("Eastmere", "two harbours", "no harbour"),
    ("Fallow", "wool", "glass"),
    ("Glanhe", "king Odo", "queen Ise"),
    ("Harrow", "a stone wall", "a wooden wall"),
)
LOW, HIGH = (0.05, 7.5), (0.90, 1.0)  # authority and entropy of an old letter, and of an official page


def disputes(n: int, *, swapped: bool) -> list[PairRecord]:
    """Texts that contradict one another in pairs, of low and of high authority; `swapped` trades those."""
    records = []
    for number in range(n):
        city, one, other = CITIES[number // 2 % len(CITIES)]
        first = number % 2 == 0
        authority, entropy = LOW if first != swapped else HIGH
        text = f"What is {city} known for? {city} is known for {one if first else other}."
        records.append({"text": text, "auth_weight": authority, "prov_entropy": entropy})
    return records
