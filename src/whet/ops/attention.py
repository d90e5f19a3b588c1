"""One attention function and the one description of which positions see which."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from whet.ops.dispatch import FAST, Paths, chosen_paths, device_type, is_plan
from whet.ops.kernels import fused_decode


@dataclass(frozen=True)
class Layout:
    """Which positions may see which. Built once a forward, used by every layer.

    Three kinds: plain causal rows (right padding needs no mask: nothing real ever looks ahead), packed rows
    (`documents`: the lengths of the documents in each row, padding counted as a last document), and rows
    that continue a key/value cache (`visible`: which slots hold real tokens, `slots`: their positions).
    On a CPU the documents of one row may be pieces of a `tree`: each sees those above it, and itself.
    """

    documents: tuple[tuple[int, ...], ...] | None = None
    visible: torch.Tensor | None = None  # [B, keys], bool
    slots: torch.Tensor | None = None  # [B, keys]; None: 0, 1, 2, ...
    mask: torch.Tensor | None = None  # [B or 1, 1, queries, keys], bool; None: plain causal or all visible
    causal: bool = True
    offsets: torch.Tensor | None = None  # packed rows on a GPU: where documents begin in the flattened rows
    longest: int = 0  # of those documents, rounded up to a power of two: few values, few compiled graphs
    queries: torch.Tensor | None = None  # [B, queries], their positions; None: those of the last slots
    above: tuple[tuple[int, ...], ...] | None = None  # of a tree: the pieces that each piece continues
    # masks of whole documents (under 0) and of sliding windows, made when a layer first asks
    _windows: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    _added: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def packed(documents: Sequence[Sequence[int]], *, device: torch.device) -> "Layout":
        """Rows of whole documents, each of which sees only itself."""
        lengths = tuple(tuple(row) for row in documents)
        if device.type == "cpu":
            return Layout(documents=lengths)
        ends = list(itertools.accumulate(itertools.chain(*lengths)))
        offsets = torch.tensor(
            [0, *ends], dtype=torch.int32, pin_memory=device.type == "cuda" and torch.cuda.is_available()
        )
        longest = max(map(max, lengths))
        offsets = offsets.to(device, non_blocking=True)
        if offsets.is_cuda:
            torch._dynamo.maybe_mark_dynamic(offsets, 0)  # or a run's second step would be compiled anew
        return Layout(documents=lengths, offsets=offsets, longest=1 << (longest - 1).bit_length())

    @staticmethod
    def cached(
        visible: torch.Tensor, *, new_tokens: int, padded: bool, slots: torch.Tensor | None = None
    ) -> "Layout":
        """The last `new_tokens` of `visible` [B, keys] attend to the real slots up to themselves."""
        keys = visible.shape[1]
        if not padded and new_tokens in (1, keys):
            return Layout(visible=visible, slots=slots, causal=new_tokens == keys)
        places = torch.arange(keys, device=visible.device)
        queries = places[keys - new_tokens :, None]
        # a padding slot sees itself: a row of softmax over nothing would be NaN
        mask = (places <= queries) & (visible[:, None, None, :] | (places == queries))
        return Layout(visible=visible, slots=slots, mask=mask, causal=False)

    def document_mask(self, device: torch.device) -> torch.Tensor:
        """Packed rows as a mask [B, 1, T, T]: for an accelerator, when its varlen kernel does not fit."""
        if 0 not in self._windows:
            assert self.documents is not None
            segments = torch.stack(
                [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in self.documents]
            ).to(device, non_blocking=True)
            positions = torch.arange(segments.shape[1], device=device)
            same = segments[:, None, :, None] == segments[:, None, None, :]
            self._windows[0] = same & (positions[:, None] >= positions)
        return self._windows[0]

    def added(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """One of this layout's masks as what is added to scores: of bools SDPA makes that in every layer."""
        if id(mask) not in self._added:
            nothing = torch.zeros((), dtype=dtype, device=mask.device)
            self._added[id(mask)] = torch.where(mask, nothing, -torch.inf)
        return self._added[id(mask)]

    def distances(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """How far back [B or 1, 1, queries, keys] each key stands from each query."""
        slots = torch.arange(keys, device=device)[None] if self.slots is None else self.slots
        asking = slots[:, keys - queries :] if self.queries is None else self.queries
        return (asking[:, :, None] - slots[:, None, :])[:, None]

    def windowed(self, window: int, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """This layout's mask, narrowed to the last `window` positions."""
        if window not in self._windows:
            distance = self.distances(queries, keys, device)
            mask = distance < window
            if self.mask is not None:
                mask = mask & self.mask
            elif self.documents is not None:
                mask = mask & self.document_mask(device)
            elif self.causal:
                mask = mask & (distance >= 0)
            self._windows[window] = mask
        return self._windows[window]


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
    """Scaled dot-product attention of [B, heads, queries, D] over [B, kv_heads, keys, D].

    `slopes` [heads] are ALiBi's: a key loses slope * distance. Without the fast path, what a query sees is
    always one mask over its row.
    """
    kind = queries.device.type
    if torch.is_autocast_enabled(kind):  # rotation has made queries and keys wide; the kernels want 16 bits
        dtype = torch.get_autocast_dtype(kind)
        queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    if not paths.attention and layout.above is None:  # pieces of a tree are only for documents one by one
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
    count, total = queries.shape[2], keys.shape[2]
    mask, causal = _mask(layout, window, queries, total)
    if slopes is None and softcap is None:
        if mask is not None and fused_decode.suits(queries):
            mask = layout.added(mask, queries.dtype)
        if count == 1 and queries.shape[1] != keys.shape[1]:
            return _attend_grouped(queries, keys, values, mask=mask, scale=scale)
        width = values.shape[-1]
        if not torch.compiler.is_compiling() and is_plan() and device_type(values) == "cuda":
            values = _as_wide(values, queries)  # here no kernel takes them as they are
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return mixed if width == values.shape[-1] else mixed[..., :width]
    distance = layout.distances(count, total, queries.device)
    if mask is None and causal:
        mask = distance >= 0
    bias = None if slopes is None else -slopes[:, None, None] * distance
    return _spelled_out(queries, keys, values, mask=mask, scale=scale, softcap=softcap, bias=bias)


def _mask(
    layout: Layout, window: int | None, queries: torch.Tensor, keys: int
) -> tuple[torch.Tensor | None, bool]:
    """Which keys these queries see: a mask, or whether it is all of them up to their own."""
    if window is not None and window < keys:
        return layout.windowed(window, queries.shape[2], keys, queries.device), False
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
    """Attention by torch's function and an explicit mask, or step by step where it knows no such scores."""
    count, total = queries.shape[2], keys.shape[2]
    mask, causal = _mask(layout, window, queries, total)
    distance = layout.distances(count, total, queries.device)
    if mask is None and causal:
        mask = distance >= 0
    if softcap is not None or slopes is not None:
        bias = None if slopes is None else -slopes[:, None, None] * distance
        return _spelled_out(queries, keys, values, mask=mask, scale=scale, softcap=softcap, bias=bias)
    grouped = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
    )


def _varlen_fits(
    queries: torch.Tensor, values: torch.Tensor, *, softcap: float | None, slopes: torch.Tensor | None
) -> bool:
    """Whether torch's kernel for packed documents can do this attention."""
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
    """Packed rows as one run of documents: no work is done between two of them.

    By the kernel of torch's `varlen_attn`, without its custom operations: they take 0.4 ms of the host's time
    for each layer, more than the kernels of a small model take.
    """
    width, values = values.shape[-1], _as_wide(values, queries)
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (queries, keys, values))  # [B * T, heads, D]
    mixed = torch.ops.aten._flash_attention_forward.default(
        q,
        k,
        v,
        layout.offsets,
        layout.offsets,
        layout.longest,
        layout.longest,
        dropout_p=0.0,
        is_causal=window is None,
        return_debug_mask=False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )[0]
    mixed = mixed.unflatten(0, (queries.shape[0], -1)).transpose(1, 2)
    return mixed if width == values.shape[-1] else mixed[..., :width]


def _as_wide(values: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Values with zeros at their end: those of latent attention are narrower than its queries and keys."""
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
    """One query a row: heads that share keys become the queries of one head, which reads its keys once.

    Kernels that take a mask know no grouped heads on CUDA, so this also keeps the fast ones in reach.
    """
    batch, heads, _, size = queries.shape
    # contiguous: the kernels read transposed queries at a third of the speed
    grouped = queries.reshape(batch, keys.shape[1], -1, size).contiguous()
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return mixed.reshape(batch, heads, 1, -1)


def _spelled_out(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention step by step, for what the fused kernels cannot do; the softmax in float32 or wider."""
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # new lengths a batch: each would be a new graph
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
    """Documents one after another: on a CPU, less work than a masked square over the whole row."""
    assert layout.documents is not None
    plain = Layout()
    rows = []
    for row, lengths in enumerate(layout.documents):
        q, k, v = (tensor[row : row + 1].split(lengths, dim=2) for tensor in (queries, keys, values))
        if layout.above is not None:
            q, k, v = (_with_above(parts, layout.above) for parts in (q, k, v))
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
        if layout.above is not None:
            outputs = [each[:, :, -length:] for each, length in zip(outputs, lengths, strict=True)]
        rows.append(torch.cat(outputs, dim=2))
    return torch.cat(rows)


def _with_above(parts: Sequence[torch.Tensor], above: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    """Pieces, with what is above them in front; queries, too: a causal square needs no mask in memory."""
    return tuple(
        torch.cat([*(parts[other] for other in others), part], dim=2) if others else part
        for part, others in zip(parts, above, strict=True)
    )


def describe_backend(device: torch.device) -> str:
    """Which attention this device runs, and why."""
    if not chosen_paths().attention:
        return "SDPA by an explicit mask (the reference path: plain torch)"
    if device.type == "cpu":
        return "SDPA, one packed document at a time; a prefix that documents share is computed once"
    if device.type == "cuda":
        return "SDPA; packed documents by varlen attention in 16 bits, else by a document mask"
    return "SDPA; packed documents by a document mask"
