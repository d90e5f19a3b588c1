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
from whet.errors import DataError, shorten


class Generator(NamedTuple):
    """A source of made-up records: gives the first `n` of them, or raises DataError if it has fewer."""

    make: Callable[[int], list[dict[str, Any]]]  # records are JSON objects
    default_n: int
    version: str  # changes when the records it makes do
    make_seeded: Callable[[int, int], list[dict[str, Any]]] | None = None  # by number and seed


def _rows(make: Callable[..., list[dict[str, Any]]], split: str, *, default_n: int) -> Generator:
    """Return a generator of rows of numbers, which can be drawn with other seeds."""
    return Generator(
        lambda n: make(split, n), default_n, version="1", make_seeded=lambda n, seed: make(split, n, seed)
    )


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
    "quality": _rows(quality, "train", default_n=512),
    "quality-valid": _rows(quality, "valid", default_n=128),
    "regression": _rows(regression, "train", default_n=512),
    "regression-valid": _rows(regression, "valid", default_n=128),
}


def generate(spec: str) -> list[dict[str, Any]]:
    """Return the records that `synth:NAME[:N[:SEED]]` names."""
    name, n, seed = _parse(spec)
    generator = GENERATORS[name]
    try:
        if seed is not None and generator.make_seeded is not None:
            return generator.make_seeded(n, seed)
        return generator.make(n)
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
    seeded = [known for known, generator in GENERATORS.items() if generator.make_seeded is not None]
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
