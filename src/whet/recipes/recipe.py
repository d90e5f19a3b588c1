"""The contract of a recipe: everything that one objective kind does differently from the others."""

import abc
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch

from whet.adapters.qlora import quantised_weights
from whet.config.run_config import RunConfig
from whet.data.batches import Axis, StepStream
from whet.data.packing import StepSettings
from whet.data.run_data import EvaluationSplit, Needs, RunData
from whet.given.given import Given
from whet.hardware import Precision
from whet.models.language_model import LanguageModel, Trainable
from whet.objectives.objective import Objective
from whet.parallel.process_group import SOLO, World
from whet.run_directory import ARCH_FILE
from whet.training.callbacks import Callback, Metrics

if TYPE_CHECKING:
    from whet.evaluation.answer_metrics import AnswerMetrics
    from whet.training.trainer import Trainer

S = TypeVar("S")
Evaluators = list[Callable[[], Metrics]]
Frozen = LanguageModel | Literal["adapters-off"]
UNTRAINED = "the model as it is before the first step"


@dataclass(frozen=True)
class FrozenModel:
    """A model that a run asks and does not train."""

    name: str  # what it is opened by, or UNTRAINED
    key: str  # of the config, to be named in errors
    trained_dtype: bool = False  # opened like the trained model, not in the dtype of frozen weights
    before_training: bool = False  # asked once before the first step, and gone by then


@dataclass(frozen=True)
class ColumnShape:
    """A column that the batches of a kind have, for plans."""

    axis: Axis
    sizes: tuple[int, ...] = ()  # behind the axis
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class StepShape:
    """What a step of a kind holds, for plans."""

    documents: int = 1  # of an example
    more_tokens: int = 0  # of a document, behind data.max_length
    multiple: int = 1  # documents of a micro-batch come in these numbers
    cached_tokens: int = 0  # keys and values of the completions that are sampled at once
    columns: Mapping[str, ColumnShape] = field(default_factory=dict)


class RecipeData(Protocol):
    """Records, tokenised and cut: RunData, or what a recipe has in its place."""

    @property
    def steps(self) -> StepSettings:
        """How steps are cut into micro-batches."""

    def texts(self) -> Iterator[str]:
        """What the training records say, to make a tokenizer from."""

    def prepare(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        """Read and tokenise every source."""

    def check(self, model: Any) -> None:  # Any: the Trainable of the recipe
        """Refuse what the model cannot read."""

    def stream(self) -> StepStream:
        """Return the training steps."""

    def split(self, name: Any, model: Any) -> EvaluationSplit | None:  # Any: the name of a split; as above
        """Return valid or test, where there is one."""

    def digests(self) -> dict[str, str]:
        """Return a hash of each source's content."""

    def token_digests(self) -> dict[str, str]:
        """Return a hash of what each source became."""

    def describe_steps(self) -> str:
        """Return how large a step is, for a person."""


@dataclass
class Build:
    """What a run has once its data and models are there; `objective` and `steps` follow."""

    config: RunConfig
    model: Any  # Any: the Trainable that the recipe's objective is for
    precision: Precision
    data: Any = None  # Any: the RecipeData of the recipe; None in plans
    tokenizer: Any = None  # Any: a transformers tokenizer
    frozen: Mapping[str, Frozen] = field(default_factory=dict)  # by role
    identities: Mapping[str, str] = field(default_factory=dict)  # of frozen models, by name
    base_digest: str = ""  # of the untrained weights
    directory: Path = Path()
    world: World = SOLO
    objective: Objective | None = None
    steps: StepStream | None = None

    @property
    def is_plan(self) -> bool:
        """Whether there is no data, and no weight has a value."""
        return self.data is None


class Recipe(abc.ABC, Generic[S]):
    """How one objective kind is prepared, trained and saved; the defaults are those of language models."""

    has_batches_at_start = True  # steps exist before training: probes and the compiler can look at some
    answers_in_text = True  # samples can be generated
    counts_flops = True  # FLOPs of a token are known
    metrics: "AnswerMetrics | None" = None  # those of eval.metrics, once started

    def __init__(self, config: RunConfig, section: S, given: Given | None = None) -> None:
        self.config = config
        self.section = section
        self.given = given or Given()

    def check(self) -> None:
        """Refuse settings that make no sense together, before anything is read."""

    def needs(self) -> Needs:
        """Return what is read from records."""
        return Needs()

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the models that are asked and not trained, by role."""
        return {}

    def step_shape(self) -> StepShape:
        """Return what a step holds, for plans."""
        return StepShape()

    def start(self, held: contextlib.ExitStack) -> None:
        """Start what must be there before weights are read; `held` ends it with the run."""
        if self.config.eval.metrics:
            from whet.evaluation.answer_metrics import AnswerMetrics

            self.metrics = AnswerMetrics(self.config.eval.metrics, self.given.metrics)

    def open_data(self, *, today: date | None = None) -> RecipeData:
        """Open the sources; nothing is read before it is needed."""
        return RunData(self.config, self.needs(), today=today, given=self.given.data)

    def find_tokenizer(self, data: RecipeData, directory: Path) -> Any:  # Any: a transformers tokenizer
        """Return the model's tokenizer, or a new one made from the data."""
        from whet.recipes.model_setup import find_tokenizer

        return find_tokenizer(self.config, data, directory)

    def model(
        self,
        tokenizer: Any,  # Any: a transformers tokenizer
        *,
        device: torch.device,
        precision: Precision,
    ) -> tuple[Trainable, str]:
        """Return the model, ready to be trained, and the digest of its untrained weights."""
        from whet.recipes.model_setup import build_language_model

        return build_language_model(self.config, tokenizer, device=device, precision=precision)

    def check_models(self, b: Build) -> None:
        """Refuse models that do not fit one another, for dry runs: a run sees it in `objective`."""

    def check_examples(self, data: RunData, *, vocab_size: int) -> None:
        """Refuse examples that lack what another command writes; for `whet data`, which has no model."""

    def prepare(self, b: Build) -> None:
        """Make passes over the data that fill columns; never called by plans."""

    @abc.abstractmethod
    def objective(self, b: Build) -> Objective:
        """Return the objective; in plans `b.data` is None."""

    def steps(self, b: Build) -> StepStream:
        """Return the training steps."""
        stream: StepStream = b.data.stream()
        return stream

    def callbacks(self, b: Build) -> list[Callback]:
        """Return the callbacks of this kind."""
        return []

    def evaluators(
        self, b: Build, split: str, data: EvaluationSplit | None, pause: Callable[[], None]
    ) -> Evaluators:
        """Return what an evaluation on valid or test computes beside the loss; `pause` may break it off."""
        from whet.recipes.model_setup import text_evaluators

        return text_evaluators(self.config.eval, self.metrics, b, data, pause)

    def files(self, b: Build) -> dict[str, str]:
        """Return the files that describe the run, beside its config and its provenance."""
        facts = {"fingerprint": b.model.fingerprint, "architecture": b.model.describe()}
        return {ARCH_FILE: json.dumps(facts, indent=2) + "\n"}

    def stage(self, b: Build, staging: Path) -> None:
        """Put files that are not texts into a new run's directory."""
        from whet.recipes.model_setup import stage_tokenizer

        stage_tokenizer(self.config, b, staging)

    def save_final(self, b: Build, trainer: "Trainer", path: Path) -> None:
        """Write `final/`; after early stopping the trainer has put the best weights back."""
        from whet.recipes.model_setup import save_language_model

        save_language_model(self.config, b, path)

    def restore_final(self, b: Build, path: Path) -> None:
        """Load what saving changed, for a run that was stopped after it had written `final/`."""


def describe_parameters(model: Trainable) -> str:
    """Return how many parameters a model has, and how many train."""
    total = sum(p.numel() for p in model.parameters()) + quantised_weights(model)[0]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{total:,}, of which {trained:,} train ({100 * trained / total:.2f}%)"
