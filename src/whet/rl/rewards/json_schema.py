"""Validation of JSON values against a subset of JSON Schema.

Supported keywords: type, enum, const; properties, required, additionalProperties; items, minItems, maxItems;
minLength, maxLength, pattern; minimum, maximum, exclusiveMinimum, exclusiveMaximum; anyOf, allOf, oneOf, not.
Other keywords raise an error, because ignoring a rule would reward completions that violate it.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any] | bool  # Any: JSON values

_SUBSCHEMA = ("additionalProperties", "items", "not")
_SUBSCHEMA_LISTS = ("anyOf", "allOf", "oneOf")
_KEYWORDS = (
    *("type", "enum", "const", "properties", "required", "minItems", "maxItems", "minLength", "maxLength"),
    *("pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *_SUBSCHEMA,
    *_SUBSCHEMA_LISTS,
)
_ANNOTATIONS = frozenset(("$schema", "$id", "$comment", "title", "description", "default", "examples"))
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
    """Parse strict JSON; raise ValueError for NaN, infinities and numbers that overflow a float."""
    return json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _parse_finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} is too large for a float")
    return number


def check_schema(schema: Schema) -> None:
    """Raise ValueError for a schema with keywords, types or patterns that `is_valid` does not support."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, true or false, not {schema!r}")
    if unknown := sorted(set(schema) - {*_KEYWORDS, *_ANNOTATIONS}):
        raise ValueError(
            f"the keyword {unknown[0]!r} is not supported; supported keywords are {', '.join(_KEYWORDS)}"
        )
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        if name not in _TYPES:
            raise ValueError(f"unknown type {name!r}; the types are {', '.join(_TYPES)}")
    if "pattern" in schema:
        re.compile(schema["pattern"])
    for subschema in _subschemas(schema):
        check_schema(subschema)


def _subschemas(schema: dict[str, Any]) -> Iterator[Schema]:  # Any: JSON values
    yield from schema.get("properties", {}).values()
    yield from (schema[name] for name in _SUBSCHEMA if name in schema)
    for name in _SUBSCHEMA_LISTS:
        yield from schema.get(name, [])


def is_valid(value: Any, schema: Schema) -> bool:  # Any: a JSON value
    """Return whether a JSON value is valid under a schema."""
    if isinstance(schema, bool):
        return schema
    return (
        _has_type(value, schema.get("type"))
        and ("enum" not in schema or any(_equals(value, each) for each in schema["enum"]))
        and ("const" not in schema or _equals(value, schema["const"]))
        and _satisfies_combinators(value, schema)
        and (not isinstance(value, dict) or _is_valid_object(value, schema))
        and (not isinstance(value, list) or _is_valid_array(value, schema))
        and (not isinstance(value, str) or _is_valid_string(value, schema))
        and (not _is_number(value) or _is_valid_number(value, schema))
    )


def _has_type(value: Any, types: str | list[str] | None) -> bool:  # Any: a JSON value
    if types is None:
        return True
    return any(_is_instance(value, name) for name in ([types] if isinstance(types, str) else types))


def _is_instance(value: Any, name: str) -> bool:  # Any: a JSON value
    if name in ("number", "integer"):
        return _is_number(value) and (name == "number" or value == int(value))
    return isinstance(value, _TYPES[name])


def _is_number(value: Any) -> bool:  # Any: a JSON value
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equals(a: Any, b: Any) -> bool:  # Any: JSON values
    """Compare as JSON does: 1 equals 1.0, but does not equal true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equals, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equals(a[key], b[key]) for key in a)
    return bool(a == b)


def _satisfies_combinators(value: Any, schema: dict[str, Any]) -> bool:  # Any: JSON values
    return (
        all(is_valid(value, each) for each in schema.get("allOf", []))
        and ("anyOf" not in schema or any(is_valid(value, each) for each in schema["anyOf"]))
        and ("oneOf" not in schema or sum(is_valid(value, each) for each in schema["oneOf"]) == 1)
        and ("not" not in schema or not is_valid(value, schema["not"]))
    )


def _is_valid_object(value: dict[str, Any], schema: dict[str, Any]) -> bool:  # Any: JSON values
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(name in value for name in schema.get("required", [])) and all(
        is_valid(item, properties.get(name, additional)) for name, item in value.items()
    )


def _is_valid_array(value: list[Any], schema: dict[str, Any]) -> bool:  # Any: JSON values
    has_valid_size = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    return has_valid_size and all(is_valid(item, schema.get("items", True)) for item in value)


def _is_valid_string(value: str, schema: dict[str, Any]) -> bool:  # Any: JSON values
    has_valid_size = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return has_valid_size and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)


def _is_valid_number(value: float, schema: dict[str, Any]) -> bool:  # Any: JSON values
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )
