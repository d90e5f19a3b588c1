"""User functions: import them by name, and match call arguments to their parameters."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def load_user_object(reference: str, *, kind: str = "function") -> Any:  # Any: the referenced object
    """Import a function or class by reference.

    Args:
        reference: "package.module:name" or "path/to/file.py:name".
        kind: The word for the object in error messages.

    Raises:
        ValueError: The file does not exist, or the module has no callable of that name.
        Exception: Any error that the module raises while it is imported.
    """
    location, _, name = reference.rpartition(":")
    module = _import_module(location)
    value = getattr(module, name, None)
    if callable(value):
        return value
    known = [
        n
        for n, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and not n.startswith("_")
    ]
    raise ValueError(f"{location} has no {kind} {name!r} (it has: {', '.join(known) or 'none'})")


def find_import_reference(function: object) -> str | None:
    """Return the "module:name" by which another process can import this function, or None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or function.__closure__ or module in (None, "__main__"):
        return None
    known = getattr(sys.modules.get(str(module)), name, None)  # None for nested names, which have dots
    return f"{module}:{name}" if known is function else None


def bind_arguments(
    function: Callable[..., Any],
    names: Sequence[str],
    arguments: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Adapt a user function to positional values with known names.

    The returned function takes one value for each of `names`, in this order, and passes them by position. If
    that would assign a value to a parameter of another name, or if `function` has fewer parameters, it passes
    by name those values that `function` has a parameter for.

    Args:
        function: The user function. Any: its parameters and return value are up to the user.
        names: The names of the values.
        arguments: Further arguments, passed by name.

    Raises:
        ValueError: The function cannot be called in either way.
    """
    keywords = dict(arguments or {})
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return lambda *values: function(*values, **keywords)
    passed_by_name: list[str] | None = None
    try:
        bound = signature.bind(*names, **keywords).arguments
        if any(bound.get(name, name) != name for name in names):
            passed_by_name = _accepted_names(names, signature)
    except TypeError as error:
        passed_by_name = _accepted_names(names, signature)
        if not _can_be_called(signature, passed_by_name, keywords):
            raise ValueError(f"its signature is {signature}: {error}") from None
    if passed_by_name is None:
        return lambda *values: function(*values, **keywords)
    return lambda *values: function(
        **{name: value for name, value in zip(names, values, strict=True) if name in passed_by_name},
        **keywords,
    )


def _accepted_names(names: Sequence[str], signature: inspect.Signature) -> list[str]:
    parameters = signature.parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(names)
    return [name for name in names if name in parameters]


def _can_be_called(
    signature: inspect.Signature,
    names: Sequence[str],
    keywords: Mapping[str, Any],  # Any: arguments of a user's function
) -> bool:
    try:
        signature.bind(**dict.fromkeys(names), **keywords)
    except TypeError:
        return False
    return bool(names)


def _import_module(location: str) -> ModuleType:
    if not location.endswith(".py"):
        return importlib.import_module(location)
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # for imports of its neighbors
    loaded = getattr(sys.modules.get(path.stem), "__file__", str(path))
    name = path.stem if loaded == str(path) else f"whet_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
