"""Supervised fine-tuning: next-token cross-entropy on supervised tokens."""

import torch

from whet.data.batches import Batch
from whet.errors import DataError
from whet.models.language_model import LanguageModel
from whet.objectives.objective import Loss, Objective
from whet.ops.cross_entropy import linear_cross_entropy


class SFT(Objective):
    """Supervised fine-tuning: the mean negative log-likelihood of supervised tokens.

    With weights w, it is sum(w * nll) / sum(w) over all tokens of a step.
    """

    likelihood = True
    uses_token_weights = True

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of supervised tokens, or the sum of their weights."""
        weights = batch.supervised_weights
        # in float64, so that the sum does not depend on how a step is split; not all devices support it
        return {"loss": float(batch.supervised if weights is None else weights.cpu().double().sum())}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the summed loss; the output head is applied to supervised positions only."""
        states, targets, weights = model.states(batch), batch.supervised_targets, batch.supervised_weights
        return Loss({"loss": linear_cross_entropy(states, model.head(), targets, weights=weights)})


def next_token_loss(
    model: LanguageModel, tokens: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return the mean next-token loss over supervised targets, and their number.

    Args:
        model: The model.
        tokens: Token ids [B, S], padded to one length.
        lengths: (offset, length) of each row [B, 2]: the index of the first supervised token, and the number
            of tokens without padding. Token s is a target if offset <= s < length, and s >= 1.

    Raises:
        DataError: If shapes or token ids are invalid, or no target is supervised.
    """
    if tokens.dim() != 2 or tokens.dtype.is_floating_point or tokens.shape[1] < 2:
        raise DataError(
            f"tokens must be integers of shape [rows, at least 2], not {tokens.dtype} {list(tokens.shape)}"
        )
    if lengths.shape != (tokens.shape[0], 2):
        raise DataError(
            f"lengths must have shape [{tokens.shape[0]}, 2], one (offset, length) per row, not "
            f"{list(lengths.shape)}"
        )
    steps = torch.arange(1, tokens.shape[1], device=tokens.device)
    offset, length = lengths.to(tokens.device)[:, :, None].unbind(1)
    supervised = ((offset <= steps) & (steps < length)).flatten().nonzero()[:, 0]
    if not len(supervised):
        raise DataError("no target is supervised: every offset is at or after its length")
    targets = tokens[:, 1:].flatten().index_select(0, supervised)
    if tokens.device.type == "cpu":  # on other devices the check would need a device sync
        _check_token_ids(tokens[:, :-1], model.vocab_size)
        _check_token_ids(targets, model.vocab_size)
    hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
    total = linear_cross_entropy(hidden.index_select(0, supervised), model.head(), targets)
    return total / len(supervised), len(supervised)


def _check_token_ids(ids: torch.Tensor, size: int) -> None:
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise DataError(f"token id {int(outside[0])} is outside the model's vocabulary of {size:,}")
