"""The key/value cache of a batch of rows that grow together."""

import torch

_GROWTH = 32  # slots added when the cache is full: few copies, little waste


class KeyValueCache:
    """Keys and values of every layer, [B, kv_heads, slots, head_dim], with room to grow."""

    def __init__(self, layers: int) -> None:
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._lengths = [0] * layers

    @property
    def length(self) -> int:
        """Slots filled in every layer."""
        return max(self._lengths)  # a layer without attention holds nothing

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new slots to one layer and return all of its keys and values."""
        start = self._lengths[layer]
        end = start + keys.shape[2]
        self._lengths[layer] = end
        return (
            _append(self._keys, layer, keys, start, end),
            _append(self._values, layer, values, start, end),
        )

    def truncate(self, length: int) -> None:
        """Forget the slots after the first `length`."""
        self._lengths = [min(filled, length) for filled in self._lengths]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every row that is not listed."""
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                if tensor is not None:
                    store[layer] = tensor.index_select(0, rows)


def _append(
    store: list[torch.Tensor | None], layer: int, new: torch.Tensor, start: int, end: int
) -> torch.Tensor:
    held = store[layer]
    if held is None or held.shape[2] < end:
        batch, heads, _, size = new.shape
        grown = new.new_empty(batch, heads, end + _GROWTH, size)
        if held is not None:
            grown[:, :, :start] = held[:, :, :start]
        store[layer] = held = grown
    held[:, :, start:end] = new
    return held[:, :, :end]
