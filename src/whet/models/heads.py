"""Modules that train beside a model without being part of it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from whet.config.objectives.classify import Pooling
from whet.models.language_model import Trainable
from whet.ops.lm_head import Head

HEADS = "heads."  # what their parameters are called by, in groups and in checkpoints


class WithHeads(nn.Module):
    """A model and what an objective trains beside it, as one thing for the optimizer and for checkpoints.

    The model's own parameters keep their names, so that a checkpoint can be opened without the rest.
    """

    def __init__(self, model: Trainable, heads: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.heads = heads

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the model as it names them, then `heads.*`."""
        yield from self.model.named_parameters(prefix, recurse, remove_duplicate)
        yield from self.heads.named_parameters(prefix + HEADS[:-1], recurse, remove_duplicate)

    def head(self) -> Head:
        """The model's."""
        return self.model.head()  # type: ignore[operator]  # Muon asks, of language models


class ClassificationHead(nn.Module):
    """Logits of classes from the hidden states of whole texts: always float32, always trained.

    Its matrix is called `score`, as in the sequence classifiers of transformers.
    """

    def __init__(self, size: int, classes: int, *, pooling: Pooling = "last", bias: bool = False) -> None:
        super().__init__()
        self.pooling = pooling
        self.score = nn.Linear(size, classes, bias=bias, dtype=torch.float32)

    def initialise(self, seed: int) -> "ClassificationHead":
        """Small weights, the same for every run of a seed whatever was drawn before.

        As small as transformers': final hidden states are large, and Xavier's would start with sure guesses.
        """
        nn.init.normal_(self.score.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
        if self.score.bias is not None:
            nn.init.zeros_(self.score.bias)
        return self

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Logits [texts, classes] of pooled states [texts, D]."""
        with torch.autocast(pooled.device.type, enabled=False):
            return F.linear(pooled.float(), self.score.weight, self.score.bias)


def pool(
    hidden: torch.Tensor, places: torch.Tensor, owners: torch.Tensor, *, texts: int, pooling: Pooling
) -> torch.Tensor:
    """One state [texts, D] for each text of a batch, in float32, from its own real tokens alone.

    `hidden` is [B, T, D]; `places` [N] are the positions of real tokens in the flattened rows, in order, and
    `owners` [N] the texts they belong to.
    """
    real = hidden.flatten(0, 1).index_select(0, places).float()
    if pooling == "mean":
        sums = real.new_zeros(texts, real.shape[1]).index_add(0, owners, real)
        sizes = real.new_zeros(texts).index_add(0, owners, real.new_ones(len(owners)))
        return sums / sizes[:, None]
    numbers = torch.arange(texts, device=owners.device)
    if pooling == "first":
        return real.index_select(0, torch.searchsorted(owners, numbers))
    return real.index_select(0, torch.searchsorted(owners, numbers, right=True) - 1)
