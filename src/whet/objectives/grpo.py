"""Reinforcement from rewards: GRPO (arXiv 2402.03300) and its relatives, token by token.

A completion's tokens are made more likely where its reward beats that of the others of its group. The policy
is the distribution that was sampled from, temperature included: only then is the gradient, at a ratio of 1,
that of the expected reward.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from whet.config.objectives.grpo import Advantage, Aggregation
from whet.config.objectives.grpo import GRPOObjective as GRPOConfig
from whet.data.batches import Batch
from whet.errors import ConfigError, DataError
from whet.models.language_model import LanguageModel
from whet.objectives.objective import Loss, Objective
from whet.ops.logprobs import token_logprobs

__all__ = ["GRPO", "GRPOConfig", "advantages_of", "completion_logprobs", "grpo_loss"]

_STD_FLOOR = (
    1e-4  # added to a group's std: rewards that differ by rounding alone must not count as much as any
)
_LARGEST_LOG_RATIO = 20.0  # exp stays finite, and inf * 0 is never met


def advantages_of(
    rewards: torch.Tensor, kind: Advantage, *, std: Literal["population", "sample"] = "population"
) -> torch.Tensor:
    """How much better each completion is than its baseline; `rewards` is [prompts, group].

    `std`: of kind "group", whether the variance divides by n or, as in TRL, by n - 1.
    A group whose rewards are all the same has exactly no signal, whatever its rounding.
    """
    if kind == "reinforce":
        return rewards - rewards.mean()
    size = rewards.shape[1]
    if size < 2:
        raise DataError(f"a group of {size} has nothing to compare with")
    centred = rewards - rewards.mean(1, keepdim=True)
    if kind == "rloo":  # reward - mean of the others (arXiv 2402.14740)
        centred = centred * size / (size - 1)
    elif kind == "group":
        correction = int(std == "sample")
        centred = centred / (rewards.std(1, correction=correction, keepdim=True) + _STD_FLOOR)
    same = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return centred.masked_fill(same, 0.0)


@dataclass(frozen=True)
class _Tokens:
    """What becomes of each token."""

    losses: torch.Tensor
    log_ratios: torch.Tensor  # to the policy that sampled
    clipped: torch.Tensor  # whether the clip took its gradient
    kl: torch.Tensor | None  # to the reference


def _token_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
    *,
    epsilon: float,
    epsilon_high: float | None,
    beta: float,
) -> _Tokens:
    """-min(ratio * A, clip(ratio) * A) + beta * KL, of tensors that can be broadcast."""
    if beta and reference_logprobs is None:
        raise ConfigError("beta weights a KL to a reference, and there are no log-probabilities of one")
    high = epsilon if epsilon_high is None else epsilon_high
    log_ratios = (logprobs - old_logprobs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    ratios = log_ratios.exp()
    bounded = ratios.clamp(1 - epsilon, 1 + high)
    losses = -torch.minimum(ratios * advantages, bounded * advantages)
    clipped = ((ratios < 1 - epsilon) & (advantages < 0)) | ((ratios > 1 + high) & (advantages > 0))
    kl = None
    if reference_logprobs is not None:
        # k3: exp(d) - d - 1 with d = log(reference / policy), never negative and unbiased
        apart = (reference_logprobs - logprobs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        kl = apart.exp() - apart - 1
        losses = losses + beta * kl
    return _Tokens(losses, log_ratios.detach(), clipped, None if kl is None else kl.detach())


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    reference_logprobs: torch.Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    *,
    aggregation: Aggregation = "token",
    max_tokens: int | None = None,
) -> torch.Tensor:
    """The loss of completions [B, T] whose tokens `mask` marks, from their log-probabilities.

    `old_logprobs` are those of the policy that sampled, `advantages` [B] or [B, T]. `max_tokens` is what
    the constant aggregation divides by, besides the number of completions.
    """
    mask = mask.bool()
    here = [
        None if values is None else torch.where(mask, values, 0.0)  # padding may hold anything
        for values in (logprobs, old_logprobs, reference_logprobs)
    ]
    assert here[0] is not None
    assert here[1] is not None
    each = advantages[:, None] if advantages.dim() == 1 else advantages
    found = _token_losses(
        here[0],
        here[1],
        each,
        here[2],
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        beta=beta,
    )
    losses = torch.where(mask, found.losses, 0.0)
    if aggregation == "constant":
        if max_tokens is None:
            raise ConfigError("the constant aggregation needs max_tokens")
        return losses.sum() / (len(losses) * max_tokens)
    counts = mask.sum(1)
    if not counts.any():
        raise DataError("no token is marked: there is nothing to learn from")
    if aggregation == "token":
        return losses.sum() / counts.sum()
    return (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()


def completion_logprobs(model: LanguageModel, batch: Batch, *, temperature: float) -> torch.Tensor:
    """log p of each supervised token [N] at a temperature; logits exist only in chunks."""
    return head_logprobs(model, model.states(batch), batch, temperature=temperature)


def head_logprobs(
    model: LanguageModel, states: torch.Tensor, batch: Batch, *, temperature: float
) -> torch.Tensor:
    """The same, from states [N, D] that are there already."""
    return token_logprobs(states, model.head().tempered(temperature), batch.supervised_targets)


class GRPO(Objective):
    """The clipped objective on batches of completions.

    Their columns, by token: `old_logprobs` of the policy that sampled them and, with beta,
    `reference_logprobs`; by document: `advantages`, and the `lengths` of the completions in tokens.
    """

    recomputes_logits = True
    progress: Mapping[str, str] = {"reward_mean": "reward"}

    def __init__(
        self,
        *,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        aggregation: Aggregation = "token",
        max_tokens: int = 256,
        temperature: float = 1.0,
    ) -> None:
        self.epsilon = epsilon
        self.epsilon_high = epsilon_high
        self.beta = beta
        self.aggregation = aggregation
        self.max_tokens = max_tokens
        self.temperature = temperature

    def weights(self, batch: Batch) -> dict[str, float]:
        """Tokens of completions, or completions."""
        return {"loss": float(batch.supervised if self.aggregation == "token" else len(batch.origins))}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sums of this micro-batch.

        Metrics are means over tokens where the loss is one, else over completions of means over tokens.
        """
        found = _token_losses(
            logprobs := completion_logprobs(model, batch, temperature=self.temperature),
            batch.column("old_logprobs"),
            batch.column("advantages").index_select(0, batch.examples),
            batch.column("reference_logprobs") if "reference_logprobs" in batch.columns else None,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
        )
        shares = None
        if self.aggregation != "token":
            shares = batch.column("lengths").to(logprobs.dtype).reciprocal().index_select(0, batch.examples)

        def summed(values: torch.Tensor) -> torch.Tensor:
            values = values.to(logprobs.dtype)
            return (values if shares is None else values * shares).sum()

        total = (
            found.losses.sum() / self.max_tokens if self.aggregation == "constant" else summed(found.losses)
        )
        metrics = {
            "entropy": summed(-logprobs.detach()),  # sampled, not summed over the vocabulary
            "clip_fraction": summed(found.clipped),
            "log_ratio": summed(found.log_ratios.abs()),
        }
        if found.kl is not None:
            metrics["kl"] = summed(found.kl)
        return Loss({"loss": total}, metrics)
