"""What a model with experts adds to any objective: losses that keep its routers in balance, and numbers.

Both come from the forward that the objective makes anyway.
"""

from collections.abc import Mapping, Sequence

import torch

from whet.data.batches import Batch
from whet.models.language_model import LanguageModel
from whet.models.moe import MixtureOfExperts, Routing, recording, scores_of
from whet.objectives.objective import FrozenForward, Loss, Objective

LOAD_BALANCING = "load_balancing_loss"
Z_LOSS = "router_z_loss"
STATISTICS = "router_statistics"
# columns of the statistics of a layer, behind the choices and the first choices of each expert; all are sums
SUMS = ("entropy", "confidence", Z_LOSS, LOAD_BALANCING, "tokens")


def load_balancing_loss(
    layers: Sequence[Routing], *, scoring: str = "softmax", real: torch.Tensor | None = None
) -> torch.Tensor:
    """experts * sum over experts of share of the tokens * mean score (arXiv 2101.03961).

    Shares and means are those over all layers, as in transformers; even ones give top_k. `real` [tokens] is
    False for padding.
    """
    experts = layers[0].logits.shape[1]
    chosen, scored, tokens = [], [], []
    for routing in layers:
        weights = _weights(routing, real)
        chosen.append(_counts(routing.chosen, weights, experts=experts))
        scored.append((_distribution(routing.logits, scoring) * weights[:, None]).sum(0))
        tokens.append(weights.sum())
    total = torch.stack(tokens).sum()
    return experts * torch.dot(torch.stack(chosen).sum(0) / total, torch.stack(scored).sum(0) / total)


def router_z_losses(routing: Routing) -> torch.Tensor:
    """The squared log of the partition function (arXiv 2202.08906) of each token: large logits cost."""
    wide = routing.logits.to(torch.promote_types(routing.logits.dtype, torch.float32))
    return wide.logsumexp(-1).square()


class RoutedObjective(Objective):
    """An objective, and terms of the model's routers beside it; evaluations have only its own terms.

    The z-loss is a mean over tokens and layers. The load-balancing loss is no sum over tokens: it is a mean
    over micro-batches, by their tokens, so it depends on how a step is cut.
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
        wanted = {LOAD_BALANCING: load_balancing, Z_LOSS: z_loss}
        self.added = {term: weight for term, weight in wanted.items() if weight}
        self.coefficients = {**inner.coefficients, **self.added}
        self.auxiliary = inner.auxiliary | self.added.keys()
        self.per_micro_batch = inner.per_micro_batch | (self.added.keys() & {LOAD_BALANCING})
        # each by name: a __getattr__ is not asked for what a base class has, and heads would stop training
        self.heads = inner.heads
        self.likelihood = inner.likelihood
        self.reports = inner.reports
        self.unit = inner.unit
        self.progress = inner.progress
        self.reads_lm_head = inner.reads_lm_head
        self.recomputes_logits = inner.recomputes_logits
        self.prediction_heads = inner.prediction_heads

    @property
    def parts(self) -> Mapping[str, Objective]:
        """The parts of the inner objective."""
        return self.inner.parts

    def frozen_forwards(self, model: LanguageModel) -> Sequence[FrozenForward]:
        """Return those of the inner objective."""
        return self.inner.frozen_forwards(model)

    def summarise(self, outputs: Sequence[torch.Tensor], batches: Sequence[Batch]) -> dict[str, float]:
        """Return what the inner objective makes of an evaluation."""
        return self.inner.summarise(outputs, batches)

    def weights(self, batch: Batch) -> dict[str, float]:
        """The objective's units, and tokens."""
        return {**self.inner.weights(batch), **dict.fromkeys(self.added, float(batch.real_tokens))}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sums of this micro-batch, and the routers' statistics."""
        if not torch.is_grad_enabled():
            return self.inner.loss(model, batch)
        with recording(self.layers) as records:
            result = self.inner.loss(model, batch)
        if not all(records):
            return result
        routings = [_joined(record) for record in records]
        real = None if batch.real is None else batch.real.flatten()
        balance = load_balancing_loss(routings, scoring=self.scoring, real=real) * batch.real_tokens
        squares = [(router_z_losses(each) * _weights(each, real)).sum() for each in routings]
        # by the tokens of the batch, also where the objective ran the model on them more than once
        runs = sum(len(each.logits) for each in routings) / len(routings) / batch.tokens.numel()
        terms = {LOAD_BALANCING: balance, Z_LOSS: torch.stack(squares).mean() / runs}
        with torch.no_grad():
            rows = [
                _statistics(routing, self.scoring, real, z=z, balance=balance)
                for routing, z in zip(routings, squares, strict=True)
            ]
        added = {term: terms[term] for term in self.added}
        return Loss({**result.sums, **added}, {**result.metrics, STATISTICS: torch.stack(rows)}, result.units)


def _joined(record: Sequence[Routing]) -> Routing:
    """All that a router did in one loss, which may have needed several forwards."""
    if len(record) == 1:
        return record[0]
    return Routing(torch.cat([each.logits for each in record]), torch.cat([each.chosen for each in record]))


def _weights(routing: Routing, real: torch.Tensor | None) -> torch.Tensor:
    """1 for each token, 0 for padding; several forwards of one batch have its padding several times."""
    count = len(routing.logits)
    dtype = torch.promote_types(routing.logits.dtype, torch.float32)
    if real is None or count % len(real):
        return routing.logits.new_ones(count, dtype=dtype)
    return real.to(dtype).repeat(count // len(real))


def _counts(chosen: torch.Tensor, weights: torch.Tensor, *, experts: int) -> torch.Tensor:
    """How many tokens chose each expert; without a host sync, as bincount would need."""
    each = weights[:, None].expand_as(chosen).flatten()
    return weights.new_zeros(experts).scatter_add_(0, chosen.flatten(), each)


def _distribution(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Scores that add up to one for each token."""
    scores = scores_of(logits, scoring)
    return scores if scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _statistics(
    routing: Routing, scoring: str, real: torch.Tensor | None, *, z: torch.Tensor, balance: torch.Tensor
) -> torch.Tensor:
    """What is known of a layer's routing, as sums over its tokens."""
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
