"""The base class of config sections, metadata of keys, and value types that several sections share."""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(gt=0)]
PrecisionName = Literal["auto", "fp32", "bf16", "bf16-pure", "fp16"]
Factor = Annotated[float, Field(ge=0, lt=1)]


def _steps_or_fraction(value: float) -> float:
    if value < 1 and value != 0:
        return value
    if value != int(value):
        raise ValueError("must be an integer number of steps, or a fraction of the run below 1")
    return int(value)


# an integer number of steps, or a fraction of the run's steps below 1
StepsOrFraction = Annotated[
    float, Field(ge=0), AfterValidator(_steps_or_fraction), PlainSerializer(lambda value: value)
]


def _as_text(value: Any) -> Any:  # Any: YAML values
    """Convert values that YAML parses as numbers or dates, and Python paths, back to text."""
    return str(value) if isinstance(value, int | float | datetime.date | Path) else value


Text = Annotated[str, BeforeValidator(_as_text)]


@dataclass(frozen=True)
class UsedWhen:
    """The condition under which a key has an effect: values of another key of its section.

    Without values, the condition is that the other key is not 0, false or null.
    """

    switch: str
    values: tuple[str, ...] = ()

    def matches(self, chosen: Sequence[object]) -> bool:
        """Return whether one of the chosen values fulfills the condition."""
        return any(value in self.values if self.values else value for value in chosen)


@dataclass(frozen=True)
class KeyInfo:
    """Metadata of a key, set as an annotation: `key: Annotated[int, KeyInfo(changes_loss=False)]`."""

    used_when: UsedWhen | None = None  # None: it always has an effect
    changes_loss: bool = True  # objective keys: losses of runs with different values are not comparable
    may_change_on_resume: bool = False


def key_info(field: FieldInfo) -> KeyInfo:
    """Return the KeyInfo of a field, or the default one."""
    return next((item for item in field.metadata if isinstance(item, KeyInfo)), KeyInfo())


class Section(BaseModel):
    """Base class of config sections: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:  # Any: validated here
        """Validate the keys; raise one ConfigError that lists every problem."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            from whet.config.checks.error_messages import config_error  # imports all sections

            raise config_error(error, type(self), origin=type(self).__name__) from error

    # pydantic then validates nested sections without calling __init__, and reports all errors at once
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls, values: Any) -> Any:  # Any: not yet validated
        """Replace booleans by text in numeric keys: pydantic would accept true as 1, but rejects text."""
        if not isinstance(values, dict):
            return values
        types = {
            field.alias or name: set(_types_in(field.annotation)) for name, field in cls.model_fields.items()
        }
        return {key: _guard_boolean(value, types.get(key, set())) for key, value in values.items()}


class ObjectiveSection(Section):
    """Base class of the `objective` sections, with properties of their kinds that other packages need."""

    default_targets: ClassVar[str] = "all-linear"  # of method.targets
    output: ClassVar[Literal["text", "class", "numbers"]] = "text"  # of the trained model
    # kinds whose loss is a mean over answers, texts or rows instead of tokens
    sequence_level_kinds: ClassVar[tuple[str, ...]] = ()


def _guard_boolean(value: Any, types: set[type]) -> Any:  # Any: YAML values
    names = isinstance(value, list) and str in types  # such as the class names true and false
    return value if types.isdisjoint((int, float)) or bool in types or names else _booleans_to_text(value)


def _booleans_to_text(value: Any) -> Any:  # Any: YAML values
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return {key: _booleans_to_text(item) for key, item in value.items()}
    return [_booleans_to_text(item) for item in value] if isinstance(value, list | tuple) else value


def _types_in(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)
