"""JSON as its standard has it: no NaN, no half characters, no nesting without end; errors name the record."""

import json
import math
import re
from typing import Any

from whet.errors import DataError

JsonFields = dict[str, Any]  # Any: JSON values

MAX_DEPTH = 100  # of lists and objects; deeper ones would overflow the stack of whatever handles them later
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def parse(raw: bytes, origin: str) -> Any:  # Any: a JSON value
    """The value of some bytes, or a DataError that begins with `origin`."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8 text ({error.reason} at byte {error.start + 1})") from error
    return parse_text(text, origin)


def parse_text(text: str, origin: str) -> Any:  # Any: a JSON value
    """The value of a text, or a DataError that begins with `origin`."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise explained(error, origin, text=text) from error
    check(text, value, origin)
    return value


def explained(error: ValueError | RecursionError, origin: str, *, text: str) -> DataError:
    """What the decoder stumbled over."""
    if isinstance(error, RecursionError):
        return DataError(f"{origin}: nested too deeply")
    if "\0" in text:
        return DataError(
            f"{origin}: not valid JSON (it holds null bytes)", hint="the file is damaged, or not UTF-8 text"
        )
    if isinstance(error, json.JSONDecodeError):
        line = text.rstrip()
        column = error.colno if "\n" in line else min(error.pos, len(line)) + 1
        control = error.msg.startswith("Invalid control character")
        hint = "write a line break inside a string as \\n, and a tab as \\t" if control else None
        what = error.msg.removesuffix(" at")
        return DataError(f"{origin}: not valid JSON ({what} at column {column})", hint=hint)
    return DataError(f"{origin}: not valid JSON ({error})")  # a number of thousands of digits, say


def check(text: str, value: Any, origin: str) -> None:  # Any: a JSON value
    """Refuse what JSON allows and nothing afterwards can handle; nearly free for ordinary records."""
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise DataError(f"{origin}: nested too deeply (more than {MAX_DEPTH} levels)")
    try:
        if "\\u" in text and _HALF_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        elif not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{origin}: not UTF-8 text (half of a character: {error.reason})") from error


def _depth(value: Any) -> int:  # Any: a JSON value
    """Levels of nesting, counted without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def record(value: Any, origin: str) -> JsonFields:  # Any: a JSON value
    """A value that must be an object."""
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a record must be a JSON object, not {type(value).__name__}")
    return value
