"""The key/value cache of a batch of rows that grow together."""

import torch

_GROWTH = 32  # slots added when the cache is full: few copies, little waste


class KeyValueCache:
    """Keys and values of every layer, [B, kv_heads, slots, head_dim], with room to grow.

    Slots are filled one after another, and `update` gives the filled ones, until `fix` is called: from then
    on new keys go where a tensor says, and `update` gives all slots, so that no shape changes any more.
    """

    def __init__(self, layers: int, capacity: int = 0) -> None:
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._lengths = [0] * layers
        self._capacity = capacity
        self._place: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Slots filled in every layer."""
        return max(self._lengths)  # a layer without attention holds nothing

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new slots of one layer and return its keys and values."""
        if self._place is not None:
            return (self._put(self._keys, layer, keys), self._put(self._values, layer, values))
        start = self._lengths[layer]
        end = start + keys.shape[2]
        self._lengths[layer] = end
        return (
            self._append(self._keys, layer, keys, start, end),
            self._append(self._values, layer, values, start, end),
        )

    def truncate(self, length: int) -> None:
        """Forget the slots after the first `length`."""
        self._lengths = [min(filled, length) for filled in self._lengths]

    def fix(self, place: torch.Tensor, slots: int) -> None:
        """From now on have so many slots, and write at `place` [1]."""
        self._place = place
        for store in (self._keys, self._values):
            for layer, held in enumerate(store):
                if held is not None and held.shape[2] != slots:
                    batch, heads, filled, size = held.shape
                    # zeros: hidden slots still take part in products with a weight of 0
                    resized = held.new_zeros(batch, heads, slots, size)
                    shared = min(filled, slots)
                    resized[:, :, :shared] = held[:, :, :shared]
                    store[layer] = resized

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every row that is not listed."""
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                if tensor is not None:
                    store[layer] = tensor.index_select(0, rows)

    def _put(self, store: list[torch.Tensor | None], layer: int, new: torch.Tensor) -> torch.Tensor:
        held = store[layer]
        assert held is not None  # a fixed cache was filled before
        assert self._place is not None
        return held.index_copy_(2, self._place, new)

    def _append(
        self, store: list[torch.Tensor | None], layer: int, new: torch.Tensor, start: int, end: int
    ) -> torch.Tensor:
        held = store[layer]
        if held is None or held.shape[2] < end:
            batch, heads, _, size = new.shape
            slots = self._capacity if end <= self._capacity else end + _GROWTH
            grown = new.new_zeros(batch, heads, slots, size)
            if held is not None:
                grown[:, :, :start] = held[:, :, :start]
            store[layer] = held = grown
        held[:, :, start:end] = new
        return held[:, :, :end]
