"""The registry of synthetic sources (`synth:house:400`), and the generators of sums and Python topics."""

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
_VALID_SUMS = 500  # of all 5,050 sums, held out for validation
_FORGOTTEN_CARRIES = 0.6  # share of carries that `careless` omits
_TRAIN_SHARE = 0.9


class Generator(NamedTuple):
    """A synthetic source. It yields its first `n` records, or raises a DataError if it has fewer."""

    make: str  # "module:function", called with the arguments, n and, if seeded, a seed
    arguments: tuple[str, ...]
    default_n: int
    version: str = "1"  # changes when the generated records change
    keywords: Mapping[str, bool] = MappingProxyType({})
    is_seeded: bool = False

    def records(self, n: int, *seed: int) -> list[dict[str, Any]]:
        """Return the first `n` records, as JSON objects."""
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
PYTHON = f"Python {platform.python_version()}"  # the text depends on the Python version

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
    """Return the records of the spec `synth:NAME[:N[:SEED]]`."""
    name, n, seed = _parse(spec)
    generator = GENERATORS[name]
    try:
        return generator.records(n) if seed is None else generator.records(n, seed)
    except DataError as error:
        raise DataError(f"{spec!r}: {error.message}", hint=error.hint) from None


def identity(spec: str) -> str:
    """Return a string that identifies the records of a spec, without generating them."""
    name, n, seed = _parse(spec)
    seeded = "" if seed is None else f":{seed}"
    return f"synth:{name}:{n}{seeded} version {GENERATORS[name].version}"


def _parse(spec: str) -> tuple[str, int, int | None]:
    scheme, _, rest = spec.partition(":")
    name, *numbers = rest.split(":", 2)
    if scheme != "synth":
        raise DataError(f"{spec!r} is not a synthetic source", hint="write synth:NAME or synth:NAME:N")
    if name not in GENERATORS:
        raise DataError(f"{spec!r}: there is no synthetic source {name!r}", hint=_name_hint(name))
    n = _parse_count(numbers[0], spec) if numbers else GENERATORS[name].default_n
    return name, n, _parse_seed(numbers[1], name, spec) if len(numbers) > 1 else None


def _parse_seed(seed: str, name: str, spec: str) -> int:
    seeded_names = [other for other, generator in GENERATORS.items() if generator.is_seeded]
    if name not in seeded_names:
        raise DataError(
            f"{spec!r}: {name} does not accept a seed",
            hint=f"sources with a seed: {', '.join(seeded_names)}; write synth:{name}:N",
        )
    if not re.fullmatch(r"[0-9]{1,20}", seed) or int(seed) >= 2**64:
        raise DataError(f"{spec!r}: the seed must be an integer from 0 to 2**64 - 1, not {seed!r}")
    return int(seed)


def _parse_count(count: str, spec: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,11}", count):
        expected = "a positive integer of at most 12 digits"
        raise DataError(
            f"{shorten(spec)!r}: the number of records must be {expected}, not {shorten(count)!r}"
        )
    return int(count)


def _name_hint(name: str) -> str:
    similar = get_close_matches(name, GENERATORS, n=1)
    known = f"known sources: {', '.join(GENERATORS)}"
    return f"did you mean {similar[0]!r}? {known}" if similar else known


def sums(
    split: Literal["train", "valid"], n: int, *, careless: bool = False
) -> list[dict[str, Any]]:  # records are JSON objects
    """Return the first `n` sums of a split, without repetitions, in shuffled order.

    With `careless`, most sums with a carry omit it (27+26=43). A model trained on them knows when to carry,
    but does so too rarely.
    """
    all_sums = [(a, b) for a in range(_LARGEST_SUM + 1) for b in range(_LARGEST_SUM + 1 - a)]
    Random(0).shuffle(all_sums)
    selected = all_sums[:_VALID_SUMS] if split == "valid" else all_sums[_VALID_SUMS:]
    if n > len(selected):
        raise DataError(f"there are only {len(selected):,} records", hint=f"request at most {len(selected)}")
    carry_rng = Random(1)
    answers = [
        a + b - (10 if careless and carry_rng.random() < _FORGOTTEN_CARRIES and a % 10 + b % 10 >= 10 else 0)
        for a, b in selected[:n]
    ]
    return [
        {"prompt": f"{a}+{b}=", "completion": str(answer)}
        for (a, b), answer in zip(selected[:n], answers, strict=True)
    ]


def python_topics(split: Literal["train", "valid"], n: int) -> list[dict[str, str]]:
    """Return the topics of Python's help as one text: the first 90% of its bytes, or the last 10%."""
    from pydoc_data.topics import topics

    if n != 1:
        raise DataError(f"the source has 1 record, not {n}")
    text = "\n".join(topics.values())
    boundary = len(text.encode()[: int(len(text.encode()) * _TRAIN_SHARE)].decode(errors="ignore"))
    return [{"text": text[:boundary] if split == "train" else text[boundary:]}]
