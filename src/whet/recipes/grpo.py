"""GRPO: the recipe that trains a model on rewards of its own answers."""

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
from whet.data.tokens.prompts import Prompt, fitting
from whet.errors import ConfigError, StorageError
from whet.evaluation.answer_metrics import AnswerMetrics
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.objectives.grpo import GRPO
from whet.parallel.process_group import SOLO, World
from whet.recipes.frozen_models import refuse_longer_texts
from whet.recipes.recipe import (
    UNTRAINED,
    Build,
    ColumnShape,
    Evaluators,
    Frozen,
    FrozenModel,
    Recipe,
    StepShape,
)
from whet.rl.rewards.worker_pool import RewardPool
from whet.rl.rollout_sampler import Sampler, evaluate_rewards
from whet.rl.rollouts import RolloutStream
from whet.run_directory import SAMPLES_FILE, set_aside_later_rows
from whet.storage import append_text
from whet.training.callbacks import Callback, Injector, Metrics, RunView

log = logging.getLogger("whet")
_SHOWN = 120  # characters of a sample in the log


class GRPORecipe(Recipe[GRPOObjective]):
    """A language model on its own answers."""

    has_batches_at_start = False

    def check(self) -> None:
        """Refuse settings that would make another policy of the one that samples, or mean nothing here."""
        config = self.config
        if config.method.kind != "full" and config.method.dropout:
            raise ConfigError(
                "objective grpo compares log-probabilities with those of a moment before: "
                "method.dropout must be 0"
            )
        if config.data.curriculum is not None:
            raise ConfigError("objective grpo draws its prompts evenly: it has no data.curriculum")
        if config.data.order == "mlx":
            raise ConfigError(
                "objective grpo has no batches of mlx-lm: set data.order to shuffle or sequential"
            )
        if config.run.batch_size is None:
            raise ConfigError("objective grpo counts prompts: set run.batch_size instead of run.batch_tokens")

    def needs(self) -> Needs:
        """Return what is read from records: prompts; the rest of a record is for the rewards."""
        return Needs(prompts=True)

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the reference of the KL term, where it counts."""
        if not self.section.beta:
            return {}
        name = self.section.reference_model or UNTRAINED
        return {"reference": FrozenModel(name, "objective.reference_model", trained_dtype=True)}

    def step_shape(self) -> StepShape:
        """Return the shape of groups of completions."""
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
            more_tokens=section.max_new_tokens,
            cached_tokens=rows * (self.config.data.max_length + section.max_new_tokens),
            columns=columns,
        )

    def start(self, held: contextlib.ExitStack) -> None:
        """Start the rewards, too: they may not even be there."""
        super().start(held)
        self.pool = held.enter_context(RewardPool(self.section, self.given.rewards))

    def prepare(self, b: Build) -> None:
        """Make the sampler, and refuse a reference that cannot read the longest completion."""
        self.rollouts = Reinforcement(
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
            prompts = [prompt for part in self.rollouts.prompts.values() for prompt in part]
            longest = max(len(prompt.tokens) for prompt in prompts) + self.section.max_new_tokens
            refuse_longer_texts(self.frozen_models()["reference"], reference, longest)

    def objective(self, b: Build) -> GRPO:
        """Return the objective."""
        section = self.section
        return GRPO(
            epsilon=section.epsilon,
            epsilon_high=section.epsilon_high,
            beta=section.beta,
            aggregation=section.aggregated_by,
            max_tokens=section.max_new_tokens,
            temperature=section.temperature,
        )

    def steps(self, b: Build) -> RolloutStream:
        """Return steps on rollouts."""
        return self.rollouts.stream(b.data.steps, b.frozen.get("reference"))

    def callbacks(self, b: Build) -> list[Callback]:
        """Return the one that writes samples."""
        return [RolloutSamples(b.directory / SAMPLES_FILE, every=self.section.samples_every)]

    def evaluators(
        self, b: Build, split: str, data: EvaluationSplit | None, pause: Callable[[], None]
    ) -> Evaluators:
        """Return the rewards of greedy answers, and the config's own metrics of them."""
        judged = self.rollouts.evaluator(split, pause, self.metrics)
        return [] if judged is None else [judged]


class Reinforcement:
    """The rollouts of a run, and the evaluation of its model by the same rewards."""

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
        world: World = SOLO,
    ) -> None:
        self.config = config
        self.model = model
        self.sampler = Sampler(model, tokenizer, section, pool, precision, world)
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

    def stream(self, steps: StepSettings, reference: Frozen | None) -> RolloutStream:
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
