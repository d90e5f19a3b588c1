"""The `data` section: sources, formats, splits and curricula."""

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.section import KeyInfo, Positive, ReadBy, Section, Text

_BY_LENGTH = KeyInfo(read_by=ReadBy("kind", ("length",)))
_BY_DIFFICULTY = KeyInfo(read_by=ReadBy("kind", ("difficulty",)))


class WeightedSource(Section):
    """One of several sources that are mixed."""

    source: str = Field(description="a file, directory, hf:NAME or synth:NAME:N")
    weight: float = Field(gt=0, description="its share of the records, relative to the others")


_IN_A_FILE = (
    "pass the records beside the config, whet.train(config, data={'train': rows}), or write them to a JSON "
    "Lines file, one object per line, and give its path"
)


def _names_or_a_list(value: Any) -> Any:  # Any: YAML values
    if isinstance(value, dict | WeightedSource):
        raise ValueError("write a name, a list of names, or a list of {source, weight}: not one mapping")
    if isinstance(value, list) and any(isinstance(each, dict) and "source" not in each for each in value):
        raise ValueError(
            "a mapping in this list has no source: an item is a name or {source: NAME, weight: NUMBER}. "
            f"Records in memory are not a source: {_IN_A_FILE}"
        )
    if value is not None and not isinstance(value, str | int | float | date | Path | list):
        raise ValueError(f"an object of type {type(value).__name__} is not a source: {_IN_A_FILE}")
    return value


Sources = Text | list[Text] | list[WeightedSource]


class Curriculum(Section):
    """An order of examples that changes during the run."""

    kind: Literal["length", "difficulty"] = Field(description="from short to long, or from easy to hard")
    stages: Annotated[Positive, _BY_LENGTH] = Field(
        4, description="length: limits that rise evenly to the longest example"
    )
    steps: Annotated[Positive | None, _BY_LENGTH] = Field(
        None, description="length: steps of a stage; null: the stages together take half of the run"
    )
    shortest: Annotated[Annotated[int, Field(gt=1)], _BY_LENGTH] = Field(
        32, description="length: tokens of the first stage's limit"
    )
    score: Annotated[str | None, _BY_DIFFICULTY] = Field(
        None, description="difficulty: a field of the records; those above its median are hard"
    )
    hard: Annotated[Sources | None, _BY_DIFFICULTY] = Field(
        None, description="difficulty: hard records, when data.train is the easy ones"
    )
    ramp: Annotated[float, _BY_DIFFICULTY] = Field(
        0.5, ge=0, le=1, description="difficulty: share of the run after which all examples are hard"
    )

    _sources = field_validator("hard", mode="before")(_names_or_a_list)

    @model_validator(mode="after")
    def _hard_is_known(self) -> "Curriculum":
        if self.kind == "difficulty" and (self.score is None) == (self.hard is None):
            raise ValueError("a curriculum by difficulty needs either score or hard")
        if self.kind == "length" and self.hard is not None:
            raise ValueError("hard is for a curriculum by difficulty: one by length orders data.train alone")
        return self


class Data(Section):
    """What is read, and how records become batches."""

    train: Sources = Field(
        description="training records: a file, directory, hf:NAME or synth:NAME:N; a list of them; "
        "or a list of {source, weight}, mixed"
    )
    valid: Sources | None = Field(None, description="validation records, named in the same ways")
    test: Sources | None = Field(None, description="test records, evaluated once after training")
    format: Literal[
        "auto",
        "messages",
        "preference",
        "completion",
        "classification",
        "tabular",
        "distrust",
        "text",
        "prompt",
    ] = Field("auto", description="the shape records are taken as; auto: the first that their fields fit")
    on_bad_record: Literal["error", "skip"] = Field(
        "error", description="a record that cannot be read: stop, or leave it out and count it"
    )
    ignore: list[str] = Field(
        [],
        description="fields of records and messages that are not read, and not reported as unread",
    )
    allow_empty_answers: bool = Field(
        False, description="supervise answers of which no text reaches the model, instead of refusing them"
    )
    max_length: Annotated[int, Field(gt=1)] = Field(2048, description="longest example, in tokens")
    too_long: Literal["truncate", "drop", "split", "error"] = Field(
        "truncate", description="a longer one is cut at its end, dropped, split into windows, or refused"
    )
    pack: bool = Field(True, description="several examples in a row, none of which sees another")
    order: Literal["shuffle", "sequential", "mlx"] = Field(
        "shuffle", description="order of examples in an epoch; mlx: the batches of mlx-lm"
    )
    curriculum: Curriculum | None = Field(None, description="an order that changes during the run")
    supervise: Literal["assistant", "last", "all"] = Field(
        "assistant", description="which tokens are learned: assistant turns, the last one, or everything"
    )

    _sources = field_validator("train", "valid", "test", mode="before")(_names_or_a_list)

    @field_validator("train", "valid", "test")
    @classmethod
    def _at_least_one(cls, value: Sources | None) -> Sources | None:
        if value is not None and not value:
            raise ValueError("name at least one source")
        return value

    @model_validator(mode="after")
    def _curriculum_has_an_order(self) -> "Data":
        if self.order == "mlx" and self.curriculum is not None and self.curriculum.kind == "difficulty":
            raise ValueError("order: mlx does not go with a curriculum by difficulty: it makes its own steps")
        return self
