"""Supervised fine-tuning: next-token cross-entropy on the supervised positions."""

import torch

from whet.data.batches import Batch
from whet.errors import DataError
from whet.models.language_model import LanguageModel
from whet.objectives.objective import Loss, Objective
from whet.ops.cross_entropy import linear_cross_entropy


class SFT(Objective):
    """Mean negative log-likelihood of the supervised tokens."""

    likelihood = True

    def weights(self, batch: Batch) -> dict[str, float]:
        """Supervised tokens, or the sum of their weights."""
        weights = batch.supervised_weights
        return {"loss": float(batch.supervised if weights is None else weights.sum())}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The summed loss; only supervised positions ever meet the head."""
        states, targets, weights = model.states(batch), batch.supervised_targets, batch.supervised_weights
        return Loss({"loss": linear_cross_entropy(states, model.head(), targets, weights=weights)})


def next_token_loss(
    model: LanguageModel, tokens: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Mean loss over the supervised targets, and how many there are.

    `tokens` [B, S] are rows padded to one length; `lengths` [B, 2] says for each row where learning starts
    (`offset`) and how many tokens are real (`length`). The target at step s, counted from 1, is token s of
    the row, and counts when offset <= s < length: padding is never a target.
    """
    if tokens.dim() != 2 or tokens.dtype.is_floating_point or tokens.shape[1] < 2:
        raise DataError(
            f"tokens must be whole numbers [rows, at least 2], not {tokens.dtype} {list(tokens.shape)}"
        )
    if lengths.shape != (tokens.shape[0], 2):
        raise DataError(
            f"lengths must be [{tokens.shape[0]}, 2], one (offset, length) a row, not {list(lengths.shape)}"
        )
    steps = torch.arange(1, tokens.shape[1], device=tokens.device)
    offset, length = lengths.to(tokens.device)[:, :, None].unbind(1)
    chosen = ((offset <= steps) & (steps < length)).flatten().nonzero()[:, 0]
    if not len(chosen):
        raise DataError("no target is supervised: every offset is at or behind its length")
    targets = tokens[:, 1:].flatten().index_select(0, chosen)
    if tokens.device.type == "cpu":  # elsewhere one would have to wait for the answer
        _refuse_unknown(tokens[:, :-1], model.vocab_size)
        _refuse_unknown(targets, model.vocab_size)
    hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
    total = linear_cross_entropy(hidden.index_select(0, chosen), model.head(), targets)
    return total / len(chosen), len(chosen)


def _refuse_unknown(ids: torch.Tensor, size: int) -> None:
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise DataError(f"the id {int(outside[0])} is outside the model's vocabulary of {size:,}")
