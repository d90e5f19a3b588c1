"""Multi-token prediction: heads beside the model learn the tokens after the next one."""

import torch

from whet.data.batches import Batch, make_batch
from whet.data.tokens.examples import Example
from whet.errors import ConfigError, DataError
from whet.models.language_model import LanguageModel
from whet.models.mtp import PredictionHeads, new_heads
from whet.models.spec import BlockSpec
from whet.objectives.objective import Loss, Objective
from whet.ops.cross_entropy import linear_cross_entropy


class MultiTokenPrediction(Objective):
    """main_loss + mtp_weight * mtp_loss, which is the mean over heads of each head's mean loss.

    Head k reads, at position t, the model's hidden state of t and the tokens t + 1 ... t + k, and learns
    token t + k + 1: of the same document, and supervised.
    """

    likelihood = "main_loss"

    def __init__(
        self,
        model: LanguageModel,
        n_predict: int = 2,
        mtp_weight: float = 0.3,
        block_config: BlockSpec | None = None,
    ) -> None:
        if not mtp_weight > 0:
            raise ConfigError(f"mtp_weight={mtp_weight}: heads that count nothing learn nothing")
        self.heads: PredictionHeads = new_heads(model, n_predict, block_config)
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
        """Supervised tokens of the next-token loss, and of each head, or the sums of their weights."""
        chosen = batch.supervised_positions
        places = batch.positions.flatten()[chosen]
        each = torch.ones(len(chosen)) if batch.weights is None else batch.weights.flatten()[chosen]
        return {
            term: float(each[places >= depth].sum(dtype=torch.float64))
            for depth, term in enumerate(self.coefficients)
        }

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sums of this micro-batch; only supervised positions ever meet the output head."""
        layout = batch.layout()
        chosen = batch.supervised_positions
        targets = batch.supervised_targets
        places = batch.positions.flatten().index_select(0, chosen)
        given = batch.supervised_weights
        hidden = model.hidden(batch.tokens, batch.positions, layout)
        head = model.head()
        sums = {
            "main_loss": linear_cross_entropy(
                hidden.flatten(0, 1).index_select(0, chosen), head, targets, weights=given
            )
        }
        embedded = model.embed(batch.tokens)
        for depth in range(1, len(self.heads) + 1):
            # at the end of a document this brings in tokens of the next one: those positions have no target,
            # and none that has one sees them
            hidden = self.heads.advance(
                depth,
                hidden,
                embedded.roll(-depth, 1),
                positions=batch.positions,
                layout=layout,
                recompute=model.grad_checkpoint,
            )
            # a weight of 0 leaves out, without waiting for the device, what lies before its document
            counted = (places >= depth).to(torch.float32)
            sums[_term(depth)] = linear_cross_entropy(
                hidden.flatten(0, 1).index_select(0, (chosen - depth).clamp(min=0)),
                head,
                targets,
                weights=counted if given is None else counted * given,
            )
        return Loss(sums)

    def losses(self, model: LanguageModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """main_loss, mtp_loss and total_loss of rows of tokens [B, S], for a loop of one's own."""
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
