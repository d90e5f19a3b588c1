"""Keys of an objective of the user's own. They are kept as they are: reading a config imports nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from whet.config.placeholder import parse_placeholder
from whet.config.section import ObjectiveSection
from whet.errors import shown


class CustomObjective(ObjectiveSection):
    """An objective or a recipe of your own, see docs/python.md; any other keys are arguments of its class."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(
        description="package.module:Class, path/to/file.py:Class, or python:NAME for one passed from Python"
    )

    @property
    def arguments(self) -> dict[str, Any]:  # Any: JSON values
        """Every key but `kind`."""
        return dict(self.model_extra or {})

    @field_validator("kind")
    @classmethod
    def _names_a_class(cls, kind: str) -> str:
        module, _, name = kind.rpartition(":")
        if parse_placeholder(kind) is None and (not module or not name):
            raise ValueError(f"{kind!r} names no class: write package.module:Class or path/to/file.py:Class")
        if module == "__main__":
            raise ValueError(
                f"{kind!r} cannot be imported: put the class in a file, or pass it, "
                f"whet.train(config, objective={name}(...))"
            )
        return kind

    @model_validator(mode="before")
    @classmethod
    def _holds_plain_values(cls, values: Any) -> Any:  # Any: not yet checked
        if isinstance(values, Mapping):
            for key, value in _odd(values, ""):
                raise ValueError(
                    f"{key} is {shown(value)}: a config holds texts, numbers, lists and mappings"
                )
        return values


def is_custom_kind(kind: object) -> bool:
    """Return whether a kind names somebody's class: those of whet have no colon."""
    return isinstance(kind, str) and ":" in kind


def _odd(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield the values that are not plain, by their key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _odd(inner, f"{key}.{name}" if key else str(name))
            if not isinstance(name, str):
                yield key or "a key", name
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _odd(inner, f"{key}.{index}")
    elif value is not None and not isinstance(value, str | int | float | bool):
        yield key, value
