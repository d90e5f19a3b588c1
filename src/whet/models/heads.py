"""Modules that train beside a model without being part of it."""

from collections.abc import Iterator

from torch import nn

from whet.models.language_model import LanguageModel
from whet.ops.head import Head

HEADS = "heads."  # what their parameters are called by, in groups and in checkpoints


class WithHeads(nn.Module):
    """A model and what an objective trains beside it, as one thing for the optimizer and for checkpoints.

    The model's own parameters keep their names, so that a checkpoint can be opened without the rest.
    """

    def __init__(self, model: LanguageModel, heads: nn.Module) -> None:
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
        return self.model.head()
