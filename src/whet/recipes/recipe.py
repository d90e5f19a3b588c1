"""The Recipe interface: everything that one objective kind does differently from the others."""

import abc
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch

from whet.adapters.nf4 import quantized_size
from whet.config.run_config import RunConfig
from whet.data.batches import Axis, StepStream
from whet.data.packing import StepSettings
from whet.data.run_data import EvaluationSplit, Needs, RunData
from whet.given.given import Given
from whet.hardware import Precision
from whet.models.language_model import LanguageModel, Trainable
from whet.objectives.objective import Objective
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.run_directory import ARCH_FILE
from whet.training.callbacks import Callback, Metrics

if TYPE_CHECKING:
    from whet.evaluation.answer_metrics import AnswerMetrics
    from whet.evaluation.benchmarks import LoadedTasks
    from whet.training.trainer import Trainer

S = TypeVar("S")
Evaluators = list[Callable[[], Metrics]]
Frozen = LanguageModel | Literal["adapters-off"]
INITIAL_MODEL = "the model as it is before the first step"


@dataclass(frozen=True)
class FrozenModel:
    """A model that a run uses but does not train, such as a teacher or a reference model."""

    name: str  # its name or path, or UNTRAINED
    key: str  # the config key that names it, for error messages
    trained_dtype: bool = False  # load it in the dtype of trained weights instead of that of frozen ones
    before_training: bool = False  # only used by `prepare`, and freed before the first step


@dataclass(frozen=True)
class ColumnShape:
    """The shape of a batch column, for plans."""

    axis: Axis
    sizes: tuple[int, ...] = ()  # of the dimensions after the axis
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class StepShape:
    """The contents of a training step, for plans."""

    documents: int = 1  # per example
    completion_tokens: int = 0  # per document, in addition to data.max_length
    multiple: int = 1  # the number of documents in a micro-batch is a multiple of this
    cached_tokens: int = 0  # tokens in the KV cache while completions are sampled
    columns: Mapping[str, ColumnShape] = field(default_factory=dict)


class RecipeData(Protocol):
    """The data of a run: RunData, or a recipe's replacement for it."""

    @property
    def steps(self) -> StepSettings:
        """The settings that split steps into micro-batches."""

    def training_texts(self) -> Iterator[str]:
        """Yield the texts of the training records, to train a tokenizer on."""

    def prepare(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        """Read and tokenize every source."""

    def check_model_limits(self, model: Any) -> None:  # Any: the Trainable of the recipe
        """Raise an error for examples that the model cannot read."""

    def stream(self) -> StepStream:
        """Return the training steps."""

    def evaluation_split(
        self, name: Any, model: Any
    ) -> EvaluationSplit | None:  # Any: the name of a split; as above
        """Return the split "valid" or "test", or None if the run does not have it."""

    def digests(self) -> dict[str, str]:
        """Return a hash of each source's records."""

    def token_digests(self) -> dict[str, str]:
        """Return a hash of each source's tokens."""

    def describe_steps(self) -> str:
        """Return the size of a step as text."""


@dataclass
class Build:
    """The parts of a run while it is assembled; `objective` and `steps` are filled in last."""

    config: RunConfig
    model: Any  # Any: the Trainable that the recipe's objective is for
    precision: Precision
    data: Any = None  # Any: the RecipeData of the recipe; None in plans
    tokenizer: Any = None  # Any: a transformers tokenizer
    frozen: Mapping[str, Frozen] = field(default_factory=dict)  # by role
    identities: Mapping[str, str] = field(default_factory=dict)  # hashes of the frozen models, by name
    base_digest: str = ""  # hash of the untrained weights
    directory: Path = Path()
    world: World = SINGLE_PROCESS
    objective: Objective | None = None
    steps: StepStream | None = None

    @property
    def is_plan(self) -> bool:
        """Whether this is a plan or a dry run: there is no data, and weights are on the meta device."""
        return self.data is None


class Recipe(abc.ABC, Generic[S]):
    """How one objective kind is prepared, trained and saved. The defaults train a language model.

    Before its first step, a run calls `check`, `open_data`, `find_tokenizer`, `start`, `model`, `prepare` and
    `objective`, in this order. `steps` is called before `prepare`, or after `objective` if
    `has_batches_at_start` is False. Only `objective` has no default.

    Args:
        config: The run's config.
        section: The `objective` section of the config.
        given: Python objects that the config refers to.
    """

    has_batches_at_start = True  # False if batches exist only during training, such as sampled completions
    generates_text = True  # whether the model can generate text
    counts_flops = True  # whether the FLOPs per token are known
    metrics: "AnswerMetrics | None" = None  # the functions of eval.metrics, after `start`
    tasks: "LoadedTasks | None" = None  # of eval.tasks, after `start`

    def __init__(self, config: RunConfig, section: S, given: Given | None = None) -> None:
        self.config = config
        self.section = section
        self.given = given or Given()

    def check(self) -> None:
        """Raise a ConfigError for settings that do not work together, before anything is loaded."""

    def needs(self) -> Needs:
        """Return which parts of the records the objective reads."""
        return Needs()

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the models that are used but not trained, by role."""
        return {}

    def step_shape(self) -> StepShape:
        """Return the contents of a training step, for plans."""
        return StepShape()

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start processes, load tasks and import user functions before the model; `stack` ends processes."""
        if self.config.eval.tasks is not None:
            from whet.evaluation.task_evaluator import load_run_tasks

            self.tasks = load_run_tasks(self.config.eval.tasks, self.config.eval.early_stop)
        if self.config.eval.metrics:
            from whet.evaluation.answer_metrics import AnswerMetrics

            self.metrics = AnswerMetrics(self.config.eval.metrics, self.given.metrics)

    def open_data(self, *, today: date | None = None) -> RecipeData:
        """Open the sources without reading them.

        Args:
            today: The date for chat templates that insert one; a resumed run keeps the date of its start.
        """
        return RunData(self.config, self.needs(), today=today, given=self.given.data)

    def find_tokenizer(self, data: RecipeData, directory: Path) -> Any:  # Any: a transformers tokenizer
        """Return the model's tokenizer, or a new one trained on the data."""
        from whet.recipes.model_setup import find_tokenizer

        return find_tokenizer(self.config, data, directory)

    def model(
        self,
        tokenizer: Any,  # Any: a transformers tokenizer
        *,
        device: torch.device,
        precision: Precision,
    ) -> tuple[Trainable, str]:
        """Load the model and make it trainable.

        Returns:
            The model, and the hash of its untrained weights.
        """
        from whet.recipes.model_setup import build_language_model

        return build_language_model(self.config, tokenizer, device=device, precision=precision)

    def check_models(self, b: Build) -> None:
        """Raise an error for incompatible models. Only dry runs call this; in runs, `objective` raises it."""

    def check_examples(self, data: RunData, *, vocab_size: int) -> None:
        """Raise an error if another command has to process the examples first; `whet data` calls this."""

    def prepare(self, b: Build) -> None:
        """Compute batch columns that need a pass over the data; plans do not call this."""

    @abc.abstractmethod
    def objective(self, b: Build) -> Objective:
        """Return the objective. In plans and dry runs `b.data` is None."""

    def steps(self, b: Build) -> StepStream:
        """Return the training steps."""
        stream: StepStream = b.data.stream()
        return stream

    def callbacks(self, b: Build) -> list[Callback]:
        """Return the callbacks that runs of this kind need."""
        return []

    def evaluators(
        self, b: Build, split: str, data: EvaluationSplit | None, pause: Callable[[], None]
    ) -> Evaluators:
        """Return functions that compute an evaluation's metrics besides the loss.

        Args:
            b: The assembled run.
            split: "valid" or "test".
            data: The split, or None if the run does not have it.
            pause: To be called often during an evaluation; it raises an exception if the run has to stop.
        """
        from whet.recipes.model_setup import text_evaluators

        return text_evaluators(self.config.eval, self.metrics, b, data, pause)

    def files(self, b: Build) -> dict[str, str]:
        """Return further text files that describe the run, by name, besides its config and provenance."""
        facts = {"fingerprint": b.model.fingerprint, "architecture": b.model.describe()}
        return {ARCH_FILE: json.dumps(facts, indent=2) + "\n"}

    def stage(self, b: Build, staging: Path) -> None:
        """Write further files into the directory of a new run, such as a new tokenizer.

        Args:
            b: The assembled run.
            staging: The directory under its temporary name.
        """
        from whet.recipes.model_setup import stage_tokenizer

        stage_tokenizer(self.config, b, staging)

    def save_final(self, b: Build, trainer: "Trainer", path: Path) -> None:
        """Write `final/`. After early stopping, the model has the best weights again."""
        from whet.recipes.model_setup import save_language_model

        save_language_model(self.config, b, path)

    def restore_final(self, b: Build, path: Path) -> None:
        """Load what `save_final` changed in the model, for a run that was killed after it wrote `final/`."""


def describe_parameters(model: Trainable) -> str:
    """Return the number of parameters and of trainable parameters of a model as text."""
    total = sum(p.numel() for p in model.parameters()) + quantized_size(model)[0]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{total:,}, {trainable:,} trainable ({100 * trainable / total:.2f}%)"
