"""The Python objects passed to `whet.train` and `whet.resume` in addition to a config."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from whet.config.placeholder import is_object_name, make_placeholder
from whet.data.sources.splits import SPLIT_ALIASES
from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.data.sources.python_rows import PythonRows

Function = Callable[..., Any]  # Any: the return value of a user's function
_SPLIT_OF = {alias: split for split, aliases in SPLIT_ALIASES.items() for alias in aliases}


@dataclass(frozen=True)
class Given:
    """Python objects by name. The config of the run has a placeholder for each of them."""

    data: Mapping[str, "PythonRows"] = field(default_factory=dict)
    rewards: Mapping[str, Function] = field(default_factory=dict)
    metrics: Mapping[str, Function] = field(default_factory=dict)
    objective: object | None = None

    def __bool__(self) -> bool:
        return bool(self.data or self.rewards or self.metrics or self.objective is not None)

    def named(self) -> dict[str, dict[str, object]]:
        """Return the objects by argument ("data", "rewards", "metrics", "objective"), then by name."""
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
    """Validate and collect the objects passed to `whet.train` or `whet.resume`.

    Args:
        data: Records, or a mapping of names to records: a list of dicts, a `datasets.Dataset`, a pandas
            DataFrame, or a function that yields dicts. Records without a name are training records.
        rewards: Functions of (prompt, completion, record), by name.
        metrics: Functions of (answers, records), by name.
        objective: An `Objective`, or a subclass of `Objective` or `Recipe`.

    Raises:
        ConfigError: An argument has the wrong type, or a name is invalid or used twice.
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
        split = _SPLIT_OF.get(name, name)  # `validation` of a DatasetDict becomes `valid`
        if split in sources:
            raise ConfigError(f"data= has two sources for {split!r}: {', '.join(map(repr, by_name))}")
        _check_name("data", name)
        sources[split] = rows if isinstance(rows, PythonRows) else PythonRows(split, rows)
    return sources


def placeholder_of(name: str, value: object) -> str:
    """Return the placeholder of an object, with its name and its hash."""
    from whet.data.sources.python_rows import PythonRows
    from whet.given.object_digests import object_digest

    digest = value.digest() if isinstance(value, PythonRows) else object_digest(value)
    return make_placeholder(name, digest)


def _functions(argument: str, functions: object) -> dict[str, Function]:
    if not isinstance(functions, Mapping):
        items = [functions] if not isinstance(functions, Iterable) else list(functions)
        example = ", ".join(f"{n!r}: {n}" for n in (getattr(item, "__name__", "f") for item in items))
        raise ConfigError(
            f"{argument}= must be a mapping of names to functions, not {type(functions).__name__}",
            hint=f"{argument}={{{example}}}",
        )
    for name, function in functions.items():
        _check_name(argument, name)
        if not callable(function):
            raise ConfigError(f"{argument}={{{name!r}: ...}} is {type(function).__name__}, not a function")
    return dict(functions)


def _check_name(argument: str, name: object) -> None:
    if not isinstance(name, str) or not is_object_name(name):
        raise ConfigError(
            f"{argument}=: the name {name!r} may only contain letters, digits, '_', '.' and '-'"
        )


def _type_name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__
