"""The demo task: short spoken commands for a house and the one JSON action each of them means.

Everything here is made up from the tables below and a seed: no outside text, no files.
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
    """What a device is called in speech, and what it can do."""

    names: tuple[str, ...]
    actions: tuple[str, ...]


class Way(NamedTuple):
    """One way to say an action: as an order, as a gerund and as a wish; `{}` is the device."""

    do: str
    doing: str
    done: str


# The value in the JSON, and the words that mean it.
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

# Minutes, and the words that mean them. A command that says nothing of time has the delay 0.
DELAYS: dict[int, tuple[str, ...]] = {
    5: ("in 5 minutes", "in five minutes"),
    10: ("in 10 minutes", "in ten minutes"),
    15: ("in 15 minutes", "in a quarter of an hour", "after a quarter of an hour"),
    20: ("in 20 minutes", "in twenty minutes"),
    30: ("in 30 minutes", "in half an hour", "after half an hour"),
}

# A template without a {room} of its own says the room with the device: "the kitchen light".
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

# Kept out of training: they ask whether the task was learnt or only its phrasings.
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

# Of ten hash buckets of sentences, the ones that belong to each split.
BUCKETS: dict[HouseSplit, range] = {"train": range(7), "valid": range(7, 8), "test": range(8, 10)}

# One test command in five has an unseen template.
UNSEEN_EVERY = 5

# How many candidates of a template are drawn with all words equally often, before the rest in any order.
BALANCED_DRAWS = 500


@dataclass(frozen=True)
class Command:
    """One command: its meaning and the words chosen to say it."""

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
        """The command as it is spoken."""
        thing = (
            f"the {self.device_name}"
            if "{room}" in self.template
            else f"the {self.room_name} {self.device_name}"
        )
        said = self.template.format(
            do=self.way.do.format(thing),
            doing=self.way.doing.format(thing),
            done=self.way.done.format(thing),
            room=self.room_name,
            when=self.when,
        )
        return said[0].upper() + said[1:]

    def answer(self) -> str:
        """The JSON action that the command means."""
        meaning = {"room": self.room, "device": self.device, "action": self.action, "delay": self.delay}
        return json.dumps(meaning, separators=(",", ":"))


class _Decks:
    """Decks of cards: each card of a deck comes once before any of them comes again."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.decks: dict[Hashable, list[Any]] = {}  # the cards of a deck are of any one type

    def draw(self, name: Hashable, cards: Sequence[T]) -> T:
        """The next card of the named deck."""
        deck = self.decks.setdefault(name, [])
        if not deck:
            deck.extend(_shuffled(cards, self.rng))
        card: T = deck.pop()
        return card


def house(split: HouseSplit, n: int) -> list[HouseRecord]:
    """The first `n` records of a split; no sentence is in two splits, or twice in one."""
    records = list(islice(_records(split), n))
    if len(records) < n:
        raise DataError(
            f"{n} house commands wanted, but the {split} split has only {len(records)}",
            hint=f"ask for {len(records)} or fewer",
        )
    return records


def split_of(sentence: str) -> HouseSplit:
    """The one split that a sentence belongs to, whatever its case and punctuation."""
    words = " ".join(re.findall(r"[a-z0-9']+", sentence.lower()))
    bucket = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") % 10
    return next(split for split, buckets in BUCKETS.items() if bucket in buckets)


def commands(templates: Sequence[str]) -> Iterator[Command]:
    """Every command that the templates can say."""
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
    # Of all of Random, only random() promises the same sequence in every version of Python.
    return sorted(items, key=lambda _: rng.random())
