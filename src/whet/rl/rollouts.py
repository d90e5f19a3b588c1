"""Rollouts: prompts completed by the model that is trained, judged, and handed to the trainer as steps."""

import random
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from whet.adapters.adapter import adapters_off
from whet.data.batches import Batch, Step, StepStream, rows_batch
from whet.data.packing import StepSettings, permutation, split_step
from whet.data.tokens.examples import Example
from whet.data.tokens.prompts import Prompt
from whet.errors import CheckpointError, ConfigError, RunError
from whet.generation.sampling import Sampling
from whet.models.language_model import LanguageModel, evaluating
from whet.objectives.grpo import advantages_of, completion_logprobs, head_logprobs
from whet.parallel.gradient_sync import is_sharded
from whet.rl.rollout_sampler import Sampler
from whet.training.callbacks import Metrics
from whet.training.loss import in_precision


@dataclass(frozen=True)
class Rollout:
    """Completions and all that was found out about them, in plain values: a checkpoint holds it."""

    prompts: list[int]  # places in the data
    completions: list[list[int]]  # tokens; group_size of them to each prompt, in order
    kept: list[int]  # completions that are learned from
    advantages: list[float]  # of all
    old_logprobs: list[list[float]]  # of those kept
    reference_logprobs: list[list[float]] | None  # of those kept
    metrics: Metrics
    samples: list[dict[str, Any]]  # Any: JSON values


@dataclass(frozen=True)
class RolloutStep(Step):
    """A step on completions."""

    is_fresh: bool = False  # the first on its rollout: the policy is still the one that sampled


class RolloutStream(StepStream):
    """An endless stream of optimizer steps over completions that are sampled as the model changes.

    Which prompts, seeds and completions are in a step are pure functions of (seed, rollout, step). What the
    model made of the prompts is not: so a state in the middle of a rollout holds the rollout.
    """

    def __init__(
        self,
        sampler: Sampler,
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
        self.number = 0  # of the rollout that the next step is from
        self.step = 0  # within it
        self.current: Rollout | None = None
        self._ordered: tuple[int, np.ndarray] | None = None
        self._per_step = steps.batch_size
        self._per_rollout = steps.batch_size * self.settings.minibatches
        longest = max(prompts, key=lambda prompt: len(prompt.tokens))
        tokens = len(longest.tokens) + self.settings.max_new_tokens
        steps.check(tokens - 1, longest.question.origin, texts=0)
        what = (len(prompts), self._per_rollout, seed, steps.order, self.settings.group_size)
        self._mark = zlib.crc32(repr(what).encode())

    def steps_in(self, epoch: int) -> int:
        """Optimizer steps of the rollouts that begin in one pass over the prompts."""
        before, after = (-(-passes * len(self.prompts) // self._per_rollout) for passes in (epoch, epoch + 1))
        return (after - before) * self.settings.inner_epochs * self.settings.minibatches

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Where it is, and the rollout where steps of it are still to come."""
        current = None if self.current is None else dict(vars(self.current))
        return {"rollout": self.number, "step": self.step, "stream": self._mark, "current": current}

    def seek(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Go to where `state` was taken, in a stream of the same prompts and settings."""
        if state["stream"] != self._mark:
            raise CheckpointError(
                "the prompts, their order or the size of a rollout have changed since this was saved",
                hint="restore data, run.seed, run.batch_size and objective, or start a new run",
            )
        self.number, self.step = state["rollout"], state["step"]
        self.current = None if state["current"] is None else Rollout(**state["current"])

    def __next__(self) -> RolloutStep:
        if self.current is None:
            self.current = self._roll()
        rollout = self.current
        plan = self._plan(rollout)
        batches = list(self._batches(rollout, plan[self.step]))
        step = RolloutStep(batches, rollout.metrics, rollout.samples, is_fresh=self.step == 0)
        self.step += 1
        if self.step == len(plan):
            self.number, self.step, self.current = self.number + 1, 0, None
        return step

    def can_prefetch(self) -> bool:
        """Return whether the next step needs no new completions: these cost too much to discard."""
        return self.current is not None

    def after_update(self, step: Step, number: int, metrics: Mapping[str, Any]) -> None:  # Any: JSON values
        """Check that the first step on a rollout found the policy that sampled it."""
        apart = metrics.get("log_ratio", 0.0)
        if isinstance(step, RolloutStep) and step.is_fresh and apart > self.tolerance:
            raise RunError(
                f"step {number}: the trainer's log-probabilities are {apart:.3g} away from its own of a "
                f"moment before, and {self.tolerance:g} is tolerated: something is random in the model",
                hint="turn off what drops or routes at random, or raise objective.mismatch_tolerance",
            )

    def _plan(self, rollout: Rollout) -> list[list[int]]:
        """Places in `kept` of the completions of each step; whole groups, in another order in each epoch."""
        size, count = self.settings.group_size, len(rollout.prompts)
        found = []
        for epoch in range(self.settings.inner_epochs):
            order = np.arange(count)
            if self.settings.minibatches > 1:
                inner = self.number * self.settings.inner_epochs + epoch
                order = permutation(count, seed=self.seed, epoch=inner, salt=2)
            for start in range(0, count, self._per_step):
                groups = set(order[start : start + self._per_step].tolist())
                found.append([place for place, index in enumerate(rollout.kept) if index // size in groups])
        return [step for step in found if step]  # all of a step's completions may have been truncated

    def _batches(self, rollout: Rollout, step: Sequence[int]) -> Iterator[Batch]:
        examples = self._examples(rollout)
        for rows in split_step(step, [example.length for example in examples], self.steps):
            places = [place for row in rows for place in row]
            reference = rollout.reference_logprobs
            batch = rows_batch(rows, examples, self.steps).with_columns(
                "token",
                old_logprobs=_joined(rollout.old_logprobs, places),
                reference_logprobs=None if reference is None else _joined(reference, places),
            )
            yield batch.with_columns(
                "document",
                advantages=torch.tensor([rollout.advantages[rollout.kept[place]] for place in places]),
                lengths=torch.tensor([len(rollout.completions[rollout.kept[place]]) for place in places]),
            )

    def _examples(self, rollout: Rollout) -> list[Example]:
        return [
            _example(
                self.prompts[rollout.prompts[index // self.settings.group_size]], rollout.completions[index]
            )
            for index in rollout.kept
        ]

    def _roll(self) -> Rollout:
        """Sample, judge and measure the next rollout."""
        chosen = self._next_prompts()
        size = self.settings.group_size
        prompts = [self.prompts[place] for place in chosen for _ in range(size)]
        started = time.perf_counter()
        seeds = [row_seed(self.seed, self.number, row) for row in range(len(prompts))]
        sampling = Sampling(temperature=self.settings.temperature)
        completions = self.sampler.complete(prompts, sampling=sampling, seeds=seeds)
        generated = time.perf_counter()
        texts = [self.sampler.text(completion) for completion in completions]
        scores = self.sampler.score(prompts, texts)
        judged = time.perf_counter()
        rewards = scores @ self.sampler.reward_weights
        grouped = torch.from_numpy(rewards).view(-1, size)
        how, std = self.settings.advantage, self.settings.advantage_std
        advantages = advantages_of(grouped, how, std=std).flatten().tolist()
        kept = [i for i, c in enumerate(completions) if c.finished or not self.settings.mask_truncated]
        if not kept:
            raise RunError(
                f"none of the {len(completions)} completions of rollout {self.number + 1} ended within "
                f"objective.max_new_tokens={self.settings.max_new_tokens}, and objective.mask_truncated "
                "leaves out what did not: there is nothing to learn from",
                hint="raise objective.max_new_tokens, or set objective.mask_truncated to false",
            )
        examples = [_example(prompts[i], completions[i].tokens) for i in kept]
        old, reference, trained = self._measure(examples)
        lengths = np.array([len(completion.tokens) for completion in completions])
        metrics: Metrics = {
            **self._reward_metrics(scores, rewards),
            "no_signal_fraction": float((grouped.amax(1) == grouped.amin(1)).double().mean()),
            "completion_tokens": float(lengths.mean()),
            "truncated_fraction": sum(not c.finished for c in completions) / len(completions),
            **self._mismatch([completions[i].logprobs for i in kept], trained),
            "generation_tokens_per_s": float(lengths.sum()) / (generated - started),
            "generation_s": generated - started,
            "reward_s": judged - generated,
        }
        samples = [
            self._sample(prompts[i], texts[i], completions[i].finished, scores[i], rewards[i], advantages[i])
            for i in range(0, len(prompts), size)[: self.settings.samples]
        ]
        return Rollout(
            chosen, [c.tokens for c in completions], kept, advantages, old, reference, metrics, samples
        )

    def _next_prompts(self) -> list[int]:
        """The prompts of this rollout: a slice of the epochs' orders, put one behind the other."""
        first, count = self.number * self._per_rollout, len(self.prompts)
        found = []
        for number in range(first, first + self._per_rollout):
            epoch, place = divmod(number, count)
            found.append(place if self.steps.order == "sequential" else int(self._order(epoch)[place]))
        return found

    def _order(self, epoch: int) -> np.ndarray:
        if self._ordered is None or self._ordered[0] != epoch:
            self._ordered = (epoch, permutation(len(self.prompts), seed=self.seed, epoch=epoch))
        return self._ordered[1]

    def _measure(
        self, examples: Sequence[Example]
    ) -> tuple[list[list[float]], list[list[float]] | None, list[list[float]]]:
        """Log-probabilities by the trainer's own forward pass: tempered, of the reference, and plain."""
        model, temperature = self.sampler.model, self.settings.temperature
        old: list[list[float]] = [[] for _ in examples]
        plain = old if temperature == 1.0 else [[] for _ in examples]
        reference: list[list[float]] | None = None if self.reference is None else [[] for _ in examples]
        lengths, world = [example.length for example in examples], self.sampler.world
        cut = split_step(range(len(examples)), lengths, self.steps)
        mine: list[list[torch.Tensor]] = []
        for _, rows, counts in world.rounds(cut, matched=is_sharded(model)):
            batch = rows_batch(rows, examples, self.steps).to(model.device)
            with evaluating(model), in_precision(self.sampler.precision, model.device):
                states = model.states(batch)
                found = [head_logprobs(model, states, batch, temperature=temperature)]
                if temperature != 1.0:
                    found.append(head_logprobs(model, states, batch, temperature=1.0))
                if reference is not None:
                    found.append(self._reference_logprobs(batch))
            mine += [[values.float().cpu() for values in found]] if counts else []
        wanted = [
            values for values in (old, None if plain is old else plain, reference) if values is not None
        ]
        for rows, found in zip(cut, world.in_order(mine, len(cut)), strict=True):
            places = [place for row in rows for place in row]
            for values, into in zip(found, wanted, strict=True):
                _spread(values, [examples[place].supervised_count for place in places], places, into)
        return old, reference, plain

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        temperature = self.settings.temperature
        if isinstance(self.reference, LanguageModel):
            return completion_logprobs(self.reference, batch, temperature=temperature)
        with adapters_off(self.sampler.model):
            return completion_logprobs(self.sampler.model, batch, temperature=temperature)

    def _reward_metrics(self, scores: np.ndarray, rewards: np.ndarray) -> Metrics:
        found: Metrics = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        for place, reward in enumerate(self.settings.rewards):
            found[f"reward_mean_{reward.label}"] = float(scores[:, place].mean())
            found[f"reward_std_{reward.label}"] = float(scores[:, place].std())
        if self.settings.on_error is not None:
            found["reward_errors"] = self.sampler.take_failures()
        return found

    def _mismatch(self, sampled: list[list[float]], trained: list[list[float]]) -> Metrics:
        """How far the trainer's log-probabilities are from the sampler's, both at temperature 1."""
        apart = np.abs(np.concatenate(sampled) - np.concatenate(trained))
        found = {"mismatch": float(apart.mean()), "mismatch_max": float(apart.max())}
        if not found["mismatch"] <= self.tolerance:
            raise RunError(
                f"the sampler and the trainer disagree: their log-probabilities of the same tokens are "
                f"{found['mismatch']:.3g} apart on average ({found['mismatch_max']:.3g} at most), and "
                f"{self.tolerance:g} is tolerated: the completions are not those of the policy in training",
                hint="raise objective.mismatch_tolerance only if you know why (routing in bf16, say)",
            )
        return found

    @property
    def tolerance(self) -> float:
        """The largest mean distance between log-probabilities that should be the same."""
        exact = self.sampler.precision.compute in (torch.float32, torch.float64)
        return self.settings.mismatch_tolerance or (1e-3 if exact else 0.1)

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


def row_seed(seed: int, rollout: int, row: int) -> int:
    """The seed of one completion."""
    return random.Random(f"{seed}/{rollout}/{row}").getrandbits(63)


def _example(prompt: Prompt, completion: Sequence[int]) -> Example:
    marks = [False] * len(prompt.tokens) + [True] * len(completion)
    return Example([*prompt.tokens, *completion], marks, prompt.question.origin)


def _joined(values: Sequence[Sequence[float]], places: Sequence[int]) -> torch.Tensor:
    """One value a supervised token, in the order of a batch's examples."""
    return torch.tensor([value for place in places for value in values[place]])


def _spread(
    found: torch.Tensor, sizes: Sequence[int], places: Sequence[int], into: list[list[float]]
) -> None:
    """Values of a batch's supervised tokens back to the examples they belong to."""
    for place, values in zip(places, found.split(list(sizes)), strict=True):
        into[place] = values.tolist()
