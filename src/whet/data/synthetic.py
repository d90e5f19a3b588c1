"""Data that needs no file, made up or found on every machine, named by a spec such as `synth:house:400`."""

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple

from whet.data.house import house
from whet.data.house_pairs import disputes, house_pairs, house_styles
from whet.data.python_topics import PYTHON, python_topics
from whet.data.quality import quality, regression
from whet.data.shell_safety import shell_faults, shell_safety
from whet.data.sums import sums
from whet.errors import DataError


class Generator(NamedTuple):
    """A source of made-up records: gives the first `n` of them, or raises DataError if it has fewer."""

    make: Callable[[int], list[dict[str, Any]]]  # records are JSON objects
    default_n: int
    version: str  # changes when the records it makes do


GENERATORS: dict[str, Generator] = {
    "house": Generator(lambda n: house("train", n), default_n=400, version="1"),
    "house-valid": Generator(lambda n: house("valid", n), default_n=40, version="1"),
    "house-test": Generator(lambda n: house("test", n), default_n=200, version="1"),
    "house-pairs": Generator(lambda n: house_pairs("train", n), default_n=200, version="1"),
    "house-pairs-valid": Generator(lambda n: house_pairs("valid", n), default_n=40, version="1"),
    "house-styles": Generator(lambda n: house_styles("train", n), default_n=400, version="1"),
    "house-styles-valid": Generator(lambda n: house_styles("valid", n), default_n=40, version="1"),
    "disputes": Generator(lambda n: disputes(n, swapped=False), default_n=16, version="1"),
    "disputes-swapped": Generator(lambda n: disputes(n, swapped=True), default_n=16, version="1"),
    "shell-safety": Generator(lambda n: shell_safety("train", n), default_n=4000, version="3"),
    "shell-safety-valid": Generator(lambda n: shell_safety("valid", n), default_n=300, version="3"),
    "shell-faults": Generator(lambda n: shell_faults("train", n), default_n=3000, version="3"),
    "shell-faults-valid": Generator(lambda n: shell_faults("valid", n), default_n=300, version="3"),
    "sums": Generator(lambda n: sums("train", n), default_n=4550, version="1"),
    "sums-careless": Generator(lambda n: sums("train", n, careless=True), default_n=4550, version="1"),
    "sums-valid": Generator(lambda n: sums("valid", n), default_n=500, version="1"),
    "python-topics": Generator(lambda n: python_topics("train", n), default_n=1, version=PYTHON),
    "python-topics-valid": Generator(lambda n: python_topics("valid", n), default_n=1, version=PYTHON),
    "quality": Generator(lambda n: quality("train", n), default_n=512, version="1"),
    "quality-valid": Generator(lambda n: quality("valid", n), default_n=128, version="1"),
    "regression": Generator(lambda n: regression("train", n), default_n=512, version="1"),
    "regression-valid": Generator(lambda n: regression("valid", n), default_n=128, version="1"),
}


def generate(spec: str) -> list[dict[str, Any]]:
    """The records that `synth:NAME[:N]` names."""
    name, n = _parse(spec)
    try:
        return GENERATORS[name].make(n)
    except DataError as error:
        raise DataError(f"{spec!r}: {error.message}", hint=error.hint) from None


def identity(spec: str) -> str:
    """What tells the records of a spec from others, without making them."""
    name, n = _parse(spec)
    return f"synth:{name}:{n} version {GENERATORS[name].version}"


def _parse(spec: str) -> tuple[str, int]:
    scheme, _, rest = spec.partition(":")
    name, colon, count = rest.partition(":")
    if scheme != "synth":
        raise DataError(f"{spec!r} is not a synthetic source", hint="write synth:NAME or synth:NAME:N")
    if name not in GENERATORS:
        raise DataError(f"{spec!r}: no synthetic source is called {name!r}", hint=_suggestion(name))
    return name, _positive(count, spec) if colon else GENERATORS[name].default_n


def _positive(count: str, spec: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,11}", count):
        wanted = "a positive whole number of at most 12 digits"
        raise DataError(f"{spec!r}: the number of records must be {wanted}, not {count!r}")
    return int(count)


def _suggestion(name: str) -> str:
    near = get_close_matches(name, GENERATORS, n=1)
    known = f"known ones: {', '.join(GENERATORS)}"
    return f"did you mean {near[0]!r}? {known}" if near else known
