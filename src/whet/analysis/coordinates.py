"""The numbers inside a decoder whose size must not depend on its width: what a coordinate check looks at."""

import torch
from torch import nn

from whet.models.attention import SelfAttention
from whet.models.decoder import Decoder
from whet.models.rope import Rotation, rotate


@torch.no_grad()
def coordinates(model: Decoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of tokens [B, T]: embedding, scores of attention and output of each layer, logits."""
    found = {"embedding": model.embed(tokens)}
    hooks = []
    for number, block in enumerate(model.layers, start=1):

        def keep_scores(module: nn.Module, arguments: tuple[object, ...], number: int = number) -> None:
            assert isinstance(module, SelfAttention)
            found[f"attention {number}"] = _scores(module, *arguments[:2])  # type: ignore[arg-type]  # as forward has them

        def keep_output(_: nn.Module, __: object, output: torch.Tensor, number: int = number) -> None:
            found[f"block {number}"] = output

        attention = getattr(block, "self_attn", None)
        if attention is not None:
            hooks.append(attention.register_forward_pre_hook(keep_scores))
        hooks.append(block.register_forward_hook(keep_output))
    was_training = model.training
    try:
        found["logits"] = model.eval()(tokens)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


def _scores(attention: SelfAttention, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """What goes into the softmax, of the pairs of positions that see each other."""
    queries, keys, _ = attention.project(x)
    if rotation is not None:
        queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
    spec = attention.spec
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    scores = queries @ keys.repeat_interleave(spec.heads // spec.kv_heads, dim=1).mT * scale
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return scores[..., visible]


def scale_of(x: torch.Tensor) -> float:
    """The root mean square of a tensor's numbers."""
    return float(x.double().square().mean().sqrt())
