"""One attention function and the one description of which positions see which."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Layout:
    """Which positions may see which. Built once a forward, used by every layer.

    Three kinds: plain causal rows (right padding needs no mask: nothing real ever looks ahead), packed rows
    (`documents`: the lengths of the documents in each row, padding counted as a last document), and rows
    that continue a key/value cache (`visible`: which cached slots hold real tokens).
    """

    documents: tuple[tuple[int, ...], ...] | None = None
    visible: torch.Tensor | None = None  # [B, keys], bool
    mask: torch.Tensor | None = None  # [B or 1, 1, queries, keys], bool; None: plain causal or all visible
    causal: bool = True

    @staticmethod
    def packed(documents: Sequence[Sequence[int]], *, device: torch.device) -> "Layout":
        """Rows of whole documents, each of which sees only itself."""
        lengths = tuple(tuple(row) for row in documents)
        if device.type == "cpu":
            return Layout(documents=lengths)
        # one masked call beats many small kernels on an accelerator
        segments = torch.stack(
            [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
        ).to(device, non_blocking=True)
        positions = torch.arange(segments.shape[1], device=device)
        same = segments[:, None, :, None] == segments[:, None, None, :]
        return Layout(documents=lengths, mask=same & (positions[:, None] >= positions), causal=False)

    @staticmethod
    def cached(visible: torch.Tensor, *, new_tokens: int, padded: bool) -> "Layout":
        """The last `new_tokens` of `visible` [B, keys] attend to the real slots up to themselves."""
        keys = visible.shape[1]
        if not padded and new_tokens == keys:
            return Layout(visible=visible)
        if not padded and new_tokens == 1:
            return Layout(visible=visible, causal=False)
        slots = torch.arange(keys, device=visible.device)
        queries = slots[keys - new_tokens :, None]
        # a padding slot sees itself: a row of softmax over nothing would be NaN
        mask = (slots <= queries) & (visible[:, None, None, :] | (slots == queries))
        return Layout(visible=visible, mask=mask, causal=False)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Scaled dot-product attention of [B, heads, queries, D] over [B, kv_heads, keys, D]."""
    grouped = queries.shape[1] != keys.shape[1]
    if layout.mask is None and layout.documents is not None:
        return _attend_by_document(queries, keys, values, layout.documents)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=layout.mask, is_causal=layout.causal, enable_gqa=grouped
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # new lengths a batch: each would be a new graph
def _attend_by_document(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    documents: tuple[tuple[int, ...], ...],
) -> torch.Tensor:
    """Documents one after another: on a CPU, less work than a masked square over the whole row."""
    grouped = queries.shape[1] != keys.shape[1]
    rows = []
    for row, lengths in enumerate(documents):
        q, k, v = (tensor[row : row + 1].split(lengths, dim=2) for tensor in (queries, keys, values))
        outputs = [
            F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=grouped)
            for part in zip(q, k, v, strict=True)
        ]
        rows.append(torch.cat(outputs, dim=2))
    return torch.cat(rows)


def describe_backend(device: torch.device) -> str:
    """Which attention this device runs, and why."""
    if device.type == "cpu":
        return "SDPA; packed documents one by one (a masked square does more work on a CPU)"
    return "SDPA; packed documents by a document mask"
