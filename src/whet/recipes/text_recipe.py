"""The recipe of a language model trained on texts: the stages that all text kinds share."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whet.adapters.attach import make_trainable
from whet.config.preset import Preset
from whet.data.batches import Batch, make_batch
from whet.data.run_data import EvaluationSplit, RunData
from whet.data.tokens.examples import Example
from whet.errors import ConfigError, ModelError
from whet.model_io.fingerprints import weights_digest
from whet.model_io.formats.adapter_files import save_adapter
from whet.model_io.formats.classifier_head import StoredHead
from whet.model_io.load import load_base, load_quantised
from whet.model_io.save import save, save_base
from whet.model_io.tokenizer import new_tokenizer, tokenizer_of
from whet.model_io.tokenizer_files import save_tokenizer
from whet.models.language_model import LanguageModel
from whet.models.moe import mixtures
from whet.objectives.objective import Objective
from whet.ops.attention import describe_backend
from whet.ops.fp8 import MULTIPLE
from whet.ops.linear import Linear
from whet.parallel.fsdp import whole_on_main
from whet.recipes.objective_inputs import ObjectiveInputs
from whet.recipes.recipe import Evaluators, Recipe
from whet.recipes.registry import build_objective, data_of
from whet.run_directory import BASE, FINAL, TOKENIZER
from whet.training.callbacks import Callback
from whet.training.trainer import Trainer

if TYPE_CHECKING:
    from whet.evaluation.answer_metrics import AnswerMetrics
    from whet.recipes.mix import MixData

log = logging.getLogger("whet")


class TextRecipe(Recipe):
    """A language model on texts."""

    data: "RunData | MixData"
    model: LanguageModel
    tokenizer: Any  # Any: a transformers tokenizer
    metrics: "AnswerMetrics | None" = None  # those of eval.metrics

    def build(self, held: contextlib.ExitStack) -> None:
        """Records first: they are read in seconds, and weights are not."""
        self.load_metrics()
        self.data = data_of(self.config, today=self.began, given=self.given.data)
        with self.world.first_alone():
            self.tokenizer = self._find_tokenizer()
            self.data.prepare(self.tokenizer)
        self.stream = self.data.stream()
        self._build_model_and_objective()

    def load_metrics(self) -> None:
        """Import the functions of eval.metrics, or say why they cannot be."""
        if self.config.eval.metrics:
            from whet.evaluation.answer_metrics import AnswerMetrics

            self.metrics = AnswerMetrics(self.config.eval.metrics, self.given.metrics)

    def _build_model_and_objective(self) -> None:
        self.model = self._build_model()
        self.data.check(self.model)
        if self.config.run.compile:
            from whet.training.compile import compile_blocks

            log.info("compile: %s", compile_blocks(self.model, self._first_batch(), self.precision))
        self.task = self._build_objective()
        self.objective, self.routers = self._with_routers()

    def _with_routers(self) -> tuple[Objective, Sequence[Callback]]:
        """Return the objective with the terms of the model's routers, and who reports them."""
        section = self.config.experts
        if not mixtures(self.model) and not any(section.model_dump().values()):
            return self.task, []
        from whet.training.router_balancing import with_routers

        return with_routers(self.task, self.model, section, compute=self.precision.compute)

    def callbacks(self, pause: Callable[[], None]) -> list[Callback]:
        """Those that report the routers."""
        return list(self.routers)

    def evaluators(self, split: str, found: EvaluationSplit | None, pause: Callable[[], None]) -> Evaluators:
        """Exact match and the config's own metrics, where answers are generated."""
        if not found or not found.questions:
            return []
        from whet.evaluation.answer_metrics import answer_evaluator

        evaluation = self.config.eval
        evaluate = answer_evaluator(
            self.model,
            self.tokenizer,
            found.questions,
            max_tokens=evaluation.max_new_tokens,
            exact=evaluation.generate,
            metrics=self.metrics,
            pause=pause,
            world=self.world,
        )
        return [evaluate]

    def stage(self, staging: Path) -> None:
        """A tokenizer that was made for this run is in no model directory yet."""
        if isinstance(self.config.model, Preset):
            save_tokenizer(self.tokenizer, staging / TOKENIZER)

    def write_final(self, trainer: Trainer) -> None:
        """A Hugging Face model directory or a PEFT adapter directory."""
        head = self.stored_head()
        with whole_on_main(self.model, self.world), self.world.abreast():
            if self.world.is_main:
                self._write_final(head)

    def _write_final(self, head: StoredHead | None) -> None:
        final = self.directory / FINAL
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
            return new_tokenizer(model, self.data.texts(), kept_in=self.directory / TOKENIZER)
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
        first: Batch = self.stream.peek()[0]
        return first

    def _untrained(self, dtype: torch.dtype) -> LanguageModel:
        config, name = self.config, self.config.language_model
        if isinstance(name, Preset):
            from whet.models.from_scratch.new_model import new_model

            model = new_model(name, self.tokenizer, seed=config.run.seed, mup=config.optim.mup)
            return model.to(self.device, dtype)
        if config.method.kind == "qlora":
            return load_quantised(name, dtype=dtype, device=self.device)
        model, _ = load_base(name, dtype=dtype, device=self.device)
        if config.optim.mup is not None:
            from whet.models.from_scratch.mup import refuse_other_multipliers

            refuse_other_multipliers(getattr(model, "spec", None), config.optim.mup, name=name)
        return model

    def _build_objective(self) -> Objective:
        if isinstance(self.data, RunData):
            return self._objective_on(self.data)
        parts = {name: self._objective_on(data) for name, data in self.data.parts.items()}
        from whet.objectives.mix import Mix

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


def use_fp8(model: LanguageModel, method: str, *, device: torch.device | None = None) -> str:
    """Let the linear layers of all blocks multiply in 8 bits while they train; says how many do."""
    device = device or model.device
    if method != "full":
        raise ConfigError(
            "run.fp8 is for training every weight", hint="set method.kind to full, or run.fp8 to false"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"run.fp8: {name} cannot multiply in 8 bits", hint="set run.fp8 to false")
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"run.fp8 does not run on {device.type}", hint="set run.fp8 to false")
    found = [module for block in model.blocks() for module in block.modules() if type(module) is Linear]
    fitting = [
        layer for layer in found if not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
    ]
    if not fitting:
        raise ConfigError(
            f"run.fp8: no linear layer of this model has sides that are multiples of {MULTIPLE}",
            hint="only whet's own architectures have such layers; set run.fp8 to false",
        )
    for layer in fitting:
        layer.fp8 = True
    slow = " (on a CPU only to try it out)" if device.type == "cpu" else ""
    return f"{len(fitting)} of {len(found)} linear layers multiply in 8 bits while training{slow}"
