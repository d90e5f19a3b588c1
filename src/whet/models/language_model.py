"""What every model gives to objectives, generation and adapters, whether native or behind the bridge."""

import abc
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.ops.attention import Layout
from whet.ops.dispatch import chosen_paths
from whet.ops.linear import linear
from whet.ops.lm_head import Head

if TYPE_CHECKING:
    from whet.data.batches import Batch


class Trainable(nn.Module, abc.ABC):
    """Parameters that know where they are and what they belong to."""

    name: str | None = None  # what it was asked for by

    def __init__(self) -> None:
        super().__init__()
        self.paths = chosen_paths()  # also for what is attached to it later

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of the architecture."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:  # Any: JSON values
        """The architecture as plain JSON."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device


class LanguageModel(Trainable):
    """A causal language model as two things: hidden states, and the head that reads them."""

    grad_checkpoint: bool  # recompute activations in the backward pass
    input_has_gradient = False  # of the first layer, even where nothing before it is trained
    source: Path | None = None  # the directory it was loaded from

    @abc.abstractmethod
    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        layout: Layout | None = None,
        cache: Any = None,  # Any: what this model's own new_cache returned
    ) -> torch.Tensor:
        """Final hidden states [B, T, D] of tokens [B, T]."""

    def states(self, batch: "Batch") -> torch.Tensor:
        """Return the hidden states [N, D] at a batch's supervised positions, beside `supervised_targets`."""
        hidden = self.hidden(batch.tokens, batch.positions, batch.layout())
        return hidden.flatten(0, 1).index_select(0, batch.supervised_positions)

    @abc.abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What tokens [B, T] are to the first layer, wherever they stand: [B, T, D]."""

    @abc.abstractmethod
    def head(self) -> Head:
        """The output projection. A loss asks for it after `hidden`: only then is one in parts gathered."""

    @abc.abstractmethod
    def new_cache(self, capacity: int = 0) -> Any:  # Any: opaque to others, apart from `keep(rows)`
        """An empty key/value cache, with room for so many tokens where that can be said."""

    @abc.abstractmethod
    def blocks(self) -> Iterable[nn.Module]:
        """The layers, in order."""

    @abc.abstractmethod
    def hf_name(self, name: str) -> str:
        """Hugging Face's name for one of this model's parameters or modules."""

    def as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter in the shape in which Hugging Face's files hold it."""
        return tensor

    def in_files(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter as Hugging Face's files hold it: under one name, or cut into several."""
        return {self.hf_name(name): self.as_stored(name, tensor)}

    def state_in_files(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All parameters as Hugging Face's files hold them."""
        return {
            stored: part
            for name, tensor in state.items()
            for stored, part in self.in_files(name, tensor).items()
        }

    @property
    def stores_transposed(self) -> bool:
        """Whether the files hold linear weights as [in, out] (PEFT's fan_in_fan_out)."""
        return False

    @abc.abstractmethod
    def hf_config(self) -> dict[str, Any]:  # Any: JSON values
        """The config.json that describes this model."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids the embedding knows."""

    @property
    @abc.abstractmethod
    def max_positions(self) -> int:
        """The longest sequence the model was made for."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states [..., D]: for decoding and for looking; losses never build them all."""
        head = self.head()
        project = linear if self.paths.decoding else F.linear
        return head.transform(project(hidden, head.weight, head.bias))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        return self.logits(self.hidden(tokens))


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, for the time of a `with` block."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        if callable(reshard := getattr(model, "reshard", None)):
            reshard()  # what FSDP keeps gathered after a forward pass would be out of date one update later


@contextlib.contextmanager
def uncompiled(model: LanguageModel) -> Iterator[None]:
    """Run compiled layers as they are: the changing shapes of decoding would use up their recompilations."""
    if not any(getattr(block, "_compiled_call_impl", None) for block in model.blocks()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
