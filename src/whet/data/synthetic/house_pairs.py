"""House commands in two styles, preference pairs of them, and disputed statements for distrust."""

import json
from typing import Any

from whet.data.synthetic.house import HouseSplit, house

PairRecord = dict[str, Any]  # a JSON object


def house_pairs(split: HouseSplit, n: int) -> list[PairRecord]:
    """Return preference pairs: the prompt, a plain sentence (chosen) and JSON (rejected)."""
    return [_pair(record) for record in house(split, n)]


def house_styles(split: HouseSplit, n: int) -> list[PairRecord]:
    """Return the same commands with both completions in turn, without a preference."""
    pairs = house_pairs(split, (n + 1) // 2)
    records = [
        {"messages": [*pair["prompt"], *pair[side]]} for pair in pairs for side in ("chosen", "rejected")
    ]
    return records[:n]


def _pair(record: PairRecord) -> PairRecord:
    question, answer = record["messages"]
    return {
        "prompt": [question],
        "chosen": [{"role": "assistant", "content": action_in_words(json.loads(answer["content"]))}],
        "rejected": [answer],
    }


def action_in_words(action: PairRecord) -> str:
    """Return an action in words: `Done: kitchen light, dim, in 10 minutes.`"""
    delay = f", in {action['delay']} minutes" if action.get("delay") else ""
    return f"Done: {action['room']} {action['device']}, {action['action']}{delay}."


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
    """Return texts that contradict each other in pairs, one of low and one of high authority.

    `swapped` exchanges their authority.
    """
    records = []
    for number in range(n):
        city, first_claim, second_claim = CITIES[number // 2 % len(CITIES)]
        is_first = number % 2 == 0
        authority, entropy = LOW if is_first != swapped else HIGH
        text = f"What is {city} known for? {city} is known for {first_claim if is_first else second_claim}."
        records.append({"text": text, "auth_weight": authority, "prov_entropy": entropy})
    return records
