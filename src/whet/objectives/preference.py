"""Learning from pairs: DPO and IPO against a reference, ORPO and SimPO without one."""

import contextlib
from collections.abc import Iterator
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
    """Direct preference optimisation (arXiv 2305.18290), the mean over pairs of log-probabilities of answers.

    With `label_smoothing`, that share of the labels is taken to be wrong (arXiv 2403.00409).
    """
    margin = beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return _dpo(margin, label_smoothing).mean()


def _dpo(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def ipo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float = 0.1,
) -> torch.Tensor:
    """Identity preference optimisation (arXiv 2310.12036): the margin is drawn to 1 / (2 beta).

    Log-probabilities are sums over an answer's tokens in the paper, and means over them in TRL.
    """
    margin = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
    return (margin - 1 / (2 * beta)).square().mean()


def simpo_loss(
    mean_chosen: torch.Tensor, mean_rejected: torch.Tensor, beta: float = 2.0, gamma: float = 1.0
) -> torch.Tensor:
    """SimPO (arXiv 2405.14734), on log-probabilities per token: no reference, a margin of `gamma`."""
    return -F.logsigmoid(beta * (mean_chosen - mean_rejected) - gamma).mean()


def odds_ratio_loss(mean_chosen: torch.Tensor, mean_rejected: torch.Tensor) -> torch.Tensor:
    """ORPO's second term (arXiv 2403.07691), on log-probabilities per token; the first is the usual loss."""
    return -F.logsigmoid(_log_odds(mean_chosen) - _log_odds(mean_rejected)).mean()


def _log_odds(logprob: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)); a p that rounds to 1 stays finite."""
    return logprob - torch.log1p(-logprob.exp().clamp(max=1 - torch.finfo(logprob.dtype).eps))


class Preference(Objective):
    """Pairs in batches: examples 2i are chosen, 2i + 1 rejected. Only answers are scored."""

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
        self.logprobs = logprobs  # of IPO
        self.reference = reference  # None: batches bring what the reference said, or none is needed
        self.coefficients = (
            {"loss": beta, "chosen_loss": 1.0} if kind == "orpo" else {"loss": 1.0, "tokens": 0.0}
        )

    def frozen_forwards(self, model: LanguageModel) -> list[FrozenForward]:
        """Return that of an online reference."""
        if self.reference is None:
            return []
        if isinstance(self.reference, LanguageModel):
            return [FrozenForward(self.reference)]
        return [FrozenForward(model, adapters=False)]

    def weights(self, batch: Batch) -> dict[str, float]:
        """Pairs, and tokens: for ORPO those of the chosen answers, whose loss is a mean over them."""
        pairs = {"loss": len(batch.origins) / 2}
        if self.kind == "orpo":
            return {**pairs, "chosen_loss": float((batch.examples % 2 == 0).sum())}
        return {**pairs, "tokens": float(batch.supervised)}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sums of this micro-batch."""
        logprobs = answer_logprobs(model, batch)
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
                return Loss({"loss": len(chosen) * simpo_loss(better, worse, self.beta, self.gamma)}, metrics)
            terms = {"loss": len(chosen) * odds_ratio_loss(better, worse), "chosen_loss": -chosen.sum()}
            return Loss(terms, metrics)
        reference = self._reference_logprobs(model, batch)
        ratios = logprobs - reference
        better, worse = ratios.view(-1, 2).unbind(1)
        metrics |= _rewards(self.beta * better, self.beta * worse)
        metrics["kl"] = ratios.sum()
        if self.kind == "ipo":
            if self.logprobs == "mean":
                better, worse = (ratios.view(-1, 2) / tokens).unbind(1)
            losses = (better - worse - 1 / (2 * self.beta)).square()
        else:
            losses = _dpo(self.beta * (better - worse), self.label_smoothing)
        return Loss({"loss": losses.sum()}, metrics, {"kl": "tokens"})

    def _reference_logprobs(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        if self.reference is None:
            if "values" not in batch.columns:
                raise ConfigError(
                    f"{self.kind} needs a reference for {batch.origins[0]}: its log-probabilities, a model, "
                    "or adapters"
                )
            return batch.column("values")[:, 0]
        with torch.no_grad(), _reference_of(model, self.reference) as reference:
            return answer_logprobs(reference, batch)


@contextlib.contextmanager
def _reference_of(
    model: LanguageModel, reference: LanguageModel | Literal["adapters-off"]
) -> Iterator[LanguageModel]:
    if isinstance(reference, LanguageModel):
        yield reference
        return
    with adapters_off(model):
        yield model


def answer_logprobs(model: LanguageModel, batch: Batch) -> torch.Tensor:
    """log p of each example's supervised tokens together, [examples]."""
    logprobs = token_logprobs(model.states(batch), model.head(), batch.supervised_targets)
    return logprobs.new_zeros(len(batch.origins)).index_add(0, batch.examples, logprobs)


def _rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "reward_margin": (chosen - rejected).sum(),
        "reward_accuracy": (chosen > rejected).float().sum(),
    }
