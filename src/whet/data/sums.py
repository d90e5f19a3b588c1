"""Sums up to 99, written as `17+25=42`: small enough to be learned by a model of a million parameters."""

from random import Random
from typing import Any, Literal

from whet.errors import DataError

LARGEST = 99
VALID = 500  # of all 5,050 sums, kept apart


def sums(split: Literal["train", "valid"], n: int) -> list[dict[str, Any]]:  # records are JSON objects
    """The first `n` sums of a split, each once, in an order that looks random."""
    every = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1 - a)]
    Random(0).shuffle(every)
    chosen = every[:VALID] if split == "valid" else every[VALID:]
    if n > len(chosen):
        raise DataError(f"there are only {len(chosen):,} of them", hint=f"ask for at most {len(chosen)}")
    return [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in chosen[:n]]
