"""Who looks at whom: the attention weights of every layer and head."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from whet.errors import DataError, ModelError
from whet.models.attention import LatentAttention, SelfAttention
from whet.models.language_model import LanguageModel, evaluating, uncompiled
from whet.models.transformers_bridge import Bridge
from whet.ops.attention import Layout

Visit = Callable[[int, torch.Tensor], None]


def attention_maps(model: LanguageModel, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """The attention weights [B, heads, queries, keys] on tokens [B, T], by the number of their layer.

    Layers without attention have none. Each row sums to 1; what a query does not see has weight 0.
    """
    found: dict[int, torch.Tensor] = {}
    visit_attention(model, tokens, found.__setitem__)
    return found


def visit_attention(model: LanguageModel, tokens: torch.Tensor, visit: Visit) -> None:
    """Hand the weights of each layer to `visit` as soon as they are computed: only one map is ever held."""
    if tokens.ndim != 2 or not tokens.numel():
        raise DataError(f"attention maps are of rows of tokens [B, T], and these are {list(tokens.shape)}")
    with evaluating(model), uncompiled(model):
        if isinstance(model, Bridge):
            for layer, weights in model.attentions(tokens).items():
                visit(layer, weights)
            return
        with _watched(model, visit):
            model.hidden(tokens)


@contextlib.contextmanager
def _watched(model: LanguageModel, visit: Visit) -> Iterator[None]:
    """Have each attention of a native model tell its weights."""
    found = [(layer, getattr(block, "self_attn", None)) for layer, block in enumerate(model.blocks())]
    attentions = [(layer, a) for layer, a in found if isinstance(a, SelfAttention | LatentAttention)]
    if not attentions:
        raise ModelError("this model has no attention that whet can look into")
    with contextlib.ExitStack() as held:
        for layer, attention in attentions:
            attention.__dict__["mix"] = _telling(attention, layer, visit)
            held.callback(attention.__dict__.pop, "mix")
        yield


def _telling(
    attention: SelfAttention | LatentAttention, layer: int, visit: Visit
) -> Callable[..., torch.Tensor]:
    mix = attention.mix

    def telling(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: Layout,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        # the weighted mean of unit vectors is the weights: by the same code, with every mask and cap in it
        count = keys.shape[2]
        units = torch.eye(count, dtype=values.dtype, device=values.device).expand(*values.shape[:2], -1, -1)
        visit(layer, mix(queries, keys, units, layout, slopes))
        return mix(queries, keys, values, layout, slopes)

    return telling
