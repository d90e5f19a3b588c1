"""Router losses and statistics of mixture-of-experts models, added to any objective.

Both use the forward pass of the objective.
"""

from collections.abc import Mapping, Sequence

import torch

from whet.data.batches import Batch
from whet.models.language_model import LanguageModel
from whet.models.moe import MixtureOfExperts, Routing, record_routing, router_scores
from whet.objectives.objective import FrozenForward, Loss, Objective

LOAD_BALANCING = "load_balancing_loss"
Z_LOSS = "router_z_loss"
STATISTICS = "router_statistics"
# last columns of a layer's statistics, after choices and first choices per expert; all are sums
SUMS = ("entropy", "confidence", Z_LOSS, LOAD_BALANCING, "tokens")


def load_balancing_loss(
    layers: Sequence[Routing], *, scoring: str = "softmax", real: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the load-balancing loss: experts * sum over experts of token share * mean score.

    Defined in arXiv 2101.03961. Shares and means are taken over all layers, as in transformers. Even load
    gives top_k.

    Args:
        layers: The routing of each layer.
        scoring: How logits are converted to scores.
        real: False for padding [tokens]; None if there is none.
    """
    experts = layers[0].logits.shape[1]
    choices, scores, tokens = [], [], []
    for routing in layers:
        weights = _weights(routing, real)
        choices.append(_counts(routing.chosen, weights, experts=experts))
        scores.append((_distribution(routing.logits, scoring) * weights[:, None]).sum(0))
        tokens.append(weights.sum())
    total = torch.stack(tokens).sum()
    return experts * torch.dot(torch.stack(choices).sum(0) / total, torch.stack(scores).sum(0) / total)


def router_z_losses(routing: Routing) -> torch.Tensor:
    """Return the router z-loss of each token: the squared logsumexp of its logits (arXiv 2202.08906)."""
    wide = routing.logits.to(torch.promote_types(routing.logits.dtype, torch.float32))
    return wide.logsumexp(-1).square()


class RoutedObjective(Objective):
    """Adds router losses to an objective; evaluations leave them out.

    The z-loss is averaged over tokens and layers. The load-balancing loss is not a sum over tokens. It is
    averaged over micro-batches, weighted by their tokens, so it depends on how a step is split.

    Args:
        inner: The objective to extend.
        layers: The mixture-of-experts layers of the model.
        load_balancing: The weight of the load-balancing loss.
        z_loss: The weight of the z-loss.
    """

    def __init__(
        self,
        inner: Objective,
        layers: Sequence[MixtureOfExperts],
        *,
        load_balancing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        self.inner = inner
        self.layers = list(layers)
        self.scoring = self.layers[0].spec.scoring
        coefficients = {LOAD_BALANCING: load_balancing, Z_LOSS: z_loss}
        self.added = {term: weight for term, weight in coefficients.items() if weight}
        self.coefficients = {**inner.coefficients, **self.added}
        self.auxiliary = inner.auxiliary | self.added.keys()
        self.per_micro_batch = inner.per_micro_batch | (self.added.keys() & {LOAD_BALANCING})
        # copied one by one, because __getattr__ is not called for attributes that the base class has
        self.heads = inner.heads
        self.likelihood = inner.likelihood
        self.uses_token_weights = inner.uses_token_weights
        self.reports = inner.reports
        self.unit = inner.unit
        self.progress = inner.progress
        self.reads_lm_head = inner.reads_lm_head
        self.recomputes_logits = inner.recomputes_logits
        self.prediction_heads = inner.prediction_heads

    @property
    def parts(self) -> Mapping[str, Objective]:
        """The parts of the inner objective, if it is a mix."""
        return self.inner.parts

    def frozen_forwards(self, model: LanguageModel) -> Sequence[FrozenForward]:
        """Return the frozen forward passes of the inner objective."""
        return self.inner.frozen_forwards(model)

    def summarise(self, outputs: Sequence[torch.Tensor], batches: Sequence[Batch]) -> dict[str, float]:
        """Return the evaluation metrics of the inner objective."""
        return self.inner.summarise(outputs, batches)

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the weights of the inner objective, and the tokens for the router losses."""
        return {**self.inner.weights(batch), **dict.fromkeys(self.added, float(batch.real_tokens))}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the loss sums of this micro-batch, with the router statistics as a metric."""
        if not torch.is_grad_enabled():
            return self.inner.loss(model, batch)
        with record_routing(self.layers) as records:
            result = self.inner.loss(model, batch)
        if not all(records):
            return result
        routings = [_concatenate(record) for record in records]
        real = None if batch.real is None else batch.real.flatten()
        balance = load_balancing_loss(routings, scoring=self.scoring, real=real) * batch.real_tokens
        squares = [(router_z_losses(routing) * _weights(routing, real)).sum() for routing in routings]
        # normalize to the tokens of the batch, if the objective ran the model on them more than once
        runs = sum(len(routing.logits) for routing in routings) / len(routings) / batch.tokens.numel()
        terms = {LOAD_BALANCING: balance, Z_LOSS: torch.stack(squares).mean() / runs}
        with torch.no_grad():
            rows = [
                _statistics(routing, self.scoring, real, z=z, balance=balance)
                for routing, z in zip(routings, squares, strict=True)
            ]
        added = {term: terms[term] for term in self.added}
        return Loss({**result.sums, **added}, {**result.metrics, STATISTICS: torch.stack(rows)}, result.units)


def _concatenate(record: Sequence[Routing]) -> Routing:
    """Concatenate the routing of all forward passes of one loss."""
    if len(record) == 1:
        return record[0]
    return Routing(
        torch.cat([routing.logits for routing in record]), torch.cat([routing.chosen for routing in record])
    )


def _weights(routing: Routing, real: torch.Tensor | None) -> torch.Tensor:
    """Return 1 for each token and 0 for padding, repeated for several forward passes of one batch."""
    count = len(routing.logits)
    dtype = torch.promote_types(routing.logits.dtype, torch.float32)
    if real is None or count % len(real):
        return routing.logits.new_ones(count, dtype=dtype)
    return real.to(dtype).repeat(count // len(real))


def _counts(chosen: torch.Tensor, weights: torch.Tensor, *, experts: int) -> torch.Tensor:
    """Return the number of tokens that chose each expert, without the device sync of bincount."""
    token_weights = weights[:, None].expand_as(chosen).flatten()
    return weights.new_zeros(experts).scatter_add_(0, chosen.flatten(), token_weights)


def _distribution(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Return router scores that sum to 1 for each token."""
    scores = router_scores(logits, scoring)
    return scores if scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _statistics(
    routing: Routing, scoring: str, real: torch.Tensor | None, *, z: torch.Tensor, balance: torch.Tensor
) -> torch.Tensor:
    """Return the statistics of a layer's routing as sums over tokens: per-expert counts, then SUMS."""
    weights, experts = _weights(routing, real), routing.logits.shape[1]
    shares = _distribution(routing.logits, scoring)
    entropy = -(torch.xlogy(shares, shares).sum(-1) * weights).sum()
    confidence = (shares.amax(-1) * weights).sum()
    return torch.cat(
        (
            _counts(routing.chosen, weights, experts=experts),
            _counts(routing.chosen[:, :1], weights, experts=experts),
            torch.stack((entropy, confidence, z, balance.to(z.dtype), weights.sum())),
        )
    )
