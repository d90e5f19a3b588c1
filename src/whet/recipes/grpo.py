"""GRPO: the recipe that trains a model on rewards of its own answers."""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.config.objectives.grpo import GRPOObjective
from whet.config.run_config import RunConfig
from whet.data.packing import StepSettings
from whet.data.run_data import EvaluationSplit, Needs, RunData
from whet.data.tokens.prompts import Prompt, fitting
from whet.errors import ConfigError, StorageError
from whet.evaluation.answer_metrics import AnswerMetrics
from whet.given.given import Given
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.objectives.grpo import GRPO
from whet.parallel.process_group import SOLO, World
from whet.recipes.objective_inputs import ObjectiveInputs
from whet.recipes.recipe import Evaluators
from whet.recipes.reference_model import Reference, identity_of, load_reference, untrained_reference
from whet.recipes.registry import needs_of
from whet.recipes.text_recipe import TextRecipe
from whet.rl.rewards.worker_pool import RewardPool
from whet.rl.rollout_sampler import Sampler, evaluate_rewards
from whet.rl.rollouts import RolloutStream
from whet.run_directory import SAMPLES_FILE, set_aside_later_rows
from whet.storage import append_text
from whet.training.callbacks import Callback, Injector, Metrics, RunView

log = logging.getLogger("whet")
_SHOWN = 120  # characters of a sample in the log


class GRPORecipe(TextRecipe):
    """A language model on what it says itself."""

    data: RunData

    def __init__(
        self, config: RunConfig, directory: Path, world: World = SOLO, given: Given | None = None
    ) -> None:
        super().__init__(config, directory, world, given)
        check_config(config)

    def build(self, held: contextlib.ExitStack) -> None:
        """Rewards are started before weights are read: they may not even be there."""
        section = self.config.objective
        assert isinstance(section, GRPOObjective)
        self.load_metrics()
        self.data = RunData(self.config, needs_of(section), today=self.began, given=self.given.data)
        with self.world.first_alone():
            self.tokenizer = self._find_tokenizer()
            self.data.prepare(self.tokenizer)
        pool = held.enter_context(RewardPool(section, self.given.rewards))
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
        samples = RolloutSamples(self.directory / SAMPLES_FILE, every=every)
        return [*super().callbacks(pause), samples]

    def evaluators(self, split: str, found: EvaluationSplit | None, pause: Callable[[], None]) -> Evaluators:
        """The rewards of greedy answers."""
        judged = self.rollouts.evaluator(split, pause, self.metrics)
        return [] if judged is None else [judged]


class Reinforcement:
    """The rollouts of a run, and the evaluation of its model by the same rewards."""

    def __init__(
        self,
        config: RunConfig,
        prompts: Mapping[str, Sequence[Prompt]],
        *,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer
        pool: RewardPool,
        precision: Precision,
        world: World = SOLO,
    ) -> None:
        assert isinstance(config.objective, GRPOObjective)
        self.config = config
        self.model = model
        self.sampler = Sampler(model, tokenizer, config.objective, pool, precision, world)
        if not self.sampler.stops:
            log.warning("the tokenizer has no token that ends an answer: every completion is truncated")
        self.prompts = {name: self._fitting(name, found) for name, found in prompts.items()}

    def _fitting(self, name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
        data = self.config.data
        found = fitting(
            prompts,
            context=self.model.max_positions,
            max_length=data.max_length,
            max_new_tokens=self.sampler.settings.max_new_tokens,
            drop=data.too_long == "drop",
        )
        if len(found) < len(prompts):
            log.warning("%s: %d prompts are too long and left out", name, len(prompts) - len(found))
        return found

    def stream(self, steps: StepSettings, reference: Reference | None) -> RolloutStream:
        """The training steps."""
        return RolloutStream(
            self.sampler, self.prompts["train"], steps, seed=self.config.run.seed, reference=reference
        )

    def evaluator(
        self, name: str, pause: Callable[[], None], metrics: AnswerMetrics | None = None
    ) -> Callable[[], Metrics] | None:
        """Greedy answers to the prompts of a split, judged: eval_reward, its parts, exact_match, metrics."""
        if name not in self.prompts:
            return None
        return lambda: evaluate_rewards(self.sampler, self.prompts[name], metrics=metrics, pause=pause)


class RolloutSamples(Injector):  # so that a step's samples are written before its row
    """Writes some completions of a step into samples.jsonl, and into the log."""

    main_only = True

    def __init__(self, path: Path, *, every: int) -> None:
        self.path = path
        self.every = every

    def on_train_begin(self, run: RunView) -> None:
        """A resumed run writes the samples after its checkpoint again."""
        self.run = run
        with contextlib.suppress(StorageError):
            set_aside_later_rows(self.path, step=run.step, evaluated_step=None)

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Write the samples that came with the step."""
        if self.run.last_step is not None and (step == 1 or step % self.every == 0):
            self._write(step, self.run.last_step.samples)

    def _write(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON values
        lines = [json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples]
        try:
            append_text(self.path, "".join(lines))
        except StorageError as error:
            log.warning("%s; these samples are not kept", error.message)
        for sample in samples:
            prompt, text = (_short(sample[key]) for key in ("prompt", "completion"))
            log.info("step %d: reward %.3g: %s -> %s", step, sample["reward"], prompt, text)


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def needs(section: GRPOObjective) -> Needs:
    """Return what is read from records: prompts; the rest of a record is for the rewards."""
    return Needs(prompts=True)


def build_objective(section: GRPOObjective, inputs: ObjectiveInputs) -> GRPO:
    """Return the objective."""
    return GRPO(
        epsilon=section.epsilon,
        epsilon_high=section.epsilon_high,
        beta=section.beta,
        aggregation=section.aggregated_by,
        max_tokens=section.max_new_tokens,
        temperature=section.temperature,
    )


def check_config(config: RunConfig) -> None:
    """Refuse settings that would make another policy of the one that samples, or mean nothing here."""
    if config.method.kind != "full" and config.method.dropout:
        raise ConfigError(
            "objective grpo compares log-probabilities with those of a moment before: "
            "method.dropout must be 0"
        )
    if config.data.curriculum is not None:
        raise ConfigError("objective grpo draws its prompts evenly: it has no data.curriculum")
    if config.data.order == "mlx":
        raise ConfigError("objective grpo has no batches of mlx-lm: set data.order to shuffle or sequential")
    if config.run.batch_size is None:
        raise ConfigError("objective grpo counts prompts: set run.batch_size instead of run.batch_tokens")
