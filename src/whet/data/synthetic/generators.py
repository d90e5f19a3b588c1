"""Data without a file, named by a spec such as `synth:house:400`: the registry, sums and Python topics."""

import platform
import re
from collections.abc import Mapping
from difflib import get_close_matches
from random import Random
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from whet.errors import DataError, shorten
from whet.lazy_import import load_object

_LARGEST_SUM = 99
_VALID_SUMS = 500  # of all 5,050 sums, kept apart
_FORGOTTEN_CARRIES = 0.6  # share of the carries that careless sums forget
_TRAIN_SHARE = 0.9


class Generator(NamedTuple):
    """A source of made-up records: gives the first `n` of them, or raises DataError if it has fewer."""

    make: str  # "module:function", called with the arguments and n, and for some with a seed after it
    arguments: tuple[str, ...]
    default_n: int
    version: str = "1"  # changes when the records it makes do
    keywords: Mapping[str, bool] = MappingProxyType({})
    is_seeded: bool = False

    def records(self, n: int, *seed: int) -> list[dict[str, Any]]:
        """Return the first `n` records, which are JSON objects."""
        records: list[dict[str, Any]] = load_object(self.make)(*self.arguments, n, *seed, **self.keywords)
        return records


_HOUSE = "whet.data.synthetic.house:house"
_PAIRS = "whet.data.synthetic.house_pairs:house_pairs"
_STYLES = "whet.data.synthetic.house_pairs:house_styles"
_DISPUTES = "whet.data.synthetic.house_pairs:disputes"
_SAFETY = "whet.data.synthetic.shell_safety:shell_safety"
_FAULTS = "whet.data.synthetic.shell_safety:shell_faults"
_SUMS = "whet.data.synthetic.generators:sums"
_TOPICS = "whet.data.synthetic.generators:python_topics"
_QUALITY = "whet.recipes.quality.synthetic_rows:quality"
_REGRESSION = "whet.recipes.quality.synthetic_rows:regression"
PYTHON = f"Python {platform.python_version()}"  # the text changes with it

GENERATORS: dict[str, Generator] = {
    "house": Generator(_HOUSE, ("train",), 400),
    "house-valid": Generator(_HOUSE, ("valid",), 40),
    "house-test": Generator(_HOUSE, ("test",), 200),
    "house-pairs": Generator(_PAIRS, ("train",), 200),
    "house-pairs-valid": Generator(_PAIRS, ("valid",), 40),
    "house-styles": Generator(_STYLES, ("train",), 400),
    "house-styles-valid": Generator(_STYLES, ("valid",), 40),
    "disputes": Generator(_DISPUTES, (), 16, keywords={"swapped": False}),
    "disputes-swapped": Generator(_DISPUTES, (), 16, keywords={"swapped": True}),
    "shell-safety": Generator(_SAFETY, ("train",), 4000, version="3"),
    "shell-safety-valid": Generator(_SAFETY, ("valid",), 300, version="3"),
    "shell-faults": Generator(_FAULTS, ("train",), 3000, version="3"),
    "shell-faults-valid": Generator(_FAULTS, ("valid",), 300, version="3"),
    "sums": Generator(_SUMS, ("train",), 4550),
    "sums-careless": Generator(_SUMS, ("train",), 4550, keywords={"careless": True}),
    "sums-valid": Generator(_SUMS, ("valid",), 500),
    "python-topics": Generator(_TOPICS, ("train",), 1, version=PYTHON),
    "python-topics-valid": Generator(_TOPICS, ("valid",), 1, version=PYTHON),
    "quality": Generator(_QUALITY, ("train",), 512, is_seeded=True),
    "quality-valid": Generator(_QUALITY, ("valid",), 128, is_seeded=True),
    "regression": Generator(_REGRESSION, ("train",), 512, is_seeded=True),
    "regression-valid": Generator(_REGRESSION, ("valid",), 128, is_seeded=True),
}


def generate(spec: str) -> list[dict[str, Any]]:
    """Return the records that `synth:NAME[:N[:SEED]]` names."""
    name, n, seed = _parse(spec)
    generator = GENERATORS[name]
    try:
        return generator.records(n) if seed is None else generator.records(n, seed)
    except DataError as error:
        raise DataError(f"{spec!r}: {error.message}", hint=error.hint) from None


def identity(spec: str) -> str:
    """What tells the records of a spec from others, without making them."""
    name, n, seed = _parse(spec)
    seeded = "" if seed is None else f":{seed}"
    return f"synth:{name}:{n}{seeded} version {GENERATORS[name].version}"


def _parse(spec: str) -> tuple[str, int, int | None]:
    scheme, _, rest = spec.partition(":")
    name, *numbers = rest.split(":", 2)
    if scheme != "synth":
        raise DataError(f"{spec!r} is not a synthetic source", hint="write synth:NAME or synth:NAME:N")
    if name not in GENERATORS:
        raise DataError(f"{spec!r}: no synthetic source is called {name!r}", hint=_suggestion(name))
    n = _positive(numbers[0], spec) if numbers else GENERATORS[name].default_n
    return name, n, _seed(numbers[1], name, spec) if len(numbers) > 1 else None


def _seed(seed: str, name: str, spec: str) -> int:
    seeded = [known for known, generator in GENERATORS.items() if generator.is_seeded]
    if name not in seeded:
        raise DataError(
            f"{spec!r}: {name} takes no seed",
            hint=f"those that do: {', '.join(seeded)}; write synth:{name}:N",
        )
    if not re.fullmatch(r"[0-9]{1,20}", seed) or int(seed) >= 2**64:
        raise DataError(f"{spec!r}: the seed must be a whole number from 0 to 2**64 - 1, not {seed!r}")
    return int(seed)


def _positive(count: str, spec: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,11}", count):
        wanted = "a positive whole number of at most 12 digits"
        raise DataError(f"{shorten(spec)!r}: the number of records must be {wanted}, not {shorten(count)!r}")
    return int(count)


def _suggestion(name: str) -> str:
    near = get_close_matches(name, GENERATORS, n=1)
    known = f"known ones: {', '.join(GENERATORS)}"
    return f"did you mean {near[0]!r}? {known}" if near else known


def sums(
    split: Literal["train", "valid"], n: int, *, careless: bool = False
) -> list[dict[str, Any]]:  # records are JSON objects
    """The first `n` sums of a split, each once, in an order that looks random.

    With `careless`, most of the sums that carry a ten forget it (27+26=43). Who learns from them knows when
    there is something to carry, and does it too rarely.
    """
    every = [(a, b) for a in range(_LARGEST_SUM + 1) for b in range(_LARGEST_SUM + 1 - a)]
    Random(0).shuffle(every)
    chosen = every[:_VALID_SUMS] if split == "valid" else every[_VALID_SUMS:]
    if n > len(chosen):
        raise DataError(f"there are only {len(chosen):,} of them", hint=f"ask for at most {len(chosen)}")
    slips = Random(1)
    answers = [
        a + b - (10 if careless and slips.random() < _FORGOTTEN_CARRIES and a % 10 + b % 10 >= 10 else 0)
        for a, b in chosen[:n]
    ]
    return [
        {"prompt": f"{a}+{b}=", "completion": str(answer)}
        for (a, b), answer in zip(chosen[:n], answers, strict=True)
    ]


def python_topics(split: Literal["train", "valid"], n: int) -> list[dict[str, str]]:
    """The first 90% of the bytes of the topics in Python's help as one text, or the last 10%."""
    from pydoc_data.topics import topics

    if n != 1:
        raise DataError(f"it is one text, not {n}")
    text = "\n".join(topics.values())
    boundary = len(text.encode()[: int(len(text.encode()) * _TRAIN_SHARE)].decode(errors="ignore"))
    return [{"text": text[:boundary] if split == "train" else text[boundary:]}]
