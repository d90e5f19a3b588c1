"""Attention weights of every layer and head."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from whet.errors import DataError, ModelError
from whet.models.attention import LatentAttention, SelfAttention
from whet.models.language_model import LanguageModel, eager_layers, eval_mode
from whet.models.transformers_bridge import Bridge
from whet.ops.attention import Layout

Visit = Callable[[int, torch.Tensor], None]


def attention_maps(model: LanguageModel, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the attention weights of a model, by layer index.

    Each row sums to 1, and masked keys have weight 0. Layers without attention are left out.

    Args:
        model: The model.
        tokens: Token ids [B, T].

    Returns:
        Weights [B, heads, queries, keys] of each layer.
    """
    maps: dict[int, torch.Tensor] = {}
    visit_attention(model, tokens, maps.__setitem__)
    return maps


def visit_attention(model: LanguageModel, tokens: torch.Tensor, visit: Visit) -> None:
    """Call `visit` with the weights of each layer in turn, so that only one map is in memory."""
    if tokens.ndim != 2 or not tokens.numel():
        raise DataError(f"attention maps need tokens of shape [B, T], not {list(tokens.shape)}")
    with eval_mode(model), eager_layers(model):
        if isinstance(model, Bridge):
            for layer, weights in model.attentions(tokens).items():
                visit(layer, weights)
            return
        with _visiting(model, visit):
            model.hidden(tokens)


@contextlib.contextmanager
def _visiting(model: LanguageModel, visit: Visit) -> Iterator[None]:
    """Make each attention layer of a native model call `visit` with its weights."""
    modules = [(layer, getattr(block, "self_attn", None)) for layer, block in enumerate(model.blocks())]
    attentions = [(layer, a) for layer, a in modules if isinstance(a, SelfAttention | LatentAttention)]
    if not attentions:
        raise ModelError("this model has no attention layers that whet can inspect")
    with contextlib.ExitStack() as stack:
        for layer, attention in attentions:
            attention.__dict__["compute_attention"] = _with_visit(attention, layer, visit)
            stack.callback(attention.__dict__.pop, "compute_attention")
        yield


def _with_visit(
    attention: SelfAttention | LatentAttention, layer: int, visit: Visit
) -> Callable[..., torch.Tensor]:
    mix = attention.compute_attention

    def mix_and_visit(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: Layout,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        # With unit vectors as values, the same code returns the weights, with all masks and caps.
        count = keys.shape[2]
        units = torch.eye(count, dtype=values.dtype, device=values.device).expand(*values.shape[:2], -1, -1)
        visit(layer, mix(queries, keys, units, layout, slopes))
        return mix(queries, keys, values, layout, slopes)

    return mix_and_visit
