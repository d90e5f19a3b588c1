"""JSON Schema, as much of it as describes the answers of a model.

type, enum, const; properties, required, additionalProperties; items, minItems, maxItems; minLength,
maxLength, pattern; minimum, maximum, exclusiveMinimum, exclusiveMaximum; anyOf, allOf, oneOf, not. Any other
keyword is refused: a rule that is passed over in silence would reward what it forbids.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any] | bool  # Any: JSON values

_ONE_INSIDE = ("additionalProperties", "items", "not")
_SEVERAL_INSIDE = ("anyOf", "allOf", "oneOf")
_KNOWN = (
    *("type", "enum", "const", "properties", "required", "minItems", "maxItems", "minLength", "maxLength"),
    *("pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *_ONE_INSIDE,
    *_SEVERAL_INSIDE,
)
_NOTES = frozenset(("$schema", "$id", "$comment", "title", "description", "default", "examples"))
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": (int, float),
    "boolean": bool,
    "null": type(None),
}


def parse(text: str) -> Any:  # Any: a JSON value
    """A JSON text, strictly: NaN and infinities are none."""
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} is too large for a number")
    return number


def refuse_unknown_keywords(schema: Schema) -> None:
    """Raise ValueError for whatever `is_valid` would not look at."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object or true or false, not {schema!r}")
    if unknown := sorted(set(schema) - {*_KNOWN, *_NOTES}):
        raise ValueError(f"the keyword {unknown[0]!r} is not supported; known are {', '.join(_KNOWN)}")
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _TYPES:
            raise ValueError(f"there is no type {kind!r}; there are {', '.join(_TYPES)}")
    if "pattern" in schema:
        re.compile(schema["pattern"])
    for inner in _inside(schema):
        refuse_unknown_keywords(inner)


def _inside(schema: dict[str, Any]) -> Iterator[Schema]:  # Any: JSON values
    yield from schema.get("properties", {}).values()
    yield from (schema[name] for name in _ONE_INSIDE if name in schema)
    for name in _SEVERAL_INSIDE:
        yield from schema.get(name, [])


def is_valid(value: Any, schema: Schema) -> bool:  # Any: a JSON value
    """Whether a schema allows a value."""
    if isinstance(schema, bool):
        return schema
    return (
        _has_type(value, schema.get("type"))
        and ("enum" not in schema or any(_same(value, each) for each in schema["enum"]))
        and ("const" not in schema or _same(value, schema["const"]))
        and _combined(value, schema)
        and (not isinstance(value, dict) or _object(value, schema))
        and (not isinstance(value, list) or _array(value, schema))
        and (not isinstance(value, str) or _string(value, schema))
        and (not _is_number(value) or _number(value, schema))
    )


def _has_type(value: Any, wanted: str | list[str] | None) -> bool:  # Any: a JSON value
    if wanted is None:
        return True
    kinds = [wanted] if isinstance(wanted, str) else wanted
    return any(_is_a(value, kind) for kind in kinds)


def _is_a(value: Any, kind: str) -> bool:  # Any: a JSON value
    if kind in ("number", "integer"):
        return _is_number(value) and (kind == "number" or value == int(value))
    return isinstance(value, _TYPES[kind])


def _is_number(value: Any) -> bool:  # Any: a JSON value
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:  # Any: JSON values
    """Equality of JSON: 1 is 1.0, and is not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _combined(value: Any, schema: dict[str, Any]) -> bool:  # Any: JSON values
    return (
        all(is_valid(value, each) for each in schema.get("allOf", []))
        and ("anyOf" not in schema or any(is_valid(value, each) for each in schema["anyOf"]))
        and ("oneOf" not in schema or sum(is_valid(value, each) for each in schema["oneOf"]) == 1)
        and ("not" not in schema or not is_valid(value, schema["not"]))
    )


def _object(value: dict[str, Any], schema: dict[str, Any]) -> bool:  # Any: JSON values
    properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(name in value for name in schema.get("required", [])) and all(
        is_valid(item, properties.get(name, other)) for name, item in value.items()
    )


def _array(value: list[Any], schema: dict[str, Any]) -> bool:  # Any: JSON values
    enough = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    return enough and all(is_valid(item, schema.get("items", True)) for item in value)


def _string(value: str, schema: dict[str, Any]) -> bool:  # Any: JSON values
    enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return enough and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)


def _number(value: float, schema: dict[str, Any]) -> bool:  # Any: JSON values
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )
