"""The kinds of runs that need more than a language model on texts, and which config is which."""

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from whet.adapters.classifier_files import StoredHead
from whet.config.grpo import GRPOObjective
from whet.config.quality import Quality
from whet.config.sections import RunConfig
from whet.models.language_model import LanguageModel
from whet.models.tabular import QualitySpec, TabularModel, architecture, new_quality_model
from whet.objectives.classify import Classify
from whet.objectives.regression import Regression
from whet.parallel.group import SOLO, World
from whet.training.callbacks import Callback
from whet.training.classifier_report import ClassificationEnd
from whet.training.provenance import weights_digest
from whet.training.quality_run import Gluing, QualityRow, QualitySummary, RowData, write_final
from whet.training.references import Reference, identity_of, load_reference, untrained_reference
from whet.training.reinforcement import Reinforcement, RolloutMetrics, check_config
from whet.training.rewards.pool import RewardPool
from whet.training.run_data import EvaluationSplit, RunData
from whet.training.tasks import needs_of
from whet.training.trainer import Trainer
from whet.training.work import Evaluators, TextWork, Work

log = logging.getLogger("whet")


class ClassWork(TextWork):
    """A head on the model tells classes apart."""

    data: RunData

    def callbacks(self, pause: Callable[[], None]) -> list[Callback]:
        """The one that writes the report, too; it looks at the untrained model now."""
        assert isinstance(self.task, Classify)
        self.end = ClassificationEnd(
            self.config,
            self.data,
            self.task,
            model=self.model,
            directory=self.directory,
            precision=self.precision,
            world=self.world,
        )
        return [*super().callbacks(pause), self.end]

    def files(self) -> dict[str, str]:
        """Which records were held out, too."""
        held_out = self.data.held_out
        more = {} if held_out is None else {"held_out.json": json.dumps(held_out, indent=2) + "\n"}
        return {**super().files(), **more}

    def stored_head(self) -> StoredHead | None:
        """The trained one."""
        return self.end.stored_head()


class RewardWork(TextWork):
    """A language model on what it says itself."""

    data: RunData

    def __init__(self, config: RunConfig, directory: Path, world: World = SOLO) -> None:
        super().__init__(config, directory, world)
        check_config(config)

    def build(self, held: contextlib.ExitStack) -> None:
        """Rewards are started before weights are read: they may not even be there."""
        section = self.config.objective
        assert isinstance(section, GRPOObjective)
        self.data = RunData(self.config, needs_of(section), today=self.began)
        with self.world.first_alone():
            self.tokenizer = self._find_tokenizer()
            self.data.prepare(self.tokenizer)
        pool = held.enter_context(RewardPool(section))
        self._build_model_and_objective()
        self.rollouts = Reinforcement(
            self.config,
            self.data.prompts,
            model=self.model,
            tokenizer=self.tokenizer,
            pool=pool,
            precision=self.precision,
            world=self.world,
        )
        reference = self._reference(section) if section.beta else None
        self.stream = self.rollouts.stream(self.data.steps, reference)

    def _reference(self, section: GRPOObjective) -> Reference:
        if (name := section.reference_model) is None:
            return untrained_reference(self.model)
        prompts = [prompt for part in self.rollouts.prompts.values() for prompt in part]
        longest = max(len(prompt.tokens) for prompt in prompts) + section.max_new_tokens
        reference = load_reference(
            name, self.model, self.tokenizer, precision=self.precision, longest=longest
        )
        self.identities[name] = identity_of(reference)
        return reference

    def frozen_models(self) -> list[LanguageModel]:
        """The reference that rollouts are compared with."""
        reference = self.stream.reference
        return [reference] if isinstance(reference, LanguageModel) else []

    def callbacks(self, pause: Callable[[], None]) -> list[Callback]:
        """The one that reports rollouts, too."""
        every = self.rollouts.sampler.settings.samples_every
        samples = RolloutMetrics(self.stream, self.directory / "samples.jsonl", every=every)
        return [*super().callbacks(pause), samples]

    def evaluators(self, split: str, found: EvaluationSplit | None, pause: Callable[[], None]) -> Evaluators:
        """The rewards of greedy answers."""
        judged = self.rollouts.evaluator(split, pause)
        return [] if judged is None else [judged]


class RowWork(Work):
    """The quality-decision models, on rows of numbers."""

    data: RowData
    model: TabularModel

    def build(self, held: contextlib.ExitStack) -> None:
        """Rows, then the model."""
        section, objective = self.config.model, self.config.objective
        assert isinstance(section, Quality)
        assert objective.kind == "regression"
        self.data = RowData(self.config)
        with self.world.first_alone():
            self.data.prepare()
        self.stream = self.data.stream()
        log.info("device: %s; precision %s", self.device, self.precision.reason)
        self.model = new_quality_model(QualitySpec.from_config(section), seed=self.config.run.seed)
        self.model.to(self.device, self.precision.trained).requires_grad_(True)
        self.base_digest = weights_digest(self.model)
        self.announce(self.model)
        self.objective = Regression(gluing=objective.gluing)

    def callbacks(self, pause: Callable[[], None]) -> list[Callback]:
        """How experts agree, the rows' other names, and the last line."""
        return [Gluing(), QualityRow(self.model.spec), QualitySummary(self.model.spec, self.directory)]

    def files(self) -> dict[str, str]:
        """The architecture, as the task's other tools read it."""
        return {"arch.json": json.dumps(architecture(self.model.spec), indent=2) + "\n"}

    def write_final(self, trainer: Trainer) -> None:
        """The model, and the checkpoint that the task's other tools read."""
        with self.world.abreast():
            if self.world.is_main:
                write_final(trainer, self.directory)
