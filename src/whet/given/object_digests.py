"""Digests that identify Python functions, classes and instances by their source code.

A digest covers the source of a function or class, including comments, its name, and the JSON-serializable
attributes of an instance or arguments of a `functools.partial`. It does not cover what the code refers to:
global variables, variables of an enclosing function, other functions and imported modules.
"""

import functools
import hashlib
import inspect
import json
import textwrap
from types import CodeType, FunctionType, MethodType
from typing import Any


def object_digest(value: object) -> str:
    """Return the SHA-256 of a function, a class or an instance, which is the same in every process."""
    return hashlib.sha256("\n".join(_describe(value)).encode(errors="backslashreplace")).hexdigest()


def _describe(value: object) -> list[str]:
    if isinstance(value, functools.partial):
        return ["partial", *_describe(value.func), _json(list(value.args)), _json(value.keywords)]
    if isinstance(value, MethodType):
        return ["method", *_describe(value.__func__), *_describe(value.__self__)]
    if isinstance(value, FunctionType):
        return ["function", *_function(value)]
    if inspect.isclass(value):
        return ["class", *_class(value)]
    if inspect.isbuiltin(value):
        return ["builtin", f"{value.__module__}.{value.__qualname__}"]
    return ["instance", *_class(type(value)), _json(_variables(value))]


def _function(function: FunctionType) -> list[str]:
    if function.__name__ == "<lambda>":  # getsource returns the entire line around it
        return _code(function.__code__)
    return [_local_name(function), _source(function) or "\n".join(_code(function.__code__))]


def _class(kind: type) -> list[str]:
    if (source := _source(kind)) is not None:
        return [_local_name(kind), source]
    functions = {name: value for name, value in vars(kind).items() if isinstance(value, FunctionType)}
    return [_local_name(kind), *(line for name in sorted(functions) for line in _function(functions[name]))]


def _source(value: FunctionType | type) -> str | None:
    """Return the source of a definition, or None if it has none, as after `exec`."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return None


def _local_name(value: FunctionType | type) -> str:
    """Return the qualified name without the enclosing function."""
    return value.__qualname__.rpartition("<locals>.")[2]


def _code(code: CodeType) -> list[str]:
    """Return the bytecode with its names and constants, which is the same for one version of Python."""
    inner = [line for value in code.co_consts if isinstance(value, CodeType) for line in _code(value)]
    constants = [_constant(value) for value in code.co_consts if not isinstance(value, CodeType)]
    return [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames), *constants, *inner]


def _constant(value: object) -> str:
    if isinstance(value, frozenset):  # its order differs between processes
        return f"frozenset({sorted(map(repr, value))})"
    return repr(value)


def _variables(value: object) -> dict[str, Any]:  # Any: JSON values
    attributes = getattr(value, "__dict__", {})
    return {name: item for name, item in attributes.items() if _json(item) != ""}


def _json(value: object) -> str:
    """Return a value as JSON, or an empty string if it is not serializable."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""
