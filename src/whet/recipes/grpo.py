"""GRPO: train a model on the rewards of completions that it samples."""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from whet.config.objectives.grpo import GRPOObjective
from whet.config.run_config import RunConfig
from whet.data.packing import StepSettings
from whet.data.run_data import EvaluationSplit, Needs
from whet.data.tokens.prompts import Prompt, select_fitting_prompts
from whet.errors import ConfigError, StorageError
from whet.evaluation.answer_metrics import AnswerMetrics
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.objectives.grpo import GRPO
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.recipes.frozen_models import check_reference_length
from whet.recipes.recipe import (
    INITIAL_MODEL,
    Build,
    ColumnShape,
    Evaluators,
    Frozen,
    FrozenModel,
    Recipe,
    StepShape,
)
from whet.rl.rewards.worker_pool import RewardPool
from whet.rl.rollout_sampler import RolloutSampler, evaluate_rewards
from whet.rl.rollouts import RolloutStream
from whet.run_directory import SAMPLES_FILE, move_superseded_rows
from whet.storage import append_text
from whet.training.callbacks import Callback, Injector, Metrics, RunView

log = logging.getLogger("whet")
_MAX_LOGGED_CHARACTERS = 120  # of a prompt or a completion in the log


class GRPORecipe(Recipe[GRPOObjective]):
    """Trains a language model on rewards of its completions."""

    has_batches_at_start = False

    def check(self) -> None:
        """Raise a ConfigError for settings that would change the sampled policy or do not apply to GRPO."""
        config = self.config
        if config.method.kind != "full" and config.method.dropout:
            raise ConfigError(
                "objective grpo does not support dropout, which makes the trained policy differ from the "
                "sampled one: method.dropout must be 0"
            )
        if config.data.curriculum is not None:
            raise ConfigError(
                "objective grpo does not support data.curriculum: it samples prompts uniformly",
                hint="remove data.curriculum",
            )
        if config.data.order == "mlx":
            raise ConfigError(
                "objective grpo does not support data.order mlx: set data.order to shuffle or sequential"
            )
        if config.run.batch_size is None:
            raise ConfigError(
                "objective grpo counts a step in prompts: set run.batch_size instead of run.batch_tokens"
            )

    def needs(self) -> Needs:
        """Request prompts only; the reward functions get the rest of a record."""
        return Needs(prompts=True, weights=False)

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the reference model of the KL term, or nothing if beta is 0."""
        if not self.section.beta:
            return {}
        name = self.section.reference_model or INITIAL_MODEL
        return {"reference": FrozenModel(name, "objective.reference_model", trained_dtype=True)}

    def step_shape(self) -> StepShape:
        """Return the shape of a step: a group of completions per prompt."""
        section, run = self.section, self.config.run
        rows = min(section.generate_rows, section.group_size * (run.batch_size or section.generate_rows))
        columns = {
            "old_logprobs": ColumnShape("token"),
            **({"reference_logprobs": ColumnShape("token")} if section.beta else {}),
            "advantages": ColumnShape("document"),
            "lengths": ColumnShape("document", (), torch.long),
        }
        return StepShape(
            documents=section.group_size,
            completion_tokens=section.max_new_tokens,
            cached_tokens=rows * (self.config.data.max_length + section.max_new_tokens),
            columns=columns,
        )

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start the reward workers, so that missing reward functions fail before the model is loaded."""
        super().start(stack)
        self.pool = stack.enter_context(RewardPool(self.section, self.given.rewards))

    def prepare(self, b: Build) -> None:
        """Create the sampler, and check that the reference model can read the longest completion."""
        self.rollouts = RolloutSource(
            self.config,
            self.section,
            b.data.prompts,
            model=b.model,
            tokenizer=b.tokenizer,
            pool=self.pool,
            precision=b.precision,
            world=b.world,
        )
        reference = b.frozen.get("reference")
        if isinstance(reference, LanguageModel) and self.section.reference_model is not None:
            prompts = [prompt for split in self.rollouts.prompts.values() for prompt in split]
            longest = max(len(prompt.tokens) for prompt in prompts) + self.section.max_new_tokens
            check_reference_length(self.frozen_models()["reference"], reference, longest)

    def objective(self, b: Build) -> GRPO:
        """Return the GRPO objective."""
        section = self.section
        return GRPO(
            epsilon=section.epsilon,
            epsilon_high=section.epsilon_high,
            beta=section.beta,
            aggregation=section.resolved_aggregation,
            max_tokens=section.max_new_tokens,
            temperature=section.temperature,
        )

    def steps(self, b: Build) -> RolloutStream:
        """Return the training steps, which sample rollouts."""
        return self.rollouts.stream(b.data.steps, b.frozen.get("reference"))

    def callbacks(self, b: Build) -> list[Callback]:
        """Return the callback that writes some completions to samples.jsonl."""
        return [RolloutSamples(b.directory / SAMPLES_FILE, every=self.section.samples_every)]

    def evaluators(
        self, b: Build, split: str, data: EvaluationSplit | None, pause: Callable[[], None]
    ) -> Evaluators:
        """Return the evaluator of greedy completions: their rewards, and the metrics of eval.metrics."""
        evaluator = self.rollouts.evaluator(split, pause, self.metrics)
        return [] if evaluator is None else [evaluator]


class RolloutSource:
    """Samples the rollouts of a run, and evaluates its model with the same rewards."""

    def __init__(
        self,
        config: RunConfig,
        section: GRPOObjective,
        prompts: Mapping[str, Sequence[Prompt]],
        *,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer
        pool: RewardPool,
        precision: Precision,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.config = config
        self.model = model
        self.sampler = RolloutSampler(model, tokenizer, section, pool, precision, world)
        if not self.sampler.stops:
            log.warning(
                "the tokenizer has no stop token: every completion is truncated at objective.max_new_tokens"
            )
        self.prompts = {split: self._fitting(split, all_prompts) for split, all_prompts in prompts.items()}

    def _fitting(self, split: str, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts that leave room for a completion in the model's context."""
        data = self.config.data
        fitting_prompts = select_fitting_prompts(
            prompts,
            context=self.model.max_positions,
            max_length=data.max_length,
            max_new_tokens=self.sampler.settings.max_new_tokens,
            drop=data.too_long == "drop",
        )
        if dropped := len(prompts) - len(fitting_prompts):
            log.warning("%s: %d prompts are too long and are left out", split, dropped)
        return fitting_prompts

    def stream(self, steps: StepSettings, reference: Frozen | None) -> RolloutStream:
        """Return the training steps."""
        return RolloutStream(
            self.sampler, self.prompts["train"], steps, seed=self.config.run.seed, reference=reference
        )

    def evaluator(
        self, split: str, pause: Callable[[], None], metrics: AnswerMetrics | None = None
    ) -> Callable[[], Metrics] | None:
        """Return a function that evaluates greedy completions of a split's prompts, or None without a split.

        Its metrics are eval_reward, the value of each reward, exact_match and the functions of eval.metrics.
        """
        if split not in self.prompts:
            return None
        return lambda: evaluate_rewards(self.sampler, self.prompts[split], metrics=metrics, pause=pause)


class RolloutSamples(Injector):  # an injector, to write a step's samples before its metrics row
    """Writes some completions of a step to samples.jsonl and to the log."""

    main_only = True

    def __init__(self, path: Path, *, every: int) -> None:
        self.path = path
        self.every = every

    def on_train_begin(self, run: RunView) -> None:
        """Move samples from after the checkpoint to another file, because a resumed run writes them again."""
        self.run = run
        with contextlib.suppress(StorageError):
            move_superseded_rows(self.path, step=run.step, evaluated_step=None)

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Write the samples of the step if they are due."""
        if self.run.last_step is not None and (step == 1 or step % self.every == 0):
            self._write(step, self.run.last_step.samples)

    def _write(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON values
        lines = [json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples]
        try:
            append_text(self.path, "".join(lines))
        except StorageError as error:
            log.warning("%s; the samples of step %d are lost", error.message, step)
        for sample in samples:
            prompt, completion = (_truncate(sample[key]) for key in ("prompt", "completion"))
            log.info("step %d: reward %.3g: %s -> %s", step, sample["reward"], prompt, completion)


def _truncate(text: str) -> str:
    return repr(text if len(text) <= _MAX_LOGGED_CHARACTERS else f"{text[:_MAX_LOGGED_CHARACTERS]}...")
