"""FLOPs of a training step, counted from the model's layers and the gradients that training needs."""

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
    """FLOPs of the matmuls of a step per token of a micro-batch; a multiply-add counts as two."""

    forward: float = 0.0
    input_gradients: float = 0.0
    weight_gradients: float = 0.0
    recomputed: float = 0.0  # forward passes repeated in the backward pass
    others: float = 0.0  # forward passes of a reference model or of teachers

    @property
    def model(self) -> float:
        """FLOPs that the computation needs, without recomputation; MFU is based on them."""
        return self.forward + self.input_gradients + self.weight_gradients + self.others

    @property
    def computed(self) -> float:
        """FLOPs that the device executes."""
        return self.model + self.recomputed

    def __add__(self, other: "StepFlops") -> "StepFlops":
        return StepFlops(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> "StepFlops":
        return StepFlops(*(value * factor for value in vars(self).values()))


def training_flops_per_token(
    model: nn.Module, objective: Objective | None = None, *, length: int, supervised: float = 1.0
) -> float:
    """Return the FLOPs that training takes per token, without recomputation, as MFU counts them.

    Args:
        model: The model. If it is not a language model, each weight counts two FLOPs in the forward pass and
            four in the backward pass.
        objective: The objective, which may add heads and frozen models.
        length: The length of the documents in tokens.
        supervised: The share of positions that the output head is applied to.
    """
    return step_flops(model, objective, length=length, supervised=supervised).model


def step_flops(
    model: nn.Module, objective: Objective | None = None, *, length: int, supervised: float = 1.0
) -> StepFlops:
    """Return the FLOPs of training per token by kind; see `training_flops_per_token`."""
    if not isinstance(model, LanguageModel):
        weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        return StepFlops(2.0 * weights, 2.0 * weights, 2.0 * weights)
    if objective is not None and objective.parts:
        parts = [
            step_flops(model, part, length=length, supervised=supervised) for part in objective.parts.values()
        ]
        # each part has one batch, assumed to be of equal size
        return sum(parts, StepFlops()) * (1 / len(parts))
    flops, needs_gradient = _model_blocks(model, length, needs_gradient=_embedding_is_trained(model))
    if objective is None:
        return flops + _head(model, needs_gradient=needs_gradient, recomputed=False) * supervised
    if objective.reads_lm_head:
        flops += (
            _head(model, needs_gradient=needs_gradient, recomputed=objective.recomputes_logits) * supervised
        )
    if objective.prediction_heads is not None:
        flops += _prediction_heads(model, objective.prediction_heads, length=length, supervised=supervised)
    frozen = sum(
        forward_flops_per_token(frozen_model, length=length, supervised=supervised, adapters=adapters)
        for frozen_model, adapters in objective.frozen_forwards(model)
    )
    return flops + StepFlops(others=frozen)


def forward_flops_per_token(
    model: LanguageModel, *, length: int, supervised: float = 1.0, adapters: bool = True
) -> float:
    """Return the FLOPs of a forward pass per token, with or without the adapters."""
    blocks, _ = _model_blocks(model, length, needs_gradient=False, adapters=adapters)
    head = _head(model, needs_gradient=False, recomputed=False)
    return blocks.forward + supervised * head.forward


def _head(model: LanguageModel, *, needs_gradient: bool, recomputed: bool) -> StepFlops:
    """Return the FLOPs of the output head; `recomputed` if the backward pass computes the logits again."""
    weight = model.head().weight
    matmul = 2.0 * weight.numel()
    return StepFlops(
        forward=matmul,
        input_gradients=matmul if needs_gradient else 0.0,
        weight_gradients=matmul if weight.requires_grad else 0.0,
        recomputed=matmul if recomputed else 0.0,
    )


def _prediction_heads(
    model: LanguageModel, heads: "PredictionHeads", *, length: int, supervised: float
) -> StepFlops:
    scores = [score_flops(block.attention, length) / length for block in heads.spec.blocks]
    top_k = max((mixture.top_k for mixture in heads.spec.expert_specs), default=0)
    blocks, _ = _block_list(
        list(heads.layers), scores, needs_gradient=True, top_k=top_k, recompute=model.grad_checkpoint
    )
    return blocks + _head(model, needs_gradient=True, recomputed=False) * (supervised * len(heads))


def _embedding_is_trained(model: LanguageModel) -> bool:
    inside = {id(p) for block in model.blocks() for p in block.parameters()}
    head = model.head().weight
    outside = [p for p in model.parameters() if id(p) not in inside and p.requires_grad and p.dim() > 1]
    tied = any(isinstance(m, nn.Embedding) and m.weight is head for m in model.modules())
    return any(tied or p is not head for p in outside)


def _model_blocks(
    model: LanguageModel, length: int, *, needs_gradient: bool, adapters: bool = True
) -> tuple[StepFlops, bool]:
    blocks = list(model.blocks())
    if isinstance(model, Decoder):
        scores = [score_flops(block.attention, length) / length for block in model.spec.blocks]
        top_k = max((mixture.top_k for mixture in model.spec.expert_specs), default=0)
    else:
        config = cast("Bridge", model).model.config.get_text_config(decoder=True)
        top_k = getattr(config, "num_experts_per_tok", 0)
        scores = [_bridge_scores(config, length)] * len(blocks)
    return _block_list(
        blocks,
        scores,
        needs_gradient=needs_gradient,
        top_k=top_k,
        adapters=adapters,
        recompute=model.grad_checkpoint,
    )


def _bridge_scores(config: Any, length: int) -> float:  # Any: a transformers config
    """Return the FLOPs of attention scores per token, as if every layer had full causal attention."""
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return 2.0 * heads * (length + 1) * size


def _block_list(
    blocks: list[nn.Module],
    scores: list[float],
    *,
    needs_gradient: bool,
    top_k: int,
    recompute: bool,
    adapters: bool = True,
) -> tuple[StepFlops, bool]:
    """Return the FLOPs of layers, and whether the input of the next layer needs a gradient.

    A layer's input needs one only if an earlier layer or the embedding is trained.
    """
    total = StepFlops()
    for block, pairs in zip(blocks, scores, strict=True):
        before, last = total.forward, (0.0, 0.0, 0.0)
        parts = [list(_matmuls(child, top_k=top_k, adapters=adapters)) for child in block.children()]
        for index, matmuls in enumerate([part for part in parts if part]):
            *inputs, last = matmuls
            # all but the last, such as q, k and v or gate and up, read the input of the part
            total = sum((_flops(matmul, needs_gradient=needs_gradient) for matmul in inputs), total)
            needs_gradient = needs_gradient or any(trained for _, _, trained in inputs)
            if index == 0:
                total += StepFlops(forward=pairs, input_gradients=2 * pairs if needs_gradient else 0.0)
            total += _flops(last, needs_gradient=needs_gradient)
            needs_gradient = needs_gradient or last[2] > 0
        if recompute and needs_gradient:
            # recomputation stops when all needed activations exist, before the last matmul of a plain layer
            skipped = last[0] if last[0] == last[2] else 0.0
            total += StepFlops(recomputed=total.forward - before - skipped)
    return total, needs_gradient


Matmul = tuple[float, float, float]  # FLOPs of the forward pass, the input gradient, the weight gradient


def _flops(matmul: Matmul, *, needs_gradient: bool) -> StepFlops:
    forward, input_gradient, weight_gradient = matmul
    return StepFlops(forward, input_gradient if needs_gradient else 0.0, weight_gradient)


def _matmuls(module: nn.Module, *, top_k: int, adapters: bool) -> Iterator[Matmul]:
    """Yield the matmuls of a module in the order of its children, with `top_k` experts per token."""
    match module:
        case nn.Linear() | NF4Linear():
            yield _plain(module.in_features * module.out_features, trained=_is_trained(module))
        case LoRALinear():
            yield _adapted(module) if adapters else _plain(module.in_features * module.out_features)
        case LoRAExperts():
            yield from _matmuls(module.base, top_k=top_k, adapters=adapters)
            for name, settings in module.settings.items() if adapters else ():
                experts, inputs, outputs = expert_shape(module.base, name)
                yield _plain(settings.rank * (inputs + outputs) * min(top_k or 1, experts), trained=True)
        case ModuleToSave():
            yield from _matmuls(module.trained if adapters else module.base, top_k=top_k, adapters=adapters)
        case nn.ModuleList():  # experts of a transformers model, one module each
            matmuls = [
                matmul for child in module for matmul in _matmuls(child, top_k=top_k, adapters=adapters)
            ]
            share = min(top_k, len(module)) / len(module) if top_k else 1.0
            yield from ((a * share, b * share, c * share) for a, b, c in matmuls)
        case _:
            for weight in module.parameters(recurse=False):
                if weight.dim() == 3 and min(weight.shape) > 1:  # experts in one tensor
                    yield _plain(top_k * weight[0].numel(), trained=weight.requires_grad)
            for child in module.children():
                yield from _matmuls(child, top_k=top_k, adapters=adapters)


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters() if p.dim() > 1)


def _plain(weights: float, *, trained: bool = False) -> Matmul:
    return 2.0 * weights, 2.0 * weights, 2.0 * weights if trained else 0.0


def _adapted(layer: LoRALinear) -> Matmul:
    rank, inputs, outputs = layer.settings.rank, layer.in_features, layer.out_features
    # A's gradient needs the gradient of the low-rank activations, even if the input needs no gradient
    weight_gradient = 2 * rank * (inputs + outputs) + 2 * rank * outputs
    input_gradient = 2 * inputs * outputs + 2 * rank * inputs
    return 2.0 * (inputs * outputs + rank * (inputs + outputs)), float(input_gradient), float(weight_gradient)
