"""Preference optimization on pairs: DPO and IPO with a reference model, ORPO and SimPO without."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from whet.adapters.adapter import adapters_off
from whet.data.batches import Batch
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel
from whet.objectives.objective import FrozenForward, Loss, Objective
from whet.ops.logprobs import token_logprobs


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the loss of direct preference optimization (arXiv 2305.18290), averaged over pairs.

    Args:
        policy_chosen: Log-probabilities of the chosen responses under the policy [pairs].
        policy_rejected: Log-probabilities of the rejected responses under the policy [pairs].
        reference_chosen: Log-probabilities of the chosen responses under the reference model [pairs].
        reference_rejected: Log-probabilities of the rejected responses under the reference model [pairs].
        beta: The strength of the constraint to the reference model.
        label_smoothing: The share of pairs that is assumed to be mislabeled (arXiv 2403.00409).
    """
    margin = beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return _dpo_losses(margin, label_smoothing).mean()


def _dpo_losses(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def ipo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float = 0.1,
) -> torch.Tensor:
    """Return the loss of identity preference optimization (arXiv 2310.12036), averaged over pairs.

    It draws the margin to 1 / (2 beta). Log-probabilities are sums over the tokens of a response in the
    paper, and means in TRL.

    Args:
        policy_chosen: Log-probabilities of the chosen responses under the policy [pairs].
        policy_rejected: Log-probabilities of the rejected responses under the policy [pairs].
        reference_chosen: Log-probabilities of the chosen responses under the reference model [pairs].
        reference_rejected: Log-probabilities of the rejected responses under the reference model [pairs].
        beta: The strength of the constraint to the reference model.
    """
    margin = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
    return (margin - 1 / (2 * beta)).square().mean()


def simpo_loss(
    mean_chosen: torch.Tensor, mean_rejected: torch.Tensor, beta: float = 2.0, gamma: float = 1.0
) -> torch.Tensor:
    """Return the SimPO loss (arXiv 2405.14734), averaged over pairs; it needs no reference model.

    Args:
        mean_chosen: Mean log-probabilities per token of the chosen responses [pairs].
        mean_rejected: Mean log-probabilities per token of the rejected responses [pairs].
        beta: The scale of the margin.
        gamma: The target margin.
    """
    return -F.logsigmoid(beta * (mean_chosen - mean_rejected) - gamma).mean()


def odds_ratio_loss(mean_chosen: torch.Tensor, mean_rejected: torch.Tensor) -> torch.Tensor:
    """Return the odds-ratio term of ORPO (arXiv 2403.07691), averaged over pairs.

    Args:
        mean_chosen: Mean log-probabilities per token of the chosen responses [pairs].
        mean_rejected: Mean log-probabilities per token of the rejected responses [pairs].
    """
    return -F.logsigmoid(_log_odds(mean_chosen) - _log_odds(mean_rejected)).mean()


def _log_odds(logprob: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)), which stays finite if p rounds to 1."""
    return logprob - torch.log1p(-logprob.exp().clamp(max=1 - torch.finfo(logprob.dtype).eps))


class Preference(Objective):
    """Preference loss on pairs: examples 2i of a batch are chosen, 2i + 1 rejected. Only responses count.

    Args:
        kind: The loss.
        beta: The strength; for ORPO, the weight of the odds-ratio term.
        gamma: The target margin of SimPO.
        label_smoothing: The share of pairs that DPO assumes to be mislabeled.
        logprobs: Whether IPO uses sums or means over tokens.
        reference: The reference model of DPO and IPO, or "adapters-off" for the model without adapters. None
            if batches contain the log-probabilities of the reference model, or none are needed.
    """

    recomputes_logits = True

    def __init__(
        self,
        kind: Literal["dpo", "ipo", "orpo", "simpo"],
        *,
        beta: float,
        gamma: float = 1.0,
        label_smoothing: float = 0.0,
        logprobs: Literal["sum", "mean"] = "sum",
        reference: LanguageModel | Literal["adapters-off"] | None = None,
    ) -> None:
        self.kind = kind
        self.beta = beta
        self.gamma = gamma
        self.label_smoothing = label_smoothing
        self.logprobs = logprobs
        self.reference = reference
        self.coefficients = (
            {"loss": beta, "chosen_loss": 1.0} if kind == "orpo" else {"loss": 1.0, "tokens": 0.0}
        )

    def frozen_forwards(self, model: LanguageModel) -> list[FrozenForward]:
        """Return the forward pass of an online reference model, if there is one."""
        if self.reference is None:
            return []
        if isinstance(self.reference, LanguageModel):
            return [FrozenForward(self.reference)]
        return [FrozenForward(model, adapters=False)]

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of pairs and of tokens; for ORPO, only tokens of chosen responses."""
        pairs = {"loss": len(batch.origins) / 2}
        if self.kind == "orpo":
            return {**pairs, "chosen_loss": float((batch.examples % 2 == 0).sum())}
        return {**pairs, "tokens": float(batch.supervised)}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the loss sums of this micro-batch."""
        logprobs = response_logprobs(model, batch)
        chosen, rejected = logprobs.view(-1, 2).unbind(1)
        tokens = torch.bincount(batch.examples, minlength=len(batch.origins)).view(-1, 2)
        metrics = {
            "logprob_chosen": chosen.sum(),
            "logprob_rejected": rejected.sum(),
        }
        if self.kind in ("orpo", "simpo"):
            better, worse = (logprobs.view(-1, 2) / tokens).unbind(1)  # per token
            metrics |= _rewards(self.beta * better, self.beta * worse)
            if self.kind == "simpo":
                terms = {"loss": len(chosen) * simpo_loss(better, worse, self.beta, self.gamma)}
            else:
                terms = {"loss": len(chosen) * odds_ratio_loss(better, worse), "chosen_loss": -chosen.sum()}
            return Loss(terms, metrics, outputs=_is_preferred(better, worse))
        reference = self._reference_logprobs(model, batch)
        ratios = logprobs - reference
        better, worse = ratios.view(-1, 2).unbind(1)
        metrics |= _rewards(self.beta * better, self.beta * worse)
        metrics["kl"] = ratios.sum()
        preferred = _is_preferred(better, worse)
        if self.kind == "ipo":
            if self.logprobs == "mean":
                better, worse = (ratios.view(-1, 2) / tokens).unbind(1)
            losses = (better - worse - 1 / (2 * self.beta)).square()
        else:
            losses = _dpo_losses(self.beta * (better - worse), self.label_smoothing)
        return Loss({"loss": losses.sum()}, metrics, {"kl": "tokens"}, outputs=preferred)

    def summarise(self, outputs: Sequence[torch.Tensor], batches: Sequence[Batch]) -> dict[str, float]:
        """Return the share of pairs whose chosen response has the higher reward.

        It is counted over all pairs: a sum of the rounded shares of micro-batches may exceed 1.
        """
        preferred = torch.cat(list(outputs))
        return {"eval_reward_accuracy": preferred.sum().item() / len(preferred)}

    def _reference_logprobs(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        if self.reference is None:
            if "values" not in batch.columns:
                raise ConfigError(
                    f"{self.kind} needs a reference for {batch.origins[0]}: its log-probabilities, a "
                    "reference model, or adapters"
                )
            return batch.column("values")[:, 0]
        with torch.no_grad(), _reference_of(model, self.reference) as reference:
            return response_logprobs(reference, batch)


@contextlib.contextmanager
def _reference_of(
    model: LanguageModel, reference: LanguageModel | Literal["adapters-off"]
) -> Iterator[LanguageModel]:
    if isinstance(reference, LanguageModel):
        yield reference
        return
    with adapters_off(model):
        yield model


def response_logprobs(model: LanguageModel, batch: Batch) -> torch.Tensor:
    """Return the summed log-probability of the supervised tokens of each example [examples]."""
    logprobs = token_logprobs(model.states(batch), model.head(), batch.supervised_targets)
    return logprobs.new_zeros(len(batch.origins)).index_add(0, batch.examples, logprobs)


def _rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "reward_margin": (chosen - rejected).sum(),
        "reward_accuracy": _is_preferred(chosen, rejected).float().sum(),
    }


def _is_preferred(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return for each pair whether the reward of the chosen response is higher [pairs]."""
    return (chosen > rejected).detach()
