"""Heads that are trained together with a model but are not part of it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from whet.config.objectives.classify import Pooling
from whet.models.language_model import Trainable
from whet.ops.lm_head import Head

HEADS_PREFIX = "heads."  # prefix of their parameter names, in parameter groups and checkpoints


class ModelWithHeads(nn.Module):
    """A model and the heads of an objective, as one module for the optimizer and for checkpoints.

    The model's parameters keep their names, so a checkpoint can be opened without the heads.
    """

    def __init__(self, model: Trainable, heads: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.heads = heads

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the model under their names, then those of the heads as `heads.*`."""
        yield from self.model.named_parameters(prefix, recurse, remove_duplicate)
        yield from self.heads.named_parameters(prefix + HEADS_PREFIX[:-1], recurse, remove_duplicate)

    def head(self) -> Head:
        """Return the output head of the model."""
        return self.model.head()  # type: ignore[operator]  # called by Muon, for language models


class ClassificationHead(nn.Module):
    """Computes class logits from pooled hidden states. It is always float32 and always trained.

    Its linear layer is named `score`, as in the sequence classifiers of transformers.
    """

    def __init__(self, size: int, classes: int, *, pooling: Pooling = "last", bias: bool = False) -> None:
        super().__init__()
        self.pooling = pooling
        self.score = nn.Linear(size, classes, bias=bias, dtype=torch.float32)

    def initialise(self, seed: int) -> "ClassificationHead":
        """Draw the weights from N(0, 0.02) with a generator of this seed, and return the head.

        The standard deviation is that of transformers. Final hidden states are large, and Xavier
        initialization would start with overconfident predictions.
        """
        nn.init.normal_(self.score.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
        if self.score.bias is not None:
            nn.init.zeros_(self.score.bias)
        return self

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return the logits [texts, classes] of pooled hidden states [texts, D]."""
        with torch.autocast(pooled.device.type, enabled=False):
            return F.linear(pooled.float(), self.score.weight, self.score.bias)


def pool_hidden_states(
    hidden: torch.Tensor, positions: torch.Tensor, text_ids: torch.Tensor, *, texts: int, pooling: Pooling
) -> torch.Tensor:
    """Return one pooled hidden state per text [texts, D] in float32, computed from its real tokens only.

    `hidden` is [B, T, D]. `positions` [N] are the indices of the real tokens in the flattened rows, in order.
    `text_ids` [N] are the indices of their texts.
    """
    states = hidden.flatten(0, 1).index_select(0, positions).float()
    if pooling == "mean":
        sums = states.new_zeros(texts, states.shape[1]).index_add(0, text_ids, states)
        lengths = states.new_zeros(texts).index_add(0, text_ids, states.new_ones(len(text_ids)))
        return sums / lengths[:, None]
    text_indices = torch.arange(texts, device=text_ids.device)
    if pooling == "first":
        return states.index_select(0, torch.searchsorted(text_ids, text_indices))
    return states.index_select(0, torch.searchsorted(text_ids, text_indices, right=True) - 1)
