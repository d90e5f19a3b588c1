"""Loss weights of records, messages and parts of a message, validated and normalized."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from whet.errors import DataError, short_repr

PART_WEIGHTS = "whet:part_weights"  # [[characters, weight or None], ...] of a content that was given in parts
MARKS = frozenset(("weight", "train", PART_WEIGHTS))  # message fields for the loss, not for templates
_MAX_WEIGHT = 1e6


def normalize_weight(message: dict[str, Any], number: int) -> dict[str, Any]:  # Any: JSON values
    """Replace `train` and `weight` by one `weight` if it is not 1, and remove both otherwise."""
    if "weight" not in message and "train" not in message:
        return message
    weight = parse_weight(message.get("weight", 1), f"message {number}: weight")
    train = message.get("train", True)
    if not isinstance(train, bool):
        raise DataError(f"message {number}: train must be true or false, not {short_repr(train)}")
    rest = {name: value for name, value in message.items() if name not in ("weight", "train")}
    weight = weight if train else 0.0
    return rest if weight == 1 else {**rest, "weight": weight}


def parse_weight(value: Any, name: str) -> float:  # Any: a JSON value
    """Return a weight as a float; raise a DataError unless it is a number from 0 on."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value <= _MAX_WEIGHT:
        raise DataError(
            f"{name} must be a number from 0 to {_MAX_WEIGHT:,.0f}, not {short_repr(value)}",
            hint="0 makes a message context only, 1 is the default, 2 counts each of its tokens twice",
        )
    return float(value)


def part_weights(parts: Sequence[Mapping[str, Any]], number: int) -> list[list[float | None]] | None:
    """Return the length and weight of each part of a content, or None if no part has a weight.

    Any: JSON values. A part without a weight has that of its message, which is None here.
    """
    weights = [
        None
        if part.get("weight") is None
        else parse_weight(part["weight"], f"message {number}: weight of part {index}")
        for index, part in enumerate(parts, start=1)
    ]
    if all(weight is None for weight in weights):
        return None
    return [[len(part["text"]), weight] for part, weight in zip(parts, weights, strict=True)]


def record_weight(fields: Mapping[str, Any]) -> float:  # Any: JSON values
    """Return the `weight` of a record, 1 by default. CSV files have it as text."""
    value = fields.get("weight")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value) if value.strip() else None
    return 1.0 if value is None else parse_weight(value, "the weight of a record")


def has_part_weight(message: Mapping[str, Any]) -> bool:  # Any: JSON values
    """Return whether a part of the message has a weight above 0 of its own."""
    return any(weight for _, weight in message.get(PART_WEIGHTS, ()))
