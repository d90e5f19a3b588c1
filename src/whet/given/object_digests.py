"""What tells one Python function or object from another: a hash of its source.

It covers the text of a function or class, comments included, its name, and of an instance and of
`functools.partial` the values that JSON can hold. It does not see what the code refers to: global variables,
variables of an enclosing function, other functions, and the modules that it imports.
"""

import functools
import hashlib
import inspect
import json
import textwrap
from types import CodeType, FunctionType, MethodType
from typing import Any


def object_digest(value: object) -> str:
    """Return the SHA-256 of a function, a class or an instance; the same in every process."""
    return hashlib.sha256("\n".join(_described(value)).encode(errors="backslashreplace")).hexdigest()


def _described(value: object) -> list[str]:
    if isinstance(value, functools.partial):
        return ["partial", *_described(value.func), _json(list(value.args)), _json(value.keywords)]
    if isinstance(value, MethodType):
        return ["method", *_described(value.__func__), *_described(value.__self__)]
    if isinstance(value, FunctionType):
        return ["function", *_function(value)]
    if inspect.isclass(value):
        return ["class", *_class(value)]
    if inspect.isbuiltin(value):
        return ["builtin", f"{value.__module__}.{value.__qualname__}"]
    return ["instance", *_class(type(value)), _json(_variables(value))]


def _function(function: FunctionType) -> list[str]:
    if function.__name__ == "<lambda>":  # its source is a line with whatever is around it
        return _code(function.__code__)
    return [_own_name(function), _source(function) or "\n".join(_code(function.__code__))]


def _class(kind: type) -> list[str]:
    if (source := _source(kind)) is not None:
        return [_own_name(kind), source]
    functions = {name: each for name, each in vars(kind).items() if isinstance(each, FunctionType)}
    return [_own_name(kind), *(line for name in sorted(functions) for line in _function(functions[name]))]


def _source(value: FunctionType | type) -> str | None:
    """Return the text of a definition; None where there is none, as after `exec`."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return None


def _own_name(value: FunctionType | type) -> str:
    """Return the qualified name, without the function that it was defined in."""
    return value.__qualname__.rpartition("<locals>.")[2]


def _code(code: CodeType) -> list[str]:
    """Return bytecode with its names and constants: the same in every process of one version of Python."""
    inner = [line for each in code.co_consts if isinstance(each, CodeType) for line in _code(each)]
    constants = [_constant(each) for each in code.co_consts if not isinstance(each, CodeType)]
    return [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames), *constants, *inner]


def _constant(value: object) -> str:
    if isinstance(value, frozenset):  # whose order is another one in each process
        return f"frozenset({sorted(map(repr, value))})"
    return repr(value)


def _variables(value: object) -> dict[str, Any]:  # Any: what JSON can hold
    return {name: each for name, each in getattr(value, "__dict__", {}).items() if _json(each) != ""}


def _json(value: object) -> str:
    """Return a value as JSON, or an empty text where JSON has no such value."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""
