"""Multi-token prediction: additional heads predict the tokens after the next one."""

import torch

from whet.data.batches import Batch, make_batch
from whet.data.tokens.examples import Example
from whet.errors import ConfigError, DataError
from whet.models.language_model import LanguageModel
from whet.models.mtp import PredictionHeads, new_prediction_heads
from whet.models.spec import BlockSpec
from whet.objectives.objective import Loss, Objective
from whet.ops.cross_entropy import linear_cross_entropy


class MultiTokenPrediction(Objective):
    """Next-token loss + mtp_weight * the mean loss of the prediction heads.

    At position t, head k reads the hidden state of t and the tokens t + 1 ... t + k, and predicts token
    t + k + 1. Only supervised targets in the same document count.

    Args:
        model: The model to train.
        n_predict: The number of heads.
        mtp_weight: The weight of the mean loss of the heads.
        block_config: The layer of each head; by default like the last layer of the model, if supported.
    """

    likelihood = "main_loss"
    uses_token_weights = True

    def __init__(
        self,
        model: LanguageModel,
        n_predict: int = 2,
        mtp_weight: float = 0.3,
        block_config: BlockSpec | None = None,
    ) -> None:
        if not mtp_weight > 0:
            raise ConfigError(
                f"mtp_weight must be > 0, not {mtp_weight}: otherwise the heads are not trained"
            )
        self.heads: PredictionHeads = new_prediction_heads(model, n_predict, block_config)
        self.prediction_heads = self.heads
        depths = range(1, n_predict + 1)
        self.coefficients = {
            "main_loss": 1.0,
            **{_term(depth): mtp_weight / n_predict for depth in depths},
        }
        self.reports = {
            "main_loss": {"main_loss": 1.0},
            "mtp_loss": {_term(depth): 1 / n_predict for depth in depths},
            "total_loss": self.coefficients,
        }

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the supervised tokens, or the sum of their weights, of the model and of each head."""
        supervised = batch.supervised_positions
        positions = batch.positions.flatten()[supervised]
        weights = (
            torch.ones(len(supervised)) if batch.weights is None else batch.weights.flatten()[supervised]
        )
        return {
            term: float(weights[positions >= depth].sum(dtype=torch.float64))
            for depth, term in enumerate(self.coefficients)
        }

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the loss sums; the output head is applied to supervised positions only."""
        layout = batch.layout()
        supervised = batch.supervised_positions
        targets = batch.supervised_targets
        positions = batch.positions.flatten().index_select(0, supervised)
        token_weights = batch.supervised_weights
        hidden = model.hidden(batch.tokens, batch.positions, layout)
        head = model.head()
        sums = {
            "main_loss": linear_cross_entropy(
                hidden.flatten(0, 1).index_select(0, supervised), head, targets, weights=token_weights
            )
        }
        embedded = model.embed(batch.tokens)
        for depth in range(1, len(self.heads) + 1):
            # At the end of a document this shifts in tokens of the next one. These positions have no target,
            # and positions with a target do not attend to them.
            hidden = self.heads.advance(
                depth,
                hidden,
                embedded.roll(-depth, 1),
                positions=batch.positions,
                layout=layout,
                recompute=model.grad_checkpoint,
            )
            # a weight of 0 excludes positions before the document without a device sync
            counted = (positions >= depth).to(torch.float32)
            sums[_term(depth)] = linear_cross_entropy(
                hidden.flatten(0, 1).index_select(0, (supervised - depth).clamp(min=0)),
                head,
                targets,
                weights=counted if token_weights is None else counted * token_weights,
            )
        return Loss(sums)

    def losses(self, model: LanguageModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return main_loss, mtp_loss and total_loss of token ids [B, S], for custom training loops."""
        if tokens.dim() != 2 or tokens.shape[1] < len(self.heads) + 2:
            raise DataError(
                f"tokens must be [rows, at least {len(self.heads) + 2}] for {len(self.heads)} heads, "
                f"not {list(tokens.shape)}"
            )
        rows = tokens.tolist()
        batch = make_batch([[Example(row, [True] * len(row), "tokens")] for row in rows]).to(tokens.device)
        sums, weights = self.loss(model, batch).sums, self.weights(batch)
        return {
            name: torch.stack([share * sums[term] / weights[term] for term, share in shares.items()]).sum()
            for name, shares in self.reports.items()
        }


def _term(depth: int) -> str:
    return f"mtp_loss_{depth}"
