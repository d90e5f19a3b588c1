"""The key/value cache of a batch of rows."""

import torch

_GROWTH = 32  # slots added when the cache is full: few copies, little wasted memory


class KeyValueCache:
    """Keys and values of every layer, [B, kv_heads, slots, head_dim].

    Slots are filled in order, and `update` returns the filled ones. After `make_static`, new keys are
    written at the index that a tensor holds, and `update` returns all slots, so shapes no longer change.
    """

    def __init__(self, layers: int, capacity: int = 0) -> None:
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._lengths = [0] * layers
        self._capacity = capacity
        self._write_index: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Number of filled slots."""
        return max(self._lengths)  # layers without attention have none

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values of one layer, and return all of its keys and values."""
        if self._write_index is not None:
            return (self._write(self._keys, layer, keys), self._write(self._values, layer, values))
        start = self._lengths[layer]
        end = start + keys.shape[2]
        self._lengths[layer] = end
        return (
            self._append(self._keys, layer, keys, start, end),
            self._append(self._values, layer, values, start, end),
        )

    def truncate(self, length: int) -> None:
        """Drop all slots after the first `length`."""
        self._lengths = [min(filled, length) for filled in self._lengths]

    def make_static(self, index: torch.Tensor, slots: int) -> None:
        """Make the cache static with this many slots. New keys are written at `index` [1]."""
        self._write_index = index
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                if tensor is not None and tensor.shape[2] != slots:
                    batch, heads, filled, size = tensor.shape
                    # zeros, because masked slots still enter matmuls with a weight of 0
                    resized = tensor.new_zeros(batch, heads, slots, size)
                    copied = min(filled, slots)
                    resized[:, :, :copied] = tensor[:, :, :copied]
                    store[layer] = resized

    def select_rows(self, rows: torch.Tensor) -> None:
        """Select and reorder rows by index. Other rows are dropped."""
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                if tensor is not None:
                    store[layer] = tensor.index_select(0, rows)

    def _write(self, store: list[torch.Tensor | None], layer: int, new: torch.Tensor) -> torch.Tensor:
        tensor = store[layer]
        assert tensor is not None  # a static cache has been filled before
        assert self._write_index is not None
        return tensor.index_copy_(2, self._write_index, new)

    def _append(
        self, store: list[torch.Tensor | None], layer: int, new: torch.Tensor, start: int, end: int
    ) -> torch.Tensor:
        tensor = store[layer]
        if tensor is None or tensor.shape[2] < end:
            batch, heads, _, size = new.shape
            slots = self._capacity if end <= self._capacity else end + _GROWTH
            grown = new.new_zeros(batch, heads, slots, size)
            if tensor is not None:
                grown[:, :, :start] = tensor[:, :, :start]
            store[layer] = tensor = grown
        tensor[:, :, start:end] = new
        return tensor[:, :, :end]
