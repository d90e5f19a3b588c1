"""The model interface used by objectives, generation and adapters, for native and bridged models."""

import abc
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.ops.attention import Layout
from whet.ops.dispatch import current_paths
from whet.ops.linear import linear
from whet.ops.lm_head import Head

if TYPE_CHECKING:
    from whet.data.batches import Batch


class Trainable(nn.Module, abc.ABC):
    """Base class of trainable models, with a device and a fingerprint of the architecture."""

    name: str | None = None  # the name or path it was loaded by

    def __init__(self) -> None:
        super().__init__()
        self.paths = current_paths()  # also used by adapters attached later

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of the architecture."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:  # Any: JSON values
        """Return the architecture as a JSON value."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device


class LanguageModel(Trainable):
    """A causal language model, split into hidden states and the output head."""

    grad_checkpoint: bool  # recompute activations in the backward pass
    input_requires_grad = (
        False  # request a gradient at the first layer's input even if the embedding is frozen
    )
    source: Path | None = None  # the directory it was loaded from

    @abc.abstractmethod
    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        layout: Layout | None = None,
        cache: Any = None,  # Any: the result of this model's new_cache
    ) -> torch.Tensor:
        """Return the final hidden states [B, T, D] of tokens [B, T]."""

    def states(self, batch: "Batch") -> torch.Tensor:
        """Return the hidden states [N, D] at the supervised positions of a batch.

        They correspond to `batch.supervised_targets`.
        """
        hidden = self.hidden(batch.tokens, batch.positions, batch.layout())
        return hidden.flatten(0, 1).index_select(0, batch.supervised_positions)

    @abc.abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [B, T, D] of tokens [B, T], without positions."""

    @abc.abstractmethod
    def head(self) -> Head:
        """Return the output head. Call it after `hidden`, which gathers the weights of a sharded head."""

    @abc.abstractmethod
    def new_cache(self, capacity: int = 0) -> Any:  # Any: opaque, apart from `keep(rows)`
        """Return an empty key/value cache. `capacity` is the number of tokens to reserve, if supported."""

    @abc.abstractmethod
    def blocks(self) -> Iterable[nn.Module]:
        """Return the layers in order."""

    @abc.abstractmethod
    def hf_name(self, name: str) -> str:
        """Return the Hugging Face name of one of this model's parameters or modules."""

    def to_hf_layout(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter in the shape used by Hugging Face files."""
        return tensor

    def to_hf_tensors(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of a parameter by name: one, or several that it is split into."""
        return {self.hf_name(name): self.to_hf_layout(name, tensor)}

    def to_hf_state_dict(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of a state dict by name."""
        return {
            stored: part
            for name, tensor in state.items()
            for stored, part in self.to_hf_tensors(name, tensor).items()
        }

    @property
    def stores_transposed(self) -> bool:
        """Whether files store linear weights as [in, out] (PEFT's fan_in_fan_out)."""
        return False

    @abc.abstractmethod
    def hf_config(self) -> dict[str, Any]:  # Any: JSON values
        """Return the config.json of this model."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of rows of the token embedding."""

    @property
    @abc.abstractmethod
    def max_positions(self) -> int:
        """The maximum sequence length."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [..., D], for decoding and analysis.

        Losses do not call this, because they avoid the full logits.
        """
        head = self.head()
        project = linear if self.paths.decoding else F.linear
        return head.transform(project(hidden, head.weight, head.bias))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of tokens [B, T]."""
        return self.logits(self.hidden(tokens))


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode and disable gradients in the `with` block."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        if callable(reshard := getattr(model, "reshard", None)):
            reshard()  # parameters that FSDP keeps gathered would be stale after the next update


@contextlib.contextmanager
def eager_layers(model: LanguageModel) -> Iterator[None]:
    """Run compiled layers eagerly in the `with` block.

    The changing shapes of decoding would exceed the recompilation limit.
    """
    if not any(getattr(block, "_compiled_call_impl", None) for block in model.blocks()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
