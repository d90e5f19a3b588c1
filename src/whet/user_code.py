"""Functions that users wrote: imported by name, and called with the arguments that they have."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def load_user_object(reference: str, *, what: str = "function") -> Any:  # Any: whatever the reference names
    """Import the function or class that "package.module:name" or "path/to/file.py:name" names.

    Raises:
        ValueError: there is no such file, or it has no `what` of that name.
        Exception: whatever the module raises while it is imported.
    """
    place, _, name = reference.rpartition(":")
    module = _import(place)
    found = getattr(module, name, None)
    if callable(found):
        return found
    known = [
        n
        for n, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and not n.startswith("_")
    ]
    raise ValueError(f"{place} has no {what} {name!r} (it has: {', '.join(known) or 'none'})")


def importable_reference(function: object) -> str | None:
    """Return "module:name" where another process can import this very function by it; None where not."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or function.__closure__ or module in (None, "__main__"):
        return None
    known = getattr(sys.modules.get(str(module)), name, None)  # a nested name has dots: there is none
    return f"{module}:{name}" if known is function else None


def bind_arguments(
    function: Callable[..., Any],
    names: Sequence[str],
    arguments: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return a function of one value for each of `names`, in this order, that passes them on.

    They are passed by position. Where that would give a parameter the value of another one, or `function`
    takes fewer, they are passed by name, those that it has a parameter for. Any: what users pass and return.

    Args:
        function: what is called.
        names: what the values are called.
        arguments: further arguments, by name.

    Raises:
        ValueError: it cannot be called in either way.
    """
    more = dict(arguments or {})
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return lambda *values: function(*values, **more)
    wanted: list[str] | None = None
    try:
        bound = signature.bind(*names, **more).arguments
        if any(bound.get(name, name) != name for name in names):
            wanted = _parameters_among(names, signature)
    except TypeError as error:
        wanted = _parameters_among(names, signature)
        if not _can_be_called(signature, wanted, more):
            raise ValueError(f"it is called as {signature}: {error}") from None
    if wanted is None:
        return lambda *values: function(*values, **more)
    return lambda *values: function(
        **{name: value for name, value in zip(names, values, strict=True) if name in wanted}, **more
    )


def _parameters_among(names: Sequence[str], signature: inspect.Signature) -> list[str]:
    parameters = signature.parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return list(names)
    return [name for name in names if name in parameters]


def _can_be_called(signature: inspect.Signature, wanted: Sequence[str], more: Mapping[str, Any]) -> bool:
    # Any: what users pass
    try:
        signature.bind(**dict.fromkeys(wanted), **more)
    except TypeError:
        return False
    return bool(wanted)


def _import(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # for what stands beside it
    loaded = getattr(sys.modules.get(path.stem), "__file__", str(path))
    name = path.stem if loaded == str(path) else f"whet_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
