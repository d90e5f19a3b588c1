"""Supervised fine-tuning: next-token cross-entropy on the supervised positions."""

from collections.abc import Mapping

from torch import nn

from whet.data.batches import Batch
from whet.models.language_model import LanguageModel
from whet.objectives.base import Loss
from whet.ops.linear_cross_entropy import linear_cross_entropy


class SFT:
    """Mean negative log-likelihood of the supervised tokens."""

    coefficients: Mapping[str, float] = {"loss": 1.0}
    heads: nn.Module | None = None
    likelihood = True

    def weights(self, batch: Batch) -> dict[str, float]:
        """Supervised tokens, or the sum of their weights."""
        if batch.weights is None:
            return {"loss": float(batch.supervised)}
        return {"loss": float(batch.weights.flatten()[batch.supervised_positions].sum())}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The summed loss; only supervised positions ever meet the head."""
        hidden = model.hidden(batch.tokens, batch.positions, batch.layout())
        chosen = batch.supervised_positions
        summed = linear_cross_entropy(
            hidden.flatten(0, 1).index_select(0, chosen),
            model.head(),
            batch.targets.flatten().index_select(0, chosen),
            weights=None if batch.weights is None else batch.weights.flatten().index_select(0, chosen),
        )
        return Loss({"loss": summed})
