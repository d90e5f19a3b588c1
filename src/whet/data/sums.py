"""Sums up to 99, written as `17+25=42`: a model of a hundred thousand weights can learn them."""

from random import Random
from typing import Any, Literal

from whet.errors import DataError

LARGEST = 99
VALID = 500  # of all 5,050 sums, kept apart
FORGOTTEN = 0.6  # share of the carries that careless sums forget


def sums(
    split: Literal["train", "valid"], n: int, *, careless: bool = False
) -> list[dict[str, Any]]:  # records are JSON objects
    """The first `n` sums of a split, each once, in an order that looks random.

    With `careless`, most of the sums that carry a ten forget it (27+26=43). Who learns from them knows when
    there is something to carry, and does it too rarely.
    """
    every = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1 - a)]
    Random(0).shuffle(every)
    chosen = every[:VALID] if split == "valid" else every[VALID:]
    if n > len(chosen):
        raise DataError(f"there are only {len(chosen):,} of them", hint=f"ask for at most {len(chosen)}")
    slips = Random(1)
    answers = [
        a + b - (10 if careless and slips.random() < FORGOTTEN and a % 10 + b % 10 >= 10 else 0)
        for a, b in chosen[:n]
    ]
    return [
        {"prompt": f"{a}+{b}=", "completion": str(answer)}
        for (a, b), answer in zip(chosen[:n], answers, strict=True)
    ]
