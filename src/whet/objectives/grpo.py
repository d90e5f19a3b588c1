"""Policy gradients from rewards: the token losses of GRPO (arXiv 2402.03300) and its variants.

The tokens of a completion become more likely if its reward is above the mean of its group. The policy is the
distribution that was sampled from, including the temperature. Otherwise the gradient at a ratio of 1 would
not be that of the expected reward.
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

_STD_EPS = 1e-4  # added to a group's std, so that rewards that differ only by rounding have a small effect
_MAX_LOG_RATIO = 20.0  # keeps exp finite, and so avoids inf * 0


def advantages_of(
    rewards: torch.Tensor, kind: Advantage, *, std: Literal["population", "sample"] = "population"
) -> torch.Tensor:
    """Return the advantages of completions over their baseline [prompts, group].

    A group with equal rewards has advantages of exactly 0.

    Args:
        rewards: The rewards of the completions of each prompt [prompts, group].
        kind: The baseline and normalization, as in objective.advantage.
        std: For kind "group", whether the variance divides by n or, as in TRL, by n - 1.
    """
    if kind == "reinforce":
        return rewards - rewards.mean()
    size = rewards.shape[1]
    if size < 2:
        raise DataError(f"advantages need at least 2 completions per prompt, not {size}")
    centered = rewards - rewards.mean(1, keepdim=True)
    if kind == "rloo":  # reward - mean of the other rewards (arXiv 2402.14740)
        centered = centered * size / (size - 1)
    elif kind == "group":
        correction = int(std == "sample")
        centered = centered / (rewards.std(1, correction=correction, keepdim=True) + _STD_EPS)
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return centered.masked_fill(equal, 0.0)


@dataclass(frozen=True)
class _TokenLosses:
    """The loss of each token, and values for metrics."""

    losses: torch.Tensor
    log_ratios: torch.Tensor  # relative to the policy that sampled
    clipped: torch.Tensor  # whether clipping removed the gradient
    kl: torch.Tensor | None  # to the reference model


def _token_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
    *,
    epsilon: float,
    epsilon_high: float | None,
    beta: float,
) -> _TokenLosses:
    """Return -min(ratio * A, clip(ratio) * A) + beta * KL of broadcastable tensors."""
    if beta and reference_logprobs is None:
        raise ConfigError("beta > 0 needs the log-probabilities of a reference model")
    high = epsilon if epsilon_high is None else epsilon_high
    log_ratios = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratios = log_ratios.exp()
    bounded = ratios.clamp(1 - epsilon, 1 + high)
    losses = -torch.minimum(ratios * advantages, bounded * advantages)
    clipped = ((ratios < 1 - epsilon) & (advantages < 0)) | ((ratios > 1 + high) & (advantages > 0))
    kl = None
    if reference_logprobs is not None:
        # k3: exp(d) - d - 1 with d = log(reference / policy), never negative and unbiased
        log_ratio = (reference_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        kl = log_ratio.exp() - log_ratio - 1
        losses = losses + beta * kl
    return _TokenLosses(losses, log_ratios.detach(), clipped, None if kl is None else kl.detach())


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
    """Return the GRPO loss of completions from their log-probabilities.

    Args:
        logprobs: Log-probabilities of the policy [B, T].
        old_logprobs: Log-probabilities of the policy that sampled the completions [B, T].
        advantages: Advantages per completion [B] or per token [B, T].
        mask: True for tokens of completions [B, T]; other positions may have any value.
        reference_logprobs: Log-probabilities of the reference model [B, T]; needed if beta > 0.
        epsilon: The ratio is clipped below 1 - epsilon.
        epsilon_high: The ratio is clipped above 1 + epsilon_high; None for epsilon.
        beta: The weight of the KL divergence to the reference model.
        aggregation: Mean over tokens, mean over sequences of token means, or the sum over tokens divided by
            sequences * max_tokens ("constant").
        max_tokens: The maximum length of a completion, for the constant aggregation.

    Raises:
        ConfigError: If beta or the aggregation needs an argument that is missing.
        DataError: If the mask selects no tokens.
    """
    mask = mask.bool()
    masked = [
        None if values is None else torch.where(mask, values, 0.0)  # padding may have any value
        for values in (logprobs, old_logprobs, reference_logprobs)
    ]
    assert masked[0] is not None
    assert masked[1] is not None
    token_advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    tokens = _token_losses(
        masked[0],
        masked[1],
        token_advantages,
        masked[2],
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        beta=beta,
    )
    losses = torch.where(mask, tokens.losses, 0.0)
    if aggregation == "constant":
        if max_tokens is None:
            raise ConfigError("the constant aggregation needs max_tokens")
        return losses.sum() / (len(losses) * max_tokens)
    counts = mask.sum(1)
    if not counts.any():
        raise DataError("the mask selects no tokens")
    if aggregation == "token":
        return losses.sum() / counts.sum()
    return (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()


def completion_logprobs(model: LanguageModel, batch: Batch, *, temperature: float) -> torch.Tensor:
    """Return the log-probability of each supervised token [N] at a temperature, computed in chunks."""
    return head_logprobs(model, model.states(batch), batch, temperature=temperature)


def head_logprobs(
    model: LanguageModel, states: torch.Tensor, batch: Batch, *, temperature: float
) -> torch.Tensor:
    """Return the log-probabilities of `completion_logprobs` from computed hidden states [N, D]."""
    return token_logprobs(states, model.head().tempered(temperature), batch.supervised_targets)


class GRPO(Objective):
    """The clipped GRPO objective on batches of completions.

    Batches have the token columns `old_logprobs` (of the policy that sampled) and, if beta > 0,
    `reference_logprobs`, and the document columns `advantages` and `lengths` (of the completions in tokens).
    The arguments are those of `grpo_loss`; `temperature` is that of sampling.
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
        """Return the number of completion tokens, or of completions, depending on the aggregation."""
        return {"loss": float(batch.supervised if self.aggregation == "token" else len(batch.origins))}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the loss sums of this micro-batch.

        Metrics are averaged like the loss: over tokens, or over completions of means over tokens.
        """
        tokens = _token_losses(
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

        def aggregate(values: torch.Tensor) -> torch.Tensor:
            values = values.to(logprobs.dtype)
            return (values if shares is None else values * shares).sum()

        total = (
            tokens.losses.sum() / self.max_tokens
            if self.aggregation == "constant"
            else aggregate(tokens.losses)
        )
        metrics = {
            "entropy": aggregate(-logprobs.detach()),  # estimated from the sampled tokens
            "clip_fraction": aggregate(tokens.clipped),
            "log_ratio": aggregate(tokens.log_ratios.abs()),
        }
        if tokens.kl is not None:
            metrics["kl"] = aggregate(tokens.kl)
        return Loss({"loss": total}, metrics)
