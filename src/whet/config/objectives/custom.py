"""Config keys of a custom objective. They are stored unchanged: reading a config imports no user code."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from whet.config.placeholder import parse_placeholder
from whet.config.section import ObjectiveSection
from whet.errors import short_repr


class CustomObjective(ObjectiveSection):
    """A custom objective or recipe (docs/python.md). All other keys are arguments of its class."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(
        description="custom class: package.module:Class, path/to/file.py:Class, or python:NAME for one "
        "passed from Python"
    )

    @property
    def arguments(self) -> dict[str, Any]:  # Any: JSON values
        """The arguments of the class: every key except `kind`."""
        return dict(self.model_extra or {})

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        module, _, name = kind.rpartition(":")
        if parse_placeholder(kind) is None and (not module or not name):
            raise ValueError(
                f"{kind!r} does not name a class: write package.module:Class or path/to/file.py:Class"
            )
        if module == "__main__":
            raise ValueError(
                f"{kind!r} cannot be imported: put the class in a file, or pass it as an argument, "
                f"whet.train(config, objective={name}(...))"
            )
        return kind

    @model_validator(mode="before")
    @classmethod
    def _check_plain_values(cls, values: Any) -> Any:  # Any: not yet validated
        if isinstance(values, Mapping):
            for key, value in _unsupported(values, ""):
                raise ValueError(
                    f"{key} is {short_repr(value)}: a config can only contain strings, numbers, booleans, "
                    "null, lists and mappings"
                )
        return values


def is_custom_kind(kind: object) -> bool:
    """Return whether an objective kind names a user's class; whet's kinds have no colon."""
    return isinstance(kind, str) and ":" in kind


def _unsupported(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield the key and value of everything that JSON cannot represent."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _unsupported(inner, f"{key}.{name}" if key else str(name))
            if not isinstance(name, str):
                yield key or "a key", name
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unsupported(inner, f"{key}.{index}")
    elif value is not None and not isinstance(value, str | int | float | bool):
        yield key, value
