"""What every section of a config is, and the kinds of values that several of them have."""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(gt=0)]
PrecisionName = Literal["auto", "fp32", "bf16", "bf16-pure", "fp16"]
Factor = Annotated[float, Field(ge=0, lt=1)]


def _as_text(value: Any) -> Any:  # Any: YAML values
    """What YAML reads as a number or a date, and Python as a path, is a name all the same."""
    return str(value) if isinstance(value, int | float | datetime.date | Path) else value


Text = Annotated[str, BeforeValidator(_as_text)]


@dataclass(frozen=True)
class ReadBy:
    """The values of another key of the section with which a key is read; none listed: any but 0."""

    switch: str
    values: tuple[str, ...] = ()

    def includes(self, chosen: Sequence[object]) -> bool:
        """Return whether one of the chosen values reads the key."""
        return any(each in self.values if self.values else each for each in chosen)


@dataclass(frozen=True)
class KeyInfo:
    """What a key affects: `key: Annotated[int, KeyInfo(changes_loss=False)]`."""

    read_by: ReadBy | None = None  # None: always read
    changes_loss: bool = True  # of an objective: runs with another value have another loss
    may_change_on_resume: bool = False


def key_info(field: FieldInfo) -> KeyInfo:
    """Return what a field is annotated with, or the defaults."""
    return next((each for each in field.metadata if isinstance(each, KeyInfo)), KeyInfo())


class Section(BaseModel):
    """A strict, frozen group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:  # Any: checked here
        """Validate the keys; every problem is in one ConfigError."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            from whet.config.checks.error_messages import config_error  # which needs every section

            raise config_error(error, type(self), origin=type(self).__name__) from error

    # pydantic validates nested sections itself, without their __init__, so that it reports all errors at once
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _no_boolean_is_a_number(cls, values: Any) -> Any:  # Any: not yet checked
        """pydantic takes true as 1: where a number belongs, it gets the word, which it refuses."""
        if not isinstance(values, dict):
            return values
        kinds = {
            field.alias or name: set(_types_in(field.annotation)) for name, field in cls.model_fields.items()
        }
        return {key: _for_a_number(value, kinds.get(key, set())) for key, value in values.items()}


class ObjectiveSection(Section):
    """The keys of one or several objective kinds, and what other parts of whet ask about these."""

    default_targets: ClassVar[str] = "all-linear"  # method.targets, where a config does not set it
    output: ClassVar[Literal["text", "class", "numbers"]] = "text"  # of the trained model
    # its kinds whose loss is a mean over answers, texts or rows: that of others is over tokens
    answer_level_kinds: ClassVar[tuple[str, ...]] = ()


def _for_a_number(value: Any, kinds: set[type]) -> Any:  # Any: YAML values
    names = isinstance(value, list) and str in kinds  # which may be true and false
    return value if kinds.isdisjoint((int, float)) or bool in kinds or names else _as_word(value)


def _as_word(value: Any) -> Any:  # Any: YAML values
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return {key: _as_word(each) for key, each in value.items()}
    return [_as_word(each) for each in value] if isinstance(value, list | tuple) else value


def _types_in(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)
