"""The objects that `whet.train` and `whet.resume` are given beside a config."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from whet.config.placeholder import is_object_name, make_placeholder
from whet.data.sources.splits import NAMES
from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.data.sources.python_rows import PythonRows

Function = Callable[..., Any]  # Any: whatever a user's function returns
_SPLIT_OF = {alias: split for split, aliases in NAMES.items() for alias in aliases}


@dataclass(frozen=True)
class Given:
    """Objects passed from Python, by name; the config of the run has a placeholder for each."""

    data: Mapping[str, "PythonRows"] = field(default_factory=dict)
    rewards: Mapping[str, Function] = field(default_factory=dict)
    metrics: Mapping[str, Function] = field(default_factory=dict)
    objective: object | None = None

    def __bool__(self) -> bool:
        return bool(self.data or self.rewards or self.metrics or self.objective is not None)

    def named(self) -> dict[str, dict[str, object]]:
        """Return the objects by what they are given as, then by name."""
        objective = self.objective
        return {
            "data": dict(self.data),
            "rewards": dict(self.rewards),
            "metrics": dict(self.metrics),
            "objective": {} if objective is None else {_type_name(objective): objective},
        }


def collect_given(
    data: object = None,
    rewards: Mapping[str, Function] | None = None,
    metrics: Mapping[str, Function] | None = None,
    objective: object | None = None,
) -> Given:
    """Return what was passed to `whet.train` or `whet.resume`, checked.

    Args:
        data: records, or a mapping of names to records: a list of dicts, a `datasets.Dataset`, a pandas
            DataFrame, or a function that yields dicts. Records alone are those of `train`.
        rewards: functions of (prompt, completion, record), by name.
        metrics: functions of (answers, records), by name.
        objective: an Objective, or a class of objectives or recipes.
    """
    return Given(
        {} if data is None else _sources(data),
        _functions("rewards", rewards or {}),
        _functions("metrics", metrics or {}),
        objective,
    )


def _sources(data: object) -> "dict[str, PythonRows]":
    from whet.data.sources.python_rows import PythonRows

    by_name = data if isinstance(data, Mapping) else {"train": data}
    sources: dict[str, PythonRows] = {}
    for name, rows in by_name.items():
        own = _SPLIT_OF.get(name, name)  # of a DatasetDict, `validation`
        if own in sources:
            raise ConfigError(f"data= has two sources for {own!r}: {', '.join(map(repr, by_name))}")
        _check_name("data", name)
        sources[own] = rows if isinstance(rows, PythonRows) else PythonRows(own, rows)
    return sources


def placeholder_of(name: str, value: object) -> str:
    """Return the text that stands for an object in a config: its name and its hash."""
    from whet.data.sources.python_rows import PythonRows
    from whet.given.object_digests import object_digest

    digest = value.digest() if isinstance(value, PythonRows) else object_digest(value)
    return make_placeholder(name, digest)


def _functions(what: str, functions: object) -> dict[str, Function]:
    if not isinstance(functions, Mapping):
        shown = [functions] if not isinstance(functions, Iterable) else list(functions)
        names = ", ".join(f"{n!r}: {n}" for n in (getattr(each, "__name__", "f") for each in shown))
        raise ConfigError(
            f"{what}= must be a mapping of names to functions, not {type(functions).__name__}",
            hint=f"{what}={{{names}}}",
        )
    for name, function in functions.items():
        _check_name(what, name)
        if not callable(function):
            raise ConfigError(f"{what}={{{name!r}: ...}} is {type(function).__name__}, not a function")
    return dict(functions)


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not is_object_name(name):
        raise ConfigError(f"{what}=: the name {name!r} must have letters, digits, '_', '.' and '-' only")


def _type_name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__
