"""Strict JSON: no NaN, no lone surrogates, bounded nesting. Errors name the record."""

import json
import math
import re
from typing import Any

from whet.errors import DataError

JsonFields = dict[str, Any]  # Any: JSON values

MAX_DEPTH = 100  # of lists and objects; deeper values would overflow the stack of later code
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _parse_finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


DECODER = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_parse_finite)


def parse_json_bytes(raw: bytes, origin: str) -> Any:  # Any: a JSON value
    """Parse bytes as JSON. Errors are a DataError whose message starts with `origin`."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8 text ({error.reason} at byte {error.start + 1})") from error
    return parse_json_text(text, origin)


def parse_json_text(text: str, origin: str) -> Any:  # Any: a JSON value
    """Parse text as JSON. Errors are a DataError whose message starts with `origin`."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise to_data_error(error, origin, text=text) from error
    check_json_value(text, value, origin)
    return value


def to_data_error(error: ValueError | RecursionError, origin: str, *, text: str) -> DataError:
    """Convert an error of the decoder into a DataError that states the position and the cause."""
    if isinstance(error, RecursionError):
        return DataError(f"{origin}: nested too deeply")
    if "\0" in text:
        return DataError(
            f"{origin}: not valid JSON (it contains null bytes)",
            hint="the file is damaged, or not UTF-8 text",
        )
    if isinstance(error, json.JSONDecodeError):
        line = text.rstrip()
        column = error.colno if "\n" in line else min(error.pos, len(line)) + 1
        control = error.msg.startswith("Invalid control character")
        hint = "write a line break inside a string as \\n, and a tab as \\t" if control else None
        reason = error.msg.removesuffix(" at")
        return DataError(f"{origin}: not valid JSON ({reason} at column {column})", hint=hint)
    return DataError(f"{origin}: not valid JSON ({error})")  # for example a number with thousands of digits


def check_json_value(text: str, value: Any, origin: str) -> None:  # Any: a JSON value
    """Raise a DataError for valid JSON that later code cannot handle. Nearly free for ordinary records."""
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise DataError(f"{origin}: nested too deeply (more than {MAX_DEPTH} levels)")
    try:
        if "\\u" in text and _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        elif not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{origin}: not UTF-8 text (lone surrogate: {error.reason})") from error


def _depth(value: Any) -> int:  # Any: a JSON value
    """Return the nesting depth, computed without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def require_object(value: Any, origin: str) -> JsonFields:  # Any: a JSON value
    """Return a value that must be a JSON object."""
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a record must be a JSON object, not {type(value).__name__}")
    return value
