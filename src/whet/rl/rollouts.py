"""Rollouts: prompts completed by the model in training, scored by rewards, and batched into steps."""

import random
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from whet.adapters.adapter import adapters_off
from whet.data.batches import Batch, Step, StepStream, batch_from_rows
from whet.data.packing import StepSettings, seeded_permutation, split_step
from whet.data.tokens.examples import Example
from whet.data.tokens.prompts import Prompt
from whet.errors import CheckpointError, ConfigError, RunError
from whet.generation.sampling import Sampling
from whet.models.language_model import LanguageModel, eval_mode
from whet.objectives.grpo import advantages_of, completion_logprobs, head_logprobs
from whet.parallel.gradient_sync import is_sharded
from whet.rl.rollout_sampler import RolloutSampler
from whet.training.callbacks import Metrics
from whet.training.loss import autocast_context


@dataclass(frozen=True)
class Rollout:
    """Completions with their advantages, log-probabilities and metrics, as plain values for checkpoints."""

    prompts: list[int]  # indices into the data
    completions: list[list[int]]  # tokens; group_size completions per prompt, in order
    kept: list[int]  # indices of the completions to train on
    advantages: list[float]  # one per completion
    old_logprobs: list[list[float]]  # one list per entry of `kept`
    reference_logprobs: list[list[float]] | None  # one list per entry of `kept`
    metrics: Metrics
    samples: list[dict[str, Any]]  # Any: JSON values


@dataclass(frozen=True)
class RolloutStep(Step):
    """One optimizer step on completions of a rollout."""

    is_fresh: bool = False  # the first step of its rollout: the policy is still the one that sampled


class RolloutStream(StepStream):
    """An endless stream of optimizer steps on completions sampled from the current model.

    The prompts, the seeds and the positions of completions in a step are pure functions of (seed, rollout,
    step). The completions are not, so a state saved in the middle of a rollout includes the rollout.

    Args:
        sampler: generates and scores the completions.
        prompts: the prompts of the training split.
        steps: the settings of steps; `batch_size` is the number of prompts per step.
        seed: determines the order of prompts and the seeds of completions.
        reference: the reference model; "adapters-off" is the model in training without its adapters.
    """

    def __init__(
        self,
        sampler: RolloutSampler,
        prompts: Sequence[Prompt],
        steps: StepSettings,
        *,
        seed: int,
        reference: LanguageModel | Literal["adapters-off"] | None = None,
    ) -> None:
        if steps.batch_size is None:
            raise ConfigError("objective grpo counts prompts: set run.batch_size instead of run.batch_tokens")
        self.sampler = sampler
        self.settings = sampler.settings
        self.prompts = prompts
        self.steps = steps
        self.seed = seed
        self.reference = reference
        self.rollout_index = 0  # index of the current rollout
        self.step = 0  # index of the next step within it
        self.current: Rollout | None = None
        self._epoch_order: tuple[int, np.ndarray] | None = None  # cached (epoch, order of the prompts)
        self._prompts_per_step = steps.batch_size
        self._prompts_per_rollout = steps.batch_size * self.settings.minibatches
        longest = max(prompts, key=lambda prompt: len(prompt.tokens))
        tokens = len(longest.tokens) + self.settings.max_new_tokens
        steps.check(tokens - 1, longest.question.origin, texts=0)
        identity = (len(prompts), self._prompts_per_rollout, seed, steps.order, self.settings.group_size)
        self._fingerprint = zlib.crc32(repr(identity).encode())

    def steps_in(self, epoch: int) -> int:
        """Return the number of optimizer steps on the rollouts that start in one epoch."""
        before, after = (
            -(-epochs * len(self.prompts) // self._prompts_per_rollout) for epochs in (epoch, epoch + 1)
        )
        return (after - before) * self.settings.inner_epochs * self.settings.minibatches

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the position in the stream, with the current rollout if it has steps left."""
        current = None if self.current is None else dict(vars(self.current))
        return {
            "rollout": self.rollout_index,
            "step": self.step,
            "stream": self._fingerprint,
            "current": current,
        }

    def seek(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Move to the position of `state`, which a stream with the same prompts and settings saved."""
        if state["stream"] != self._fingerprint:
            raise CheckpointError(
                "the prompts, their order or the rollout size have changed since the checkpoint was saved",
                hint="restore data, run.seed, run.batch_size and objective, or start a new run",
            )
        self.rollout_index, self.step = state["rollout"], state["step"]
        self.current = None if state["current"] is None else Rollout(**state["current"])

    def __next__(self) -> RolloutStep:
        if self.current is None:
            self.current = self._sample_rollout()
        rollout = self.current
        plan = self._plan_steps(rollout)
        batches = list(self._batches(rollout, plan[self.step]))
        step = RolloutStep(batches, rollout.metrics, rollout.samples, is_fresh=self.step == 0)
        self.step += 1
        if self.step == len(plan):
            self.rollout_index, self.step, self.current = self.rollout_index + 1, 0, None
        return step

    def can_prefetch(self) -> bool:
        """Return whether the next step needs no new completions, which are too expensive to discard."""
        return self.current is not None

    def after_update(self, step: Step, number: int, metrics: Mapping[str, Any]) -> None:  # Any: JSON values
        """Check that the first step on a rollout used the policy that sampled it.

        Raises:
            RunError: its log-probabilities differ from those computed for the rollout.
        """
        log_ratio = metrics.get("log_ratio", 0.0)
        if isinstance(step, RolloutStep) and step.is_fresh and log_ratio > self.tolerance:
            raise RunError(
                f"step {number}: the trainer's log-probabilities differ by {log_ratio:.3g} from those it "
                f"computed with the same weights before the step (limit: {self.tolerance:g}). The forward "
                "pass is not deterministic",
                hint="turn off dropout and random routing, or raise objective.mismatch_tolerance",
            )

    def _plan_steps(self, rollout: Rollout) -> list[list[int]]:
        """Return the indices into `kept` of each step: complete groups, in a new order per inner epoch."""
        size, count = self.settings.group_size, len(rollout.prompts)
        steps = []
        for epoch in range(self.settings.inner_epochs):
            order = np.arange(count)
            if self.settings.minibatches > 1:
                inner = self.rollout_index * self.settings.inner_epochs + epoch
                order = seeded_permutation(count, seed=self.seed, epoch=inner, salt=2)
            for start in range(0, count, self._prompts_per_step):
                groups = set(order[start : start + self._prompts_per_step].tolist())
                steps.append([i for i, index in enumerate(rollout.kept) if index // size in groups])
        return [step for step in steps if step]  # all completions of a step may have been truncated

    def _batches(self, rollout: Rollout, step: Sequence[int]) -> Iterator[Batch]:
        examples = self._examples(rollout)
        for rows in split_step(step, [example.length for example in examples], self.steps):
            indices = [i for row in rows for i in row]
            reference = rollout.reference_logprobs
            batch = batch_from_rows(rows, examples, self.steps).with_columns(
                "token",
                old_logprobs=_concatenate(rollout.old_logprobs, indices),
                reference_logprobs=None if reference is None else _concatenate(reference, indices),
            )
            yield batch.with_columns(
                "document",
                advantages=torch.tensor([rollout.advantages[rollout.kept[i]] for i in indices]),
                lengths=torch.tensor([len(rollout.completions[rollout.kept[i]]) for i in indices]),
            )

    def _examples(self, rollout: Rollout) -> list[Example]:
        return [
            _example(
                self.prompts[rollout.prompts[index // self.settings.group_size]], rollout.completions[index]
            )
            for index in rollout.kept
        ]

    def _sample_rollout(self) -> Rollout:
        """Generate and score the next rollout, and compute its advantages and log-probabilities."""
        prompt_indices = self._next_prompts()
        size = self.settings.group_size
        prompts = [self.prompts[i] for i in prompt_indices for _ in range(size)]
        started = time.perf_counter()
        seeds = [completion_seed(self.seed, self.rollout_index, row) for row in range(len(prompts))]
        sampling = Sampling(temperature=self.settings.temperature)
        completions = self.sampler.complete(prompts, sampling=sampling, seeds=seeds)
        generated = time.perf_counter()
        texts = [self.sampler.text(completion) for completion in completions]
        scores = self.sampler.score(prompts, texts)
        scored = time.perf_counter()
        rewards = scores @ self.sampler.reward_weights
        grouped = torch.from_numpy(rewards).view(-1, size)
        kind, std = self.settings.advantage, self.settings.advantage_std
        advantages = advantages_of(grouped, kind, std=std).flatten().tolist()
        kept = [i for i, c in enumerate(completions) if c.finished or not self.settings.mask_truncated]
        if not kept:
            raise RunError(
                f"none of the {len(completions)} completions of rollout {self.rollout_index + 1} ended "
                f"within objective.max_new_tokens={self.settings.max_new_tokens}, and "
                "objective.mask_truncated excludes truncated completions, so there is nothing to train on",
                hint="raise objective.max_new_tokens, or set objective.mask_truncated to false",
            )
        examples = [_example(prompts[i], completions[i].tokens) for i in kept]
        old, reference, plain = self._compute_logprobs(examples)
        lengths = np.array([len(completion.tokens) for completion in completions])
        metrics: Metrics = {
            **self._reward_metrics(scores, rewards),
            "no_signal_fraction": float((grouped.amax(1) == grouped.amin(1)).double().mean()),
            "completion_tokens": float(lengths.mean()),
            "truncated_fraction": sum(not c.finished for c in completions) / len(completions),
            **self._check_mismatch([completions[i].logprobs for i in kept], plain),
            "generation_tokens_per_s": float(lengths.sum()) / (generated - started),
            "generation_s": generated - started,
            "reward_s": scored - generated,
        }
        samples = [
            self._sample(prompts[i], texts[i], completions[i].finished, scores[i], rewards[i], advantages[i])
            for i in range(0, len(prompts), size)[: self.settings.samples]
        ]
        return Rollout(
            prompt_indices,
            [c.tokens for c in completions],
            kept,
            advantages,
            old,
            reference,
            metrics,
            samples,
        )

    def _next_prompts(self) -> list[int]:
        """Return the prompt indices of this rollout: a slice of the concatenated orders of all epochs."""
        first, count = self.rollout_index * self._prompts_per_rollout, len(self.prompts)
        indices = []
        for position in range(first, first + self._prompts_per_rollout):
            epoch, index = divmod(position, count)
            indices.append(index if self.steps.order == "sequential" else int(self._order(epoch)[index]))
        return indices

    def _order(self, epoch: int) -> np.ndarray:
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, seeded_permutation(len(self.prompts), seed=self.seed, epoch=epoch))
        return self._epoch_order[1]

    def _compute_logprobs(
        self, examples: Sequence[Example]
    ) -> tuple[list[list[float]], list[list[float]] | None, list[list[float]]]:
        """Return log-probabilities from the trainer's forward pass, one list per example and kind.

        The kinds are: of the policy at the sampling temperature, of the reference model at the same
        temperature, and of the policy at temperature 1.
        """
        model, temperature = self.sampler.model, self.settings.temperature
        old: list[list[float]] = [[] for _ in examples]
        plain = old if temperature == 1.0 else [[] for _ in examples]
        reference: list[list[float]] | None = None if self.reference is None else [[] for _ in examples]
        lengths, world = [example.length for example in examples], self.sampler.world
        microbatches = split_step(range(len(examples)), lengths, self.steps)
        local: list[list[torch.Tensor]] = []
        for _, rows, counts in world.local_items(microbatches, pad=is_sharded(model)):
            batch = batch_from_rows(rows, examples, self.steps).to(model.device)
            with eval_mode(model), autocast_context(self.sampler.precision, model.device):
                states = model.states(batch)
                logprobs = [head_logprobs(model, states, batch, temperature=temperature)]
                if temperature != 1.0:
                    logprobs.append(head_logprobs(model, states, batch, temperature=1.0))
                if reference is not None:
                    logprobs.append(self._reference_logprobs(batch))
            local += [[values.float().cpu() for values in logprobs]] if counts else []
        targets = [
            values for values in (old, None if plain is old else plain, reference) if values is not None
        ]
        for rows, logprobs in zip(microbatches, world.gather_in_order(local, len(microbatches)), strict=True):
            indices = [i for row in rows for i in row]
            for values, target in zip(logprobs, targets, strict=True):
                _scatter(values, [examples[i].supervised_count for i in indices], indices, target)
        return old, reference, plain

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        temperature = self.settings.temperature
        if isinstance(self.reference, LanguageModel):
            return completion_logprobs(self.reference, batch, temperature=temperature)
        with adapters_off(self.sampler.model):
            return completion_logprobs(self.sampler.model, batch, temperature=temperature)

    def _reward_metrics(self, scores: np.ndarray, rewards: np.ndarray) -> Metrics:
        metrics: Metrics = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        for index, reward in enumerate(self.settings.rewards):
            metrics[f"reward_mean_{reward.label}"] = float(scores[:, index].mean())
            metrics[f"reward_std_{reward.label}"] = float(scores[:, index].std())
        if self.settings.on_error is not None:
            metrics["reward_errors"] = self.sampler.pop_failure_count()
        return metrics

    def _check_mismatch(self, sampled: list[list[float]], trained: list[list[float]]) -> Metrics:
        """Return the difference between the sampler's and the trainer's log-probabilities (temperature 1).

        Raises:
            RunError: the mean difference is larger than the tolerance.
        """
        difference = np.abs(np.concatenate(sampled) - np.concatenate(trained))
        metrics = {"mismatch": float(difference.mean()), "mismatch_max": float(difference.max())}
        if not metrics["mismatch"] <= self.tolerance:
            raise RunError(
                "the sampler's and the trainer's log-probabilities of the same tokens differ by "
                f"{metrics['mismatch']:.3g} on average ({metrics['mismatch_max']:.3g} at most; limit: "
                f"{self.tolerance:g}). The completions were not sampled from the policy in training",
                hint="raise objective.mismatch_tolerance only if you know the cause (e.g. routing in bf16)",
            )
        return metrics

    @property
    def tolerance(self) -> float:
        """The largest accepted mean difference between log-probabilities that should be equal."""
        is_full_precision = self.sampler.precision.compute in (torch.float32, torch.float64)
        return self.settings.mismatch_tolerance or (1e-3 if is_full_precision else 0.1)

    def _sample(
        self, prompt: Prompt, text: str, finished: bool, scores: np.ndarray, reward: float, advantage: float
    ) -> dict[str, Any]:  # Any: JSON values
        return {
            "prompt": prompt.question.text,
            "completion": text,
            "finished": finished,
            "reward": float(reward),
            "rewards": {
                each.label: float(score) for each, score in zip(self.settings.rewards, scores, strict=True)
            },
            "advantage": advantage,
        }


def completion_seed(seed: int, rollout: int, row: int) -> int:
    """Return the seed of one completion."""
    return random.Random(f"{seed}/{rollout}/{row}").getrandbits(63)


def _example(prompt: Prompt, completion: Sequence[int]) -> Example:
    loss_mask = [False] * len(prompt.tokens) + [True] * len(completion)
    return Example([*prompt.tokens, *completion], loss_mask, prompt.question.origin)


def _concatenate(values: Sequence[Sequence[float]], indices: Sequence[int]) -> torch.Tensor:
    """Return one value per supervised token, in the order of a batch's examples."""
    return torch.tensor([value for i in indices for value in values[i]])


def _scatter(
    values: torch.Tensor, sizes: Sequence[int], indices: Sequence[int], target: list[list[float]]
) -> None:
    """Split the values of a batch's supervised tokens by example, and store them in `target`."""
    for i, part in zip(indices, values.split(list(sizes)), strict=True):
        target[i] = part.tolist()
