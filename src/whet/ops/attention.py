"""The attention function, and `Layout`, which describes which positions attend to which."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from whet.ops.dispatch import FAST, Paths, current_paths, device_type, is_planning
from whet.ops.kernels import fused_decode


@dataclass(frozen=True)
class Layout:
    """Which positions attend to which. Built once per forward pass and used by every layer.

    There are three kinds. Plain causal rows need no mask, even with right padding, because no real token
    attends to a later position. Packed rows list the lengths of the documents in each row (`documents`,
    where padding counts as a last document). Rows that continue a key/value cache mark the slots that hold
    real tokens (`visible`) and give their positions (`slots`).

    On a CPU the documents of a single row may be the segments of a prefix tree. Each segment then attends to
    itself and to its `ancestors`.
    """

    documents: tuple[tuple[int, ...], ...] | None = None
    visible: torch.Tensor | None = None  # [B, keys], bool
    slots: torch.Tensor | None = None  # [B, keys], positions; None means 0, 1, 2, ...
    mask: torch.Tensor | None = None  # [B or 1, 1, queries, keys], bool; None: causal or unmasked
    causal: bool = True
    offsets: torch.Tensor | None = None  # packed rows on a GPU: cumulative document lengths
    # the longest document, rounded up to a power of two: fewer distinct values mean fewer compiled graphs
    max_length: int = 0
    queries: torch.Tensor | None = None  # [B, queries], positions; None: those of the last slots
    ancestors: tuple[tuple[int, ...], ...] | None = None  # of each tree segment, root first
    # the document mask (key 0) and the masks of sliding windows, built on first use
    _masks: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    _additive_masks: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def packed(documents: Sequence[Sequence[int]], *, device: torch.device) -> "Layout":
        """Return the layout of packed rows, in which every document attends only to itself.

        Args:
            documents: The document lengths of each row. They sum to the row length, padding included.
            device: The device of the model. CPU layouts hold no tensors.
        """
        lengths = tuple(tuple(row) for row in documents)
        if device.type == "cpu":
            return Layout(documents=lengths)
        ends = list(itertools.accumulate(itertools.chain(*lengths)))
        offsets = torch.tensor(
            [0, *ends], dtype=torch.int32, pin_memory=device.type == "cuda" and torch.cuda.is_available()
        )
        max_length = max(map(max, lengths))
        offsets = offsets.to(device, non_blocking=True)
        if offsets.is_cuda:
            torch._dynamo.maybe_mark_dynamic(offsets, 0)  # avoids a recompilation at the second step
        return Layout(documents=lengths, offsets=offsets, max_length=1 << (max_length - 1).bit_length())

    @staticmethod
    def cached(
        visible: torch.Tensor, *, new_tokens: int, padded: bool, slots: torch.Tensor | None = None
    ) -> "Layout":
        """Return the layout of queries that continue a key/value cache.

        The queries are the last `new_tokens` slots. Each attends to itself and to the real slots before it.

        Args:
            visible: Which slots hold real tokens, bool [B, keys].
            new_tokens: How many of the last slots are queries.
            padded: Whether any slot holds padding. Without padding, most cases need no mask.
            slots: The position of each slot [B, keys], if it is not the slot's index.
        """
        keys = visible.shape[1]
        if not padded and new_tokens in (1, keys):
            return Layout(visible=visible, slots=slots, causal=new_tokens == keys)
        key_index = torch.arange(keys, device=visible.device)
        query_index = key_index[keys - new_tokens :, None]
        # a padding slot attends to itself, because a softmax over no keys is NaN
        mask = (key_index <= query_index) & (visible[:, None, None, :] | (key_index == query_index))
        return Layout(visible=visible, slots=slots, mask=mask, causal=False)

    def document_mask(self, device: torch.device) -> torch.Tensor:
        """Return the mask [B, 1, T, T] of packed rows, used if the varlen kernel does not apply."""
        if 0 not in self._masks:
            assert self.documents is not None
            segments = torch.stack(
                [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in self.documents]
            ).to(device, non_blocking=True)
            positions = torch.arange(segments.shape[1], device=device)
            same = segments[:, None, :, None] == segments[:, None, None, :]
            self._masks[0] = same & (positions[:, None] >= positions)
        return self._masks[0]

    def additive_mask(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a bool mask of this layout as an additive mask of 0 and -inf.

        The result is cached. With a bool mask, SDPA would repeat this conversion in every layer.
        """
        if id(mask) not in self._additive_masks:
            zero = torch.zeros((), dtype=dtype, device=mask.device)
            self._additive_masks[id(mask)] = torch.where(mask, zero, -torch.inf)
        return self._additive_masks[id(mask)]

    def distances(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """Return query position minus key position for each pair, [B or 1, 1, queries, keys]."""
        slots = torch.arange(keys, device=device)[None] if self.slots is None else self.slots
        query_positions = slots[:, keys - queries :] if self.queries is None else self.queries
        return (query_positions[:, :, None] - slots[:, None, :])[:, None]

    def window_mask(self, window: int, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """Return this layout's mask restricted to a sliding window of `window` positions."""
        if window not in self._masks:
            distance = self.distances(queries, keys, device)
            mask = distance < window
            if self.mask is not None:
                mask = mask & self.mask
            elif self.documents is not None:
                mask = mask & self.document_mask(device)
            elif self.causal:
                mask = mask & (distance >= 0)
            self._masks[window] = mask
        return self._masks[window]


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,
    paths: Paths = FAST,
) -> torch.Tensor:
    """Compute scaled dot-product attention, by the fastest implementation that supports the arguments.

    Args:
        queries: [B, heads, queries, D].
        keys: [B, kv_heads, keys, D], with `heads` a multiple of `kv_heads`.
        values: [B, kv_heads, keys, D or less].
        layout: Which positions attend to which.
        window: The size of a sliding window: how many positions back a query sees, itself included.
        scale: The factor on the scores. Defaults to D ** -0.5.
        softcap: If set, scores become softcap * tanh(scores / softcap).
        slopes: ALiBi slopes [heads]. Each score is reduced by slope * distance.
        paths: The enabled fast paths. Without `paths.attention`, an explicit mask over each row is used.

    Returns:
        The attention output [B, heads, queries, D of the values].
    """
    kind = queries.device.type
    if torch.is_autocast_enabled(kind):  # RoPE promotes queries and keys to float32; the kernels need 16 bits
        dtype = torch.get_autocast_dtype(kind)
        queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    if not paths.attention and layout.ancestors is None:  # only _attend_by_document supports prefix trees
        return _attend_masked(
            queries, keys, values, layout, window=window, scale=scale, softcap=softcap, slopes=slopes
        )
    if layout.offsets is not None and _varlen_fits(queries, values, softcap=softcap, slopes=slopes):
        return _attend_varlen(queries, keys, values, layout, window=window, scale=scale)
    if layout.offsets is None and layout.mask is None and layout.documents is not None:
        return _attend_by_document(
            queries,
            keys,
            values,
            layout,
            window=window,
            scale=scale,
            softcap=softcap,
            slopes=slopes,
        )
    query_count, key_count = queries.shape[2], keys.shape[2]
    mask, causal = _mask(layout, window, queries, key_count)
    if slopes is None and softcap is None:
        if mask is not None and fused_decode.is_supported(queries):
            mask = layout.additive_mask(mask, queries.dtype)
        if query_count == 1 and queries.shape[1] != keys.shape[1]:
            return _attend_grouped(queries, keys, values, mask=mask, scale=scale)
        width = values.shape[-1]
        if not torch.compiler.is_compiling() and is_planning() and device_type(values) == "cuda":
            values = _pad_values(values, queries)  # with fake tensors no kernel accepts narrower values
        output = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return output if width == values.shape[-1] else output[..., :width]
    distance = layout.distances(query_count, key_count, queries.device)
    if mask is None and causal:
        mask = distance >= 0
    bias = None if slopes is None else -slopes[:, None, None] * distance
    return _attend_eager(queries, keys, values, mask=mask, scale=scale, softcap=softcap, bias=bias)


def _mask(
    layout: Layout, window: int | None, queries: torch.Tensor, key_count: int
) -> tuple[torch.Tensor | None, bool]:
    """Return the bool mask of the visible keys, or None, and whether attention without a mask is causal."""
    if window is not None and window < key_count:
        return layout.window_mask(window, queries.shape[2], key_count, queries.device), False
    if layout.documents is not None:
        return layout.document_mask(queries.device), False
    return layout.mask, layout.causal


def _attend_masked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    *,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Attend through SDPA with an explicit mask, or through `_attend_eager` for softcap and ALiBi."""
    query_count, key_count = queries.shape[2], keys.shape[2]
    mask, causal = _mask(layout, window, queries, key_count)
    distance = layout.distances(query_count, key_count, queries.device)
    if mask is None and causal:
        mask = distance >= 0
    if softcap is not None or slopes is not None:
        bias = None if slopes is None else -slopes[:, None, None] * distance
        return _attend_eager(queries, keys, values, mask=mask, scale=scale, softcap=softcap, bias=bias)
    grouped = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
    )


def _varlen_fits(
    queries: torch.Tensor, values: torch.Tensor, *, softcap: float | None, slopes: torch.Tensor | None
) -> bool:
    """Whether torch's varlen kernel for packed documents supports this attention."""
    return (
        queries.is_cuda
        and queries.dtype in (torch.bfloat16, torch.float16)
        and softcap is None
        and slopes is None
        and values.shape[-1] <= queries.shape[-1] <= 256
        and queries.shape[-1] % 8 == 0
    )


def _attend_varlen(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    *,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attend within packed documents by one varlen kernel, which skips pairs of different documents.

    This calls the kernel of torch's `varlen_attn` directly. The custom operations of `varlen_attn` cost
    0.4 ms of host time per layer, more than the kernels of a small model.
    """
    width, values = values.shape[-1], _pad_values(values, queries)
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (queries, keys, values))  # [B * T, heads, D]
    output = torch.ops.aten._flash_attention_forward.default(
        q,
        k,
        v,
        layout.offsets,
        layout.offsets,
        layout.max_length,
        layout.max_length,
        dropout_p=0.0,
        is_causal=window is None,
        return_debug_mask=False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )[0]
    output = output.unflatten(0, (queries.shape[0], -1)).transpose(1, 2)
    return output if width == values.shape[-1] else output[..., :width]


def _pad_values(values: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Zero-pad values to the head size of the queries: in latent attention they are narrower."""
    missing = queries.shape[-1] - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values


def _attend_grouped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attend with one query per row, treating the heads of a group as the queries of one head.

    The keys of each group are then read once. On CUDA, SDPA kernels that accept a mask do not support grouped
    heads, so this also keeps the fast kernels available.
    """
    batch, heads, _, size = queries.shape
    # contiguous, because the kernels are three times slower on transposed queries
    grouped = queries.reshape(batch, keys.shape[1], -1, size).contiguous()
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(batch, heads, 1, -1)


def _attend_eager(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attend without a fused kernel, for softcap and ALiBi. The softmax is in float32 or wider."""
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = queries @ keys.transpose(-1, -2) * (scale or queries.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(values.dtype) @ values


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each new set of lengths would be a new graph
def _attend_by_document(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    *,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Attend within one document at a time: less work on a CPU than a masked attention over the row."""
    assert layout.documents is not None
    plain = Layout()
    rows = []
    for row, lengths in enumerate(layout.documents):
        q, k, v = (tensor[row : row + 1].split(lengths, dim=2) for tensor in (queries, keys, values))
        if layout.ancestors is not None:
            q, k, v = (_with_ancestors(parts, layout.ancestors) for parts in (q, k, v))
        outputs = [
            attend(
                *part,
                Layout() if window else plain,
                window=window,
                scale=scale,
                softcap=softcap,
                slopes=slopes,
            )
            for part in zip(q, k, v, strict=True)
        ]
        if layout.ancestors is not None:
            outputs = [each[:, :, -length:] for each, length in zip(outputs, lengths, strict=True)]
        rows.append(torch.cat(outputs, dim=2))
    return torch.cat(rows)


def _with_ancestors(
    parts: Sequence[torch.Tensor], ancestors: Sequence[tuple[int, ...]]
) -> tuple[torch.Tensor, ...]:
    """Prepend the ancestors of each segment to it, also for queries: causal attention then needs no mask."""
    return tuple(
        torch.cat([*(parts[index] for index in indices), part], dim=2) if indices else part
        for part, indices in zip(parts, ancestors, strict=True)
    )


def describe_backend(device: torch.device) -> str:
    """Return a short description of the attention implementation used on this device."""
    if not current_paths().attention:
        return "SDPA with an explicit mask (reference path: plain PyTorch)"
    if device.type == "cpu":
        return "SDPA, one packed document at a time; shared prefixes are computed once"
    if device.type == "cuda":
        return "SDPA; packed documents use varlen attention in 16-bit precision, otherwise a document mask"
    return "SDPA; packed documents use a document mask"
