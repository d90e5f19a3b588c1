"""The demo task: short spoken commands for a house, and the JSON action of each.

All commands are generated from the tables below and a seed.
"""

import hashlib
import json
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

from whet.errors import DataError

T = TypeVar("T")
HouseSplit = Literal["train", "valid", "test"]
HouseRecord = dict[str, Any]  # a JSON object: {"messages": [...], "group": "known" | "unseen"}


class Device(NamedTuple):
    """The names of a device and its actions."""

    names: tuple[str, ...]
    actions: tuple[str, ...]


class Way(NamedTuple):
    """One phrase for an action: imperative, gerund and participle; `{}` is the device."""

    do: str
    doing: str
    done: str


# JSON value -> words for it
ROOMS: dict[str, tuple[str, ...]] = {
    "kitchen": ("kitchen",),
    "bedroom": ("bedroom",),
    "bathroom": ("bathroom",),
    "living room": ("living room", "lounge"),
    "office": ("office", "study"),
    "hallway": ("hallway",),
    "garage": ("garage",),
    "attic": ("attic",),
}

DEVICES: dict[str, Device] = {
    "light": Device(names=("light", "lamp"), actions=("on", "off", "dim")),
    "tv": Device(names=("TV", "television"), actions=("on", "off")),
    "fan": Device(names=("fan",), actions=("on", "off")),
    "heating": Device(names=("heating", "radiator"), actions=("up", "down")),
    "blinds": Device(names=("blinds", "shutters"), actions=("open", "close")),
    "window": Device(names=("window",), actions=("open", "close")),
    "door": Device(names=("door",), actions=("lock", "unlock")),
    "music": Device(names=("music",), actions=("play", "stop")),
}

WAYS: dict[str, tuple[Way, ...]] = {
    "on": (
        Way("turn on {}", "turning on {}", "{} turned on"),
        Way("turn {} on", "turning {} on", "{} turned on"),
        Way("switch on {}", "switching on {}", "{} switched on"),
        Way("switch {} on", "switching {} on", "{} switched on"),
    ),
    "off": (
        Way("turn off {}", "turning off {}", "{} turned off"),
        Way("turn {} off", "turning {} off", "{} turned off"),
        Way("switch off {}", "switching off {}", "{} switched off"),
        Way("switch {} off", "switching {} off", "{} switched off"),
    ),
    "dim": (Way("dim {}", "dimming {}", "{} dimmed"),),
    "up": (
        Way("turn up {}", "turning up {}", "{} turned up"),
        Way("turn {} up", "turning {} up", "{} turned up"),
        Way("raise {}", "raising {}", "{} raised"),
    ),
    "down": (
        Way("turn down {}", "turning down {}", "{} turned down"),
        Way("turn {} down", "turning {} down", "{} turned down"),
        Way("lower {}", "lowering {}", "{} lowered"),
    ),
    "open": (Way("open {}", "opening {}", "{} opened"),),
    "close": (
        Way("close {}", "closing {}", "{} closed"),
        Way("shut {}", "shutting {}", "{} shut"),
    ),
    "lock": (Way("lock {}", "locking {}", "{} locked"),),
    "unlock": (Way("unlock {}", "unlocking {}", "{} unlocked"),),
    "play": (
        Way("play {}", "playing {}", "{} played"),
        Way("start {}", "starting {}", "{} started"),
    ),
    "stop": (Way("stop {}", "stopping {}", "{} stopped"),),
}

# Minutes -> words for them. A command without a time has the delay 0.
DELAYS: dict[int, tuple[str, ...]] = {
    5: ("in 5 minutes", "in five minutes"),
    10: ("in 10 minutes", "in ten minutes"),
    15: ("in 15 minutes", "in a quarter of an hour", "after a quarter of an hour"),
    20: ("in 20 minutes", "in twenty minutes"),
    30: ("in 30 minutes", "in half an hour", "after half an hour"),
}

# A template without {room} mentions the room with the device: "the kitchen light".
KNOWN_TEMPLATES: tuple[str, ...] = (
    "{do}",
    "{do} now",
    "please {do}",
    "can you {do}?",
    "could you please {do}?",
    "it's time to {do}",
    "I would like {done}",
    "{do} in the {room}",
    "{do} in the {room}, please",
    "in the {room}, {do}",
    "would you {do} in the {room}?",
    "hey, {do} in the {room}",
    "go ahead and {do} in the {room}",
    "{do} {when}",
    "please {do} {when}",
    "{do} {when}, please",
    "can you {do} {when}?",
    "I want {done} {when}",
    "would you mind {doing} {when}?",
    "don't forget to {do} {when}",
    "make sure to {do} {when}",
    "I need you to {do} {when}",
    "let's have {done} {when}",
    "{when}, {do}",
    "{when}, please {do}",
    "{when}, I need {done}",
    "{do} in the {room} {when}",
    "in the {room}, {do} {when}",
    "could you {do} in the {room} {when}?",
    "I'd like you to {do} in the {room} {when}",
    "remember to {do} in the {room} {when}",
    "{when}, can you {do} in the {room}?",
)

# Not in the training data: they test whether the model generalizes to new phrasings.
UNSEEN_TEMPLATES: tuple[str, ...] = (
    "in the {room}, please {do}",
    "would you mind {doing} in the {room}?",
    "be so kind as to {do}",
    "I need {done} {when}",
    "do me a favour and {do} {when}",
    "would you please {do} in the {room} {when}?",
    "{when}, could you {do}?",
    "{when}, I want {done} in the {room}",
)

# The hash buckets, of ten, that belong to each split.
BUCKETS: dict[HouseSplit, range] = {"train": range(7), "valid": range(7, 8), "test": range(8, 10)}

# One test command in five has an unseen template.
UNSEEN_EVERY = 5

# Number of candidates per template with balanced words; the remaining candidates follow in any order.
BALANCED_DRAWS = 500


@dataclass(frozen=True)
class Command:
    """A command: its meaning, and the words that express it."""

    template: str
    room: str
    room_name: str
    device: str
    device_name: str
    action: str
    way: Way
    delay: int = 0
    when: str = ""

    def sentence(self) -> str:
        """Return the command as spoken."""
        device_phrase = (
            f"the {self.device_name}"
            if "{room}" in self.template
            else f"the {self.room_name} {self.device_name}"
        )
        sentence = self.template.format(
            do=self.way.do.format(device_phrase),
            doing=self.way.doing.format(device_phrase),
            done=self.way.done.format(device_phrase),
            room=self.room_name,
            when=self.when,
        )
        return sentence[0].upper() + sentence[1:]

    def answer(self) -> str:
        """Return the JSON action of the command."""
        meaning = {"room": self.room, "device": self.device, "action": self.action, "delay": self.delay}
        return json.dumps(meaning, separators=(",", ":"))


class _Decks:
    """Decks of cards. Every card of a deck is drawn once before any card is drawn again."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.decks: dict[Hashable, list[Any]] = {}  # Any: all cards of a deck have one type

    def draw(self, name: Hashable, cards: Sequence[T]) -> T:
        """Return the next card of the named deck."""
        deck = self.decks.setdefault(name, [])
        if not deck:
            deck.extend(_shuffled(cards, self.rng))
        card: T = deck.pop()
        return card


def house(split: HouseSplit, n: int) -> list[HouseRecord]:
    """Return the first `n` records of a split. No sentence occurs twice, in one or in several splits."""
    records = list(islice(_records(split), n))
    if len(records) < n:
        raise DataError(
            f"{n} house commands requested, but the {split} split has only {len(records)}",
            hint=f"request at most {len(records)}",
        )
    return records


def split_of(sentence: str) -> HouseSplit:
    """Return the split of a sentence, ignoring case and punctuation."""
    words = " ".join(re.findall(r"[a-z0-9']+", sentence.lower()))
    bucket = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") % 10
    return next(split for split, buckets in BUCKETS.items() if bucket in buckets)


def commands(templates: Sequence[str]) -> Iterator[Command]:
    """Yield every command that the templates can express."""
    rooms = [(room, name) for room, names in ROOMS.items() for name in names]
    orders = [
        (device, name, action, way)
        for device, (names, actions) in DEVICES.items()
        for name, action in product(names, actions)
        for way in WAYS[action]
    ]
    for template in templates:
        delays = _delays() if "{when}" in template else [(0, "")]
        for (room, room_name), (device, device_name, action, way), (delay, when) in product(
            rooms, orders, delays
        ):
            yield Command(template, room, room_name, device, device_name, action, way, delay, when)


def _records(split: HouseSplit) -> Iterator[HouseRecord]:
    known = _sentences(split, KNOWN_TEMPLATES)
    if split != "test":
        yield from (_record(command, "known") for command in known)
        return
    for unseen in _sentences(split, UNSEEN_TEMPLATES):
        block = list(islice(known, UNSEEN_EVERY - 1))
        yield from (_record(command, "known") for command in block)
        if len(block) < UNSEEN_EVERY - 1:
            return
        yield _record(unseen, "unseen")


def _record(command: Command, template: Literal["known", "unseen"]) -> HouseRecord:
    messages = [
        {"role": "user", "content": command.sentence()},
        {"role": "assistant", "content": command.answer()},
    ]
    return {"messages": messages, "group": template}


def _sentences(split: HouseSplit, templates: Sequence[str]) -> Iterator[Command]:
    rng = Random(f"whet house {split}")
    decks = _Decks(rng)
    streams = {template: _stream(template, split, decks) for template in templates}
    while streams:
        for template in _shuffled(list(streams), rng):
            if command := next(streams[template], None):
                yield command
            else:
                del streams[template]


def _stream(template: str, split: HouseSplit, decks: _Decks) -> Iterator[Command]:
    seen: set[str] = set()
    for command in _candidates(template, decks):
        sentence = command.sentence()
        if sentence not in seen and split_of(sentence) == split:
            seen.add(sentence)
            yield command


def _candidates(template: str, decks: _Decks) -> Iterator[Command]:
    for _ in range(BALANCED_DRAWS):
        yield _draw(template, decks)
    yield from _shuffled(list(commands([template])), decks.rng)


def _draw(template: str, decks: _Decks) -> Command:
    room = decks.draw("room", list(ROOMS))
    device, action = decks.draw(
        "order", [(device, action) for device in DEVICES for action in DEVICES[device].actions]
    )
    delay, when = decks.draw("delay", _delays()) if "{when}" in template else (0, "")
    return Command(
        template=template,
        room=room,
        room_name=decks.draw(room, ROOMS[room]),
        device=device,
        device_name=decks.draw(device, DEVICES[device].names),
        action=action,
        way=decks.draw((device, action), WAYS[action]),
        delay=delay,
        when=when,
    )


def _delays() -> list[tuple[int, str]]:
    return [(delay, when) for delay, whens in DELAYS.items() for when in whens]


def _shuffled(items: Sequence[T], rng: Random) -> list[T]:
    # random() is the only method of Random with the same sequence in every Python version.
    return sorted(items, key=lambda _: rng.random())
