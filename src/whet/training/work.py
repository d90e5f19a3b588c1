"""What differs between kinds of runs: their data, their model, and what they leave behind."""

import abc
import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from whet.adapters.classifier_files import StoredHead
from whet.adapters.files import save_adapter
from whet.adapters.load import BASE, load_base, load_quantised, save, save_base, tokenizer_of
from whet.adapters.lora import make_trainable
from whet.adapters.qlora import quantised_weights
from whet.config.preset import Preset
from whet.config.sections import RunConfig
from whet.data.batches import Batch, make_batch
from whet.data.encode import Question
from whet.data.examples import Example
from whet.errors import ModelError
from whet.generation.exact_match import ExactMatch, exact_match
from whet.hardware import choose_device, choose_precision
from whet.models.language_model import LanguageModel
from whet.models.mup import refuse_other_multipliers
from whet.models.scratch import new_model, new_tokenizer
from whet.models.tokenizer_files import save_tokenizer
from whet.models.trainable import Trainable
from whet.objectives.base import Objective, frozen_models
from whet.objectives.mix import Mix
from whet.ops.attention import describe_backend
from whet.parallel.group import SOLO, World
from whet.parallel.shard import gathered, whole_on_main
from whet.training.callbacks import Callback, Metrics
from whet.training.compiling import compile_blocks, first_batch
from whet.training.eight_bits import use_fp8
from whet.training.mix_data import MixData, data_of
from whet.training.objective_inputs import ObjectiveInputs
from whet.training.provenance import began_on, weights_digest
from whet.training.routing import with_routers
from whet.training.run_data import EvaluationSplit, RunData
from whet.training.tasks import build_objective
from whet.training.trainer import Trainer

log = logging.getLogger("whet")

Evaluators = list[Callable[[], Metrics]]


class Work(abc.ABC):
    """One kind of run. `build` makes the model, the objective and the stream of steps."""

    data: Any  # Any: records, in the form of RunData
    model: Any  # Any: the Trainable that its objective is for
    objective: Objective
    stream: Any  # Any: steps, each a list of micro-batches
    base_digest: str
    identities: dict[str, str]  # of frozen models that were opened by name

    def __init__(self, config: RunConfig, directory: Path, world: World = SOLO) -> None:
        self.config = config
        self.directory = directory
        self.world = world
        self.device = choose_device(config.run.device)
        self.precision = choose_precision(config.run.precision, self.device)
        self.began = began_on(directory)
        self.identities = {}

    @abc.abstractmethod
    def build(self, held: contextlib.ExitStack) -> None:
        """Everything up to the first step, in the order in which mistakes are cheapest to find.

        What is `held` lives as long as the run.
        """

    @abc.abstractmethod
    def callbacks(self, pause: Callable[[], None]) -> list[Callback]:
        """Who takes part in the run beside those of every run; `pause` may break off what takes long."""

    @abc.abstractmethod
    def write_final(self, trainer: Trainer) -> None:
        """`final/`: what people use. After early stopping the trainer has put the best weights back."""

    def evaluators(self, split: str, found: EvaluationSplit | None, pause: Callable[[], None]) -> Evaluators:
        """What an evaluation on valid or test tells beside the loss."""
        return []

    def frozen_models(self) -> list[LanguageModel]:
        """Models that the run asks and does not train."""
        return frozen_models(self.objective)

    def files(self) -> dict[str, str]:
        """What describes the run, beside its config and its origins."""
        found = {"fingerprint": self.model.fingerprint, "architecture": self.model.describe()}
        return {"arch.json": json.dumps(found, indent=2) + "\n"}

    def stage(self, staging: Path) -> None:  # noqa: B027 # most have nothing of the kind
        """Put into a new run's directory what is no text."""

    def announce(self, model: Trainable) -> None:
        """Say how large the model is."""
        total = sum(p.numel() for p in model.parameters()) + quantised_weights(model)[0]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        log.info(
            "parameters: %s, of which %s train (%.2f%%)", f"{total:,}", f"{trained:,}", 100 * trained / total
        )


class TextWork(Work):
    """A language model on texts."""

    data: RunData | MixData
    model: LanguageModel
    tokenizer: Any  # Any: a transformers tokenizer

    def build(self, held: contextlib.ExitStack) -> None:
        """Records first: they are read in seconds, and weights are not."""
        self.data = data_of(self.config, today=self.began)
        with self.world.first_alone():
            self.tokenizer = self._find_tokenizer()
            self.data.prepare(self.tokenizer)
        self.stream = self.data.stream()
        self._build_model_and_objective()

    def _build_model_and_objective(self) -> None:
        self.model = self._build_model()
        self.data.check(self.model)
        if self.config.run.compile:
            log.info("compile: %s", compile_blocks(self.model, self._first_batch(), self.precision))
        self.task = self._build_objective()
        self.objective, self.routers = with_routers(
            self.task, self.model, self.config.experts, compute=self.precision.compute
        )

    def callbacks(self, pause: Callable[[], None]) -> list[Callback]:
        """Those that report the routers."""
        return list(self.routers)

    def evaluators(self, split: str, found: EvaluationSplit | None, pause: Callable[[], None]) -> Evaluators:
        """Exact match, where answers are generated."""
        return [self._exact_match_on(found.questions, pause)] if found and found.questions else []

    def stage(self, staging: Path) -> None:
        """A tokenizer that was made for this run is in no model directory yet."""
        if isinstance(self.config.model, Preset):
            save_tokenizer(self.tokenizer, staging / "tokenizer")

    def write_final(self, trainer: Trainer) -> None:
        """A Hugging Face model directory or a PEFT adapter directory."""
        head = self.stored_head()
        with whole_on_main(self.model, self.world), self.world.abreast():
            if self.world.is_main:
                self._write_final(head)

    def _write_final(self, head: StoredHead | None) -> None:
        final = self.directory / "final"
        if self.config.method.kind == "full":
            save(self.model, self.tokenizer, final, classifier=head)
            return
        base = None
        if self.model.name is None:  # an adapter was folded in: these weights are nowhere else
            base = self.directory / BASE
            if not base.exists():
                save_base(self.model, self.tokenizer, base)
        save_adapter(self.model, final, tokenizer=self.tokenizer, base=base, classifier=head)

    def stored_head(self) -> StoredHead | None:
        """A classifier's head, which belongs into `final/`."""
        return None

    def _find_tokenizer(self) -> Any:  # Any: a transformers tokenizer
        model = self.config.language_model
        if isinstance(model, Preset):
            return new_tokenizer(model, self.data.texts(), kept_in=self.directory / "tokenizer")
        if (found := tokenizer_of(model)) is None:
            raise ModelError(f"{model} has no tokenizer, so it cannot read records")
        return found

    def _build_model(self) -> LanguageModel:
        config, method = self.config, self.config.method
        log.info(
            "device: %s; precision %s; attention: %s",
            *(self.device, self.precision.reason, describe_backend(self.device)),
        )
        model = self._untrained(self.precision.trained if method.kind == "full" else self.precision.frozen)
        self.base_digest = weights_digest(model)
        make_trainable(model, method, dtype=self.precision.trained)
        model.grad_checkpoint = config.run.grad_checkpoint
        if config.run.fp8:
            log.info("fp8: %s", use_fp8(model, method.kind))
        self.announce(model)
        return model

    def _first_batch(self) -> Batch:
        """What a run begins with; a few tokens where that is not known yet, or the model is to be cut."""
        if not hasattr(self, "stream") or self.config.parallel.kind == "fsdp":
            return make_batch([[Example([0] * 9, [True] * 9, "a trial")]])
        return first_batch(self.stream)

    def _untrained(self, dtype: torch.dtype) -> LanguageModel:
        config, name = self.config, self.config.language_model
        if isinstance(name, Preset):
            model = new_model(name, self.tokenizer, seed=config.run.seed, mup=config.optim.mup)
            return model.to(self.device, dtype)
        if config.method.kind == "qlora":
            return load_quantised(name, dtype=dtype, device=self.device)
        model, _ = load_base(name, dtype=dtype, device=self.device)
        if config.optim.mup is not None:
            refuse_other_multipliers(getattr(model, "spec", None), config.optim.mup, name=name)
        return model

    def _build_objective(self) -> Objective:
        if isinstance(self.data, RunData):
            return self._objective_on(self.data)
        parts = {name: self._objective_on(data) for name, data in self.data.parts.items()}
        return Mix(parts, self.data.weights)

    def _objective_on(self, data: RunData) -> Objective:
        inputs = ObjectiveInputs(
            self.model,
            self.tokenizer,
            data.examples,
            steps=data.steps,
            precision=self.precision,
            base_digest=self.base_digest,
            seed=self.config.run.seed,
            world=self.world,
        )
        objective = build_objective(data.config.objective, inputs)
        self.identities |= inputs.identities
        return objective

    def _exact_match_on(self, questions: list[Question], pause: Callable[[], None]) -> Callable[[], Metrics]:
        limit = self.config.eval.max_new_tokens

        def ask(mine: Sequence[Question]) -> list[bool]:
            return exact_match(self.model, self.tokenizer, mine, max_tokens=limit, pause=pause).correct

        def asked() -> Metrics:
            with gathered(self.model):
                correct = self.world.each(questions, ask)
            return ExactMatch(correct, [question.group for question in questions]).metrics()

        return asked
