"""The `data` section: sources, formats, splits and curricula."""

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic import Strict as StrictMode

from whet.config.section import KeyInfo, Positive, Section, StepsOrFraction, Text, UsedWhen

# the formats of records, which data/sources/record_formats.py reads
FormatName = Literal[
    "messages",
    "preference",
    "completion",
    "tokens",
    "classification",
    "tabular",
    "distrust",
    "text",
    "prompt",
]
Format = Literal["auto", FormatName]

_BY_LENGTH = KeyInfo(used_when=UsedWhen("kind", ("length",)))
_BY_DIFFICULTY = KeyInfo(used_when=UsedWhen("kind", ("difficulty",)))


Weight = float | dict[StepsOrFraction, float]


class WeightedSource(Section):
    """One source of a mixture: by weight, or a number of times in each pass."""

    source: str = Field(description="a file, a directory, an address, hf:NAME or synth:NAME:N")
    weight: Weight | None = Field(
        None,
        description="share of the records drawn from this source, relative to the other weights; with "
        "data.stream also {STEP: weight, ...}, linear between the steps",
    )
    epochs: float | None = Field(
        None,
        gt=0,
        validate_default=True,
        description="how often a pass reads the records of this source, instead of a weight: 2 is twice, "
        "0.25 a random quarter",
    )
    columns: dict[str, str] = Field({}, description="names of this source's columns, instead of data.columns")

    @field_validator("weight", mode="before")
    @classmethod
    def _check_weight(cls, value: Any) -> Any:  # Any: YAML values
        if value is None:
            return value
        if not isinstance(value, dict):
            if not _is_number(value):
                raise ValueError("must be a number, or {STEP: weight, ...}")
            if value <= 0:
                raise ValueError("Input should be greater than 0")
            return value
        if not value or not all(_is_number(weight) and weight >= 0 for weight in value.values()):
            raise ValueError("weights by step must be numbers of at least 0")
        if not all(_is_step(step) for step in value):
            raise ValueError("steps must be whole numbers, or fractions of the run below 1")
        return value

    @field_validator("epochs")
    @classmethod
    def _check_amount(cls, value: float | None, info: ValidationInfo) -> float | None:
        if "weight" in info.data and (info.data["weight"] is None) == (value is None):
            raise ValueError("set either weight or epochs")
        return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_step(value: object) -> bool:
    """Return whether this is a key of a schedule: a step, or a fraction of the run; JSON makes it text."""
    try:
        step = float(value)  # type: ignore[arg-type]  # a TypeError is handled
    except (TypeError, ValueError):
        return False
    return 0 <= step < 1 or step.is_integer()


class Stream(Section):
    """Records that are read while the run trains on them."""

    buffer: Positive = Field(
        10_000, description="records per block: those in memory, which are shuffled and packed together"
    )


_IN_MEMORY_HINT = (
    "pass the records as an argument, whet.train(config, data={'train': rows}), or write them to a JSON "
    "Lines file, one object per line, and give its path"
)


def _check_sources(value: Any) -> Any:  # Any: YAML values
    if isinstance(value, dict | WeightedSource):
        raise ValueError(
            "must be a name, a list of names, or a list of {source, weight}, not a single mapping"
        )
    if isinstance(value, list) and any(isinstance(item, dict) and "source" not in item for item in value):
        raise ValueError(
            "a mapping in this list has no source: an item is a name or {source: NAME, weight: NUMBER}. "
            f"Records in memory are not a source: {_IN_MEMORY_HINT}"
        )
    if value is not None and not isinstance(value, str | int | float | date | Path | list):
        raise ValueError(f"an object of type {type(value).__name__} is not a source: {_IN_MEMORY_HINT}")
    return value


T = TypeVar("T")
Strict = Annotated[T, StrictMode()]  # without conversion: a source in quotes stays text
Sources = Text | list[Text] | list[WeightedSource]


def _weighted(value: object) -> list[WeightedSource]:
    """Return the sources of a list of mappings; empty for any other value of a data key."""
    return [item for item in value if isinstance(item, WeightedSource)] if isinstance(value, list) else []


class Curriculum(Section):
    """A curriculum: an order of examples that changes during the run."""

    kind: Literal["length", "difficulty"] = Field(
        description="length: from short to long examples; difficulty: from easy to hard examples"
    )
    stages: Annotated[Positive, _BY_LENGTH] = Field(
        4, description="length: number of stages; their length limits rise evenly up to the longest example"
    )
    steps: Annotated[Positive | None, _BY_LENGTH] = Field(
        None, description="length: steps per stage; null: all stages together last half of the run"
    )
    shortest: Annotated[Annotated[int, Field(gt=1)], _BY_LENGTH] = Field(
        32, description="length: longest example of the first stage, in tokens"
    )
    score: Annotated[str | None, _BY_DIFFICULTY] = Field(
        None, description="difficulty: numeric record field; examples above its median are hard"
    )
    hard: Annotated[Sources | None, _BY_DIFFICULTY] = Field(
        None, description="difficulty: source of the hard records; data.train then holds the easy ones"
    )
    ramp: Annotated[float, _BY_DIFFICULTY] = Field(
        0.5, ge=0, le=1, description="difficulty: fraction of the run after which all examples are hard"
    )

    _sources = field_validator("hard", mode="before")(_check_sources)

    @model_validator(mode="after")
    def _check_hard(self) -> "Curriculum":
        if self.kind == "difficulty" and (self.score is None) == (self.hard is None):
            raise ValueError("a curriculum by difficulty needs either score or hard")
        if self.kind == "length" and self.hard is not None:
            raise ValueError("hard requires kind: difficulty; a curriculum by length only orders data.train")
        return self


class Data(Section):
    """The records of the run and how they become batches."""

    train: Sources = Field(
        description="training records: a file, a directory, a glob, an address such as s3://BUCKET/FILE, "
        "hf:NAME or synth:NAME:N; a list of these; or a list of {source, weight} or {source, epochs} to mix"
    )
    valid: Strict[int] | Strict[float] | Sources | None = Field(
        None,
        union_mode="left_to_right",
        description="validation records, in the same forms as train; or how many records to hold out of "
        "train: a share below 1 or a count; null: no validation",
    )
    group: str | None = Field(
        None,
        description="record field whose values stay on one side of the split that data.valid makes; null: "
        "records with the same prompt stay together",
    )
    test: Sources | None = Field(
        None, description="test records, evaluated once after training; null: no test evaluation"
    )
    format: Format = Field(
        "auto", description="format of the records; auto: the first format that matches their fields"
    )
    on_bad_record: Literal["error", "skip"] = Field(
        "error", description="invalid records: stop with an error, or skip and count them"
    )
    columns: dict[str, str] = Field(
        {},
        description="names of columns in the sources, by whet's name of the field, such as "
        "{prompt: question, completion: answer}",
    )
    ignore: list[str] = Field(
        [], description="fields of records and messages to ignore without reporting them as unread"
    )
    allow_empty_answers: bool = Field(
        False, description="train on answers without any text instead of rejecting them"
    )
    max_length: Annotated[int, Field(gt=1)] = Field(
        2048, description="maximum length of an example, in tokens"
    )
    too_long: Literal["truncate", "drop", "split", "error"] = Field(
        "truncate",
        description="examples over max_length: truncate the end, drop, split into windows, or raise an error",
    )
    pack: bool = Field(
        True, description="pack several examples into one sequence; they do not attend to each other"
    )
    order: Literal["shuffle", "sequential", "mlx"] = Field(
        "shuffle", description="order of examples within an epoch; mlx: the same batches as mlx-lm"
    )
    stream: Stream | None = Field(
        None,
        description="read and tokenize training records while training, in blocks, and store nothing on "
        "disk; true: {buffer: 10000}; null or false: tokenize all of them first",
    )
    curriculum: Curriculum | None = Field(
        None, description="change the order of examples during the run; null: no curriculum"
    )
    supervise: (
        Literal["assistant", "last", "all", "completion"] | Annotated[list[str], Field(min_length=1)]
    ) = Field(
        "assistant",
        description="tokens in the loss: all assistant turns, the last one, all tokens, the assistant turns "
        "after the last user message (completion), or the turns of a list of roles",
    )

    turns: Literal["auto", "last", "each"] = Field(
        "auto",
        description="conversations whose earlier turns the chat template rewrites: several examples, so that "
        "every supervised turn follows its prompt (auto), or only the last turn (last); each: one example "
        "per supervised turn, for all conversations",
    )
    supervise_thinking: bool = Field(
        True, description="train on the thinking of answers; false: it is context, with its tags"
    )
    template: Text | None = Field(
        None,
        description="chat template: chatml, llama3, qwen3, simple or a .jinja file, saved with the final "
        "model; null: that of the model",
    )
    template_args: dict[str, Any] = Field(
        {}, description="arguments of the chat template, such as {enable_thinking: false}"
    )

    _sources = field_validator("train", "valid", "test", mode="before")(_check_sources)

    @field_validator("train", "valid", "test")
    @classmethod
    def _check_not_empty(cls, value: Sources | float | None) -> Sources | float | None:
        if value is not None and not isinstance(value, int | float) and not value:
            raise ValueError("name at least one source")
        return value

    @field_validator("valid", mode="before")
    @classmethod
    def _check_held_out(cls, value: Any) -> Any:  # Any: YAML values
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not (0 < value < 1 or (isinstance(value, int) and value >= 1)):
            raise ValueError("as a number, this must be a share between 0 and 1, or a count of records")
        return value

    @field_validator("stream", mode="before")
    @classmethod
    def _expand_stream(cls, value: Any) -> Any:  # Any: YAML values
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_stream(self) -> "Data":
        keys = {
            "data.curriculum": self.curriculum is not None,
            "data.valid as a number": self.held_out is not None,
            "data.order: mlx": self.order == "mlx",
            "epochs of a source": any(part.epochs is not None for part in _weighted(self.train)),
        }
        if self.stream is not None and (refused := next((key for key, is_set in keys.items() if is_set), "")):
            raise ValueError(
                f"{refused} cannot be combined with data.stream: it needs all records before training"
            )
        return self

    @model_validator(mode="after")
    def _check_schedules(self) -> "Data":
        for name in ("train", "valid", "test"):
            parts = _weighted(getattr(self, name))
            if len({part.epochs is None for part in parts}) > 1:
                raise ValueError(f"{name}: give each source of a list a weight, or each of them epochs")
            schedules = [part.weight for part in parts if isinstance(part.weight, dict)]
            if schedules and (name != "train" or self.stream is None):
                raise ValueError(f"{name}: a weight that changes over steps needs data.stream: true")
        return self

    @property
    def held_out(self) -> float | None:
        """How much of `train` is held out for validation: a share below 1, or a count of records."""
        return self.valid if isinstance(self.valid, int | float) else None

    @model_validator(mode="after")
    def _check_curriculum_order(self) -> "Data":
        if self.order == "mlx" and self.curriculum is not None and self.curriculum.kind == "difficulty":
            raise ValueError(
                "order: mlx cannot be combined with a curriculum by difficulty, which builds its own steps"
            )
        return self
