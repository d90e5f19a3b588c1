"""What a training step computes, counted on the model itself: only gradients that somebody asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from whet.adapters.layers.lora_experts import LoRAExperts, expert_shape
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.modules_to_save import ModuleToSave
from whet.adapters.nf4 import NF4Linear
from whet.models.costs import score_flops
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.objectives.objective import Objective

if TYPE_CHECKING:
    from whet.models.mtp import PredictionHeads
    from whet.models.transformers_bridge import Bridge


@dataclass(frozen=True)
class StepFlops:
    """FLOPs (two a multiply-add) of the matrix products of a step, for each token of a micro-batch."""

    forward: float = 0.0
    input_gradients: float = 0.0
    weight_gradients: float = 0.0
    recomputed: float = 0.0  # forwards made again in the backward pass
    others: float = 0.0  # forwards of a reference or of teachers

    @property
    def model(self) -> float:
        """What the mathematics asks for: what MFU counts."""
        return self.forward + self.input_gradients + self.weight_gradients + self.others

    @property
    def computed(self) -> float:
        """What the device does."""
        return self.model + self.recomputed

    def __add__(self, other: "StepFlops") -> "StepFlops":
        return StepFlops(
            *(own + more for own, more in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def __mul__(self, factor: float) -> "StepFlops":
        return StepFlops(*(own * factor for own in vars(self).values()))


def training_flops_per_token(
    model: nn.Module, objective: Objective | None = None, *, length: int, supervised: float = 1.0
) -> float:
    """FLOPs that training takes for each token, in documents of `length`: for MFU, so nothing twice.

    `supervised` is the share of positions that meet the output head. A model that is no language model takes
    two FLOPs a weight forward, and four back.
    """
    return step_flops(model, objective, length=length, supervised=supervised).model


def step_flops(
    model: nn.Module, objective: Objective | None = None, *, length: int, supervised: float = 1.0
) -> StepFlops:
    """The same by kind."""
    if not isinstance(model, LanguageModel):
        weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        return StepFlops(2.0 * weights, 2.0 * weights, 2.0 * weights)
    if objective is not None and objective.parts:
        parts = [
            step_flops(model, part, length=length, supervised=supervised) for part in objective.parts.values()
        ]
        return sum(parts, StepFlops()) * (1 / len(parts))  # a batch of each, taken to be as large
    flops, live = _all_blocks(model, length, live=_embedding_learns(model))
    if objective is None:
        return flops + _head(model, live=live, again=False) * supervised
    if objective.reads_lm_head:
        flops += _head(model, live=live, again=objective.recomputes_logits) * supervised
    if objective.prediction_heads is not None:
        flops += _prediction_heads(model, objective.prediction_heads, length=length, supervised=supervised)
    frozen = sum(
        forward_flops_per_token(other, length=length, supervised=supervised, adapters=adapters)
        for other, adapters in objective.frozen_forwards(model)
    )
    return flops + StepFlops(others=frozen)


def forward_flops_per_token(
    model: LanguageModel, *, length: int, supervised: float = 1.0, adapters: bool = True
) -> float:
    """One forward pass, with or without the adapters."""
    blocks, _ = _all_blocks(model, length, live=False, adapters=adapters)
    return blocks.forward + supervised * _head(model, live=False, again=False).forward


def _head(model: LanguageModel, *, live: bool, again: bool) -> StepFlops:
    """The output head; `again`: its logits are made a second time for their gradient."""
    weight = model.head().weight
    each = 2.0 * weight.numel()
    return StepFlops(
        forward=each,
        input_gradients=each if live else 0.0,
        weight_gradients=each if weight.requires_grad else 0.0,
        recomputed=each if again else 0.0,
    )


def _prediction_heads(
    model: LanguageModel, heads: "PredictionHeads", *, length: int, supervised: float
) -> StepFlops:
    scores = [score_flops(block.attention, length) / length for block in heads.spec.blocks]
    chosen = max((each.top_k for each in heads.spec.mixtures), default=0)
    blocks, _ = _many_blocks(
        list(heads.layers), scores, live=True, chosen=chosen, recompute=model.grad_checkpoint
    )
    return blocks + _head(model, live=True, again=False) * (supervised * len(heads))


def _embedding_learns(model: LanguageModel) -> bool:
    inside = {id(p) for block in model.blocks() for p in block.parameters()}
    head = model.head().weight
    outside = [p for p in model.parameters() if id(p) not in inside and p.requires_grad and p.dim() > 1]
    tied = any(isinstance(m, nn.Embedding) and m.weight is head for m in model.modules())
    return any(tied or p is not head for p in outside)


def _all_blocks(
    model: LanguageModel, length: int, *, live: bool, adapters: bool = True
) -> tuple[StepFlops, bool]:
    blocks = list(model.blocks())
    if isinstance(model, Decoder):
        scores = [score_flops(block.attention, length) / length for block in model.spec.blocks]
        chosen = max((each.top_k for each in model.spec.mixtures), default=0)
    else:
        config = cast("Bridge", model).model.config.get_text_config(decoder=True)
        chosen = getattr(config, "num_experts_per_tok", 0)
        scores = [_bridge_scores(config, length)] * len(blocks)
    return _many_blocks(
        blocks, scores, live=live, chosen=chosen, adapters=adapters, recompute=model.grad_checkpoint
    )


def _bridge_scores(config: Any, length: int) -> float:  # Any: a transformers config
    """As if every layer had attention over all that comes before."""
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return 2.0 * heads * (length + 1) * size


def _many_blocks(
    blocks: list[nn.Module],
    scores: list[float],
    *,
    live: bool,
    chosen: int,
    recompute: bool,
    adapters: bool = True,
) -> tuple[StepFlops, bool]:
    """Layer by layer; whether a gradient has to go back into a layer depends on those before it."""
    total = StepFlops()
    for block, pairs in zip(blocks, scores, strict=True):
        before, last = total.forward, (0.0, 0.0, 0.0)
        parts = [list(_products(child, chosen=chosen, adapters=adapters)) for child in block.children()]
        for place, products in enumerate([part for part in parts if part]):
            *readers, last = products
            # all but the last read what comes in, or nearly: q, k and v, gate and up
            total = sum((_product(each, live=live) for each in readers), total)
            live = live or any(trained for _, _, trained in readers)
            if place == 0:
                total += StepFlops(forward=pairs, input_gradients=2 * pairs if live else 0.0)
            total += _product(last, live=live)
            live = live or last[2] > 0
        if (
            recompute and live
        ):  # it ends with the last thing that is needed, which is no product of a plain layer
            kept = last[0] if last[0] == last[2] else 0.0
            total += StepFlops(recomputed=total.forward - before - kept)
    return total, live


Product = tuple[float, float, float]  # FLOPs forward, those of its input's gradient, those of its weights'


def _product(product: Product, *, live: bool) -> StepFlops:
    forward, back, trained = product
    return StepFlops(forward, back if live else 0.0, trained)


def _products(module: nn.Module, *, chosen: int, adapters: bool) -> Iterator[Product]:
    """The matrix products under a module, in the order in which it has them; `chosen` experts of each."""
    match module:
        case nn.Linear() | NF4Linear():
            yield _plain(module.in_features * module.out_features, trained=_learns(module))
        case LoRALinear():
            yield _adapted(module) if adapters else _plain(module.in_features * module.out_features)
        case LoRAExperts():
            yield from _products(module.base, chosen=chosen, adapters=adapters)
            for name, settings in module.settings.items() if adapters else ():
                experts, inputs, outputs = expert_shape(module.base, name)
                yield _plain(settings.rank * (inputs + outputs) * min(chosen or 1, experts), trained=True)
        case ModuleToSave():
            yield from _products(
                module.trained if adapters else module.base, chosen=chosen, adapters=adapters
            )
        case nn.ModuleList():  # experts of a class of transformers, each a module
            every = [each for child in module for each in _products(child, chosen=chosen, adapters=adapters)]
            share = min(chosen, len(module)) / len(module) if chosen else 1.0
            yield from ((a * share, b * share, c * share) for a, b, c in every)
        case _:
            for weight in module.parameters(recurse=False):
                if weight.dim() == 3 and min(weight.shape) > 1:  # experts, all in one tensor
                    yield _plain(chosen * weight[0].numel(), trained=weight.requires_grad)
            for child in module.children():
                yield from _products(child, chosen=chosen, adapters=adapters)


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters() if p.dim() > 1)


def _plain(weights: float, *, trained: bool = False) -> Product:
    return 2.0 * weights, 2.0 * weights, 2.0 * weights if trained else 0.0


def _adapted(layer: LoRALinear) -> Product:
    rank, inputs, outputs = layer.settings.rank, layer.in_features, layer.out_features
    # the gradient at the low-rank values is for A, whatever becomes of that of the input
    weights = 2 * rank * (inputs + outputs) + 2 * rank * outputs
    back = 2 * inputs * outputs + 2 * rank * inputs
    return 2.0 * (inputs * outputs + rank * (inputs + outputs)), float(back), float(weights)
