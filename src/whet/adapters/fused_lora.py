"""The hot path of LoRA: base and low-rank matmuls of layers that read the same input, fused."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from whet.ops.kernels.custom_op import register_operation
from whet.ops.kernels.lora_swiglu import gated_gradients, gated_output
from whet.ops.linear import linear


class QuantizedLayer(Protocol):
    """A base layer that dequantizes its weight on each access."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in] in the compute dtype."""


class Operands(NamedTuple):
    """The operands of one layer's y = x W' + bias + scale * x A' B'."""

    weight: torch.Tensor | QuantizedLayer  # [out, in]
    bias: torch.Tensor | None
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scale: float

    def dense_weight(self) -> torch.Tensor:
        """Return the weight, dequantized if it is quantized."""
        return self.weight if isinstance(self.weight, torch.Tensor) else self.weight.weight


def fused_lora_outputs(
    x: torch.Tensor, layers: Sequence[Operands], update_input: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of several layers for one input, with gradients for x and every A and B.

    A reads `update_input`, which is x after dropout, or x itself if it is None.
    """
    scales, bases, tensors = _flatten_operands(layers)
    # compiled code relies on the output strides, so outputs must not be transposed in memory
    contiguous = torch.is_grad_enabled() or torch.compiler.is_compiling()
    flat_update_input = None if update_input is None else update_input.reshape(-1, update_input.shape[-1])
    outputs = _LoRAMatmuls.apply(
        x.reshape(-1, x.shape[-1]), flat_update_input, scales, bases, contiguous, *tensors
    )
    # transformers models take views that an output transposed in memory does not allow, and modify outputs
    # in place, which is not allowed for views created in an autograd function
    return tuple(_restore_shape(output, x) for output in outputs)


def fused_lora_swiglu(x: torch.Tensor, gate: Operands, up: Operands, down: Operands) -> torch.Tensor:
    """Return down(silu(gate(x)) * up(x)), if `whet.ops.kernels.lora_swiglu.is_supported` allows it."""
    scales, bases, tensors = _flatten_operands((gate, up, down))
    return _restore_shape(_GatedLoRA.apply(x.reshape(-1, x.shape[-1]), scales, bases, *tensors), x)


def _restore_shape(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return output.contiguous().view(*x.shape[:-1], output.shape[-1])


class PreparedLayers:
    """Layers that read the same input, prepared for inference with constant weights.

    Everything that does not depend on the input is computed once. In decoding steps it would take most of
    the time.
    """

    def __init__(self, layers: Sequence[Operands]) -> None:
        self.layers = layers
        weights = [layer.dense_weight() for layer in layers]
        self.num_leading = _num_leading_columns(weights[0])
        # an identity matrix copies the leading columns of x exactly
        identity = torch.eye(
            self.num_leading, layers[0].a.shape[1], dtype=weights[0].dtype, device=weights[0].device
        )
        blocks = [
            block for layer in layers for block in (identity, (layer.a * layer.scale).to(identity.dtype))
        ]
        self.a = torch.cat(blocks)
        self.widths = [self.num_leading + layer.a.shape[0] for layer in layers]
        self.b = [
            _prepend_weight_columns(weight, layer.b, self.num_leading)
            for weight, layer in zip(weights, layers, strict=True)
        ]

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of the layers for x."""
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(self.a.dtype)
            lows = (flat @ self.a.T).split(self.widths, dim=1)
            outputs = []
            for layer, low, b in zip(self.layers, lows, self.b, strict=True):
                y = lora_output(
                    flat, layer.dense_weight(), layer.bias, low, b, self.num_leading, contiguous=False
                )
                outputs.append(_restore_shape(y, x))
        return outputs


def _flatten_operands(
    layers: Sequence[Operands],
) -> tuple[tuple[float, ...], tuple[QuantizedLayer | None, ...], list[torch.Tensor | None]]:
    """Return scales, quantized layers, and four tensors per layer, which autograd has to see."""
    bases: list[QuantizedLayer | None] = []
    tensors: list[torch.Tensor | None] = []
    for layer in layers:
        weight, base = (
            (layer.weight, None) if isinstance(layer.weight, torch.Tensor) else (None, layer.weight)
        )
        bases.append(base)
        tensors += weight, layer.bias, layer.a, layer.b
    return tuple(layer.scale for layer in layers), tuple(bases), tensors


class _LoRAMatmuls(torch.autograd.Function):
    """The forward passes of several layers as one autograd node.

    Nothing is saved for the frozen weights, and sums are accumulated in place. A quantized weight is
    dequantized again in the backward pass, because saving it would need the full memory.
    """

    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        x: torch.Tensor,
        update_input: torch.Tensor | None,
        scales: tuple[float, ...],
        bases: tuple[QuantizedLayer | None, ...],
        contiguous: bool,
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        with torch.autocast(x.device.type, enabled=False):
            outputs, a_input, low = _layer_outputs(x, update_input, scales, bases, contiguous, tensors)
        ctx.save_for_backward(a_input, low, *tensors)
        ctx.scales, ctx.bases, ctx.dtype = scales, bases, x.dtype
        ctx.has_update_input = update_input is not None
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        a_input, low, *tensors = ctx.saved_tensors
        a_parts, b_parts = tensors[2::4], tensors[3::4]
        grad_x = grad_update_input = None
        with torch.autocast(a_input.device.type, enabled=False):
            grad_low = _low_gradient(grads, b_parts)
            grads_a = _a_gradients(grad_low, a_input, a_parts, ctx.scales)
            a = _concat_scaled(a_parts, ctx.scales, a_input.dtype)
            if ctx.needs_input_grad[0]:
                weights = [_dense_weight(*both) for both in zip(tensors[0::4], ctx.bases, strict=True)]
                grad = (
                    grads[0] @ weights[0]
                    if ctx.has_update_input
                    else lora_input_gradient(grad_low, a, list(grads), weights)
                )
                grad_x = grad.to(ctx.dtype)
            if ctx.has_update_input and ctx.needs_input_grad[1]:
                grad_update_input = (grad_low @ a).to(ctx.dtype)
            lows = low.split([b.shape[1] for b in b_parts], 1)
            grads_b = [
                _b_gradient(grad, layer_low).to(b.dtype)
                for grad, layer_low, b in zip(grads, lows, b_parts, strict=True)
            ]
        tensor_grads = [g for pair in zip(grads_a, grads_b, strict=True) for g in (None, None, *pair)]
        return grad_x, grad_update_input, None, None, None, *tensor_grads


class _GatedLoRA(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) as one autograd node. It saves only two tensors as wide as the gate."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        x: torch.Tensor,
        scales: tuple[float, ...],
        bases: tuple[QuantizedLayer | None, ...],
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        a_gate, b_gate, a_up, b_up = (t for k in (2, 6) for t in tensors[k : k + 2] if t is not None)
        with torch.autocast(x.device.type, enabled=False):
            weight = _dense_weight(tensors[0], bases[0])
            flat = x.to(weight.dtype)
            gate = F.linear(flat, weight, tensors[1])
            up = F.linear(flat, _dense_weight(tensors[4], bases[1]), tensors[5])
            low = flat @ _concat_scaled((a_gate, a_up), scales[:2], flat.dtype).T
            y = gated_output(gate, up, low, b_gate.to(flat.dtype), b_up.to(flat.dtype))
            [output], _, low_down = _layer_outputs(y, None, scales[2:], bases[2:], True, tensors[8:])
        ctx.save_for_backward(flat, gate, up, low, low_down, *tensors)
        ctx.scales, ctx.bases, ctx.dtype = scales, bases, x.dtype
        return output

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        flat, gate, up, low, low_down, *tensors = ctx.saved_tensors
        a_gate, a_up, a_down = tensors[2::4]
        b_gate, b_up, b_down = tensors[3::4]
        grad_x = None
        with torch.autocast(flat.device.type, enabled=False):
            grad_low = _low_gradient([upstream], [b_down])
            a = _concat_scaled([a_down], ctx.scales[2:], flat.dtype)
            grad_b_down = _b_gradient(upstream, low_down).to(b_down.dtype)
            grad_y = lora_input_gradient(grad_low, a, [upstream], [_dense_weight(tensors[8], ctx.bases[2])])
            *grads, sums = gated_gradients(
                gate, up, grad_y, low, b_gate.to(flat.dtype), b_up.to(flat.dtype), grad_low
            )
            grad_b_gate, grad_b_up, grad_a_down_t = sums.split([len(a_gate), len(a_up), len(a_down)], dim=1)
            grad_a_down = (grad_a_down_t.T * ctx.scales[2]).to(a_down.dtype)
            grad_low = _low_gradient(grads, [b_gate, b_up])
            grad_a_gate, grad_a_up = _a_gradients(grad_low, flat, [a_gate, a_up], ctx.scales[:2])
            if ctx.needs_input_grad[0]:
                a = _concat_scaled([a_gate, a_up], ctx.scales[:2], flat.dtype)
                weights = [_dense_weight(tensors[0], ctx.bases[0]), _dense_weight(tensors[4], ctx.bases[1])]
                grad_x = lora_input_gradient(grad_low, a, list(grads), weights).to(ctx.dtype)
        return (
            *(grad_x, None, None),
            *(None, None, grad_a_gate, grad_b_gate.to(b_gate.dtype)),
            *(None, None, grad_a_up, grad_b_up.to(b_up.dtype)),
            *(None, None, grad_a_down, grad_b_down),
        )


def _layer_outputs(
    x: torch.Tensor,
    update_input: torch.Tensor | None,
    scales: Sequence[float],
    bases: Sequence[QuantizedLayer | None],
    contiguous: bool,
    tensors: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the layers' outputs, the input of their A, and its product with every A [tokens, all ranks]."""
    biases = tensors[1::4]
    a_parts, b_parts = ([t for t in tensors[k::4] if t is not None] for k in (2, 3))  # none of them is None
    outputs = []
    ranks = [a.shape[0] for a in a_parts]
    for index, b_part in enumerate(b_parts):
        weight = _dense_weight(tensors[4 * index], bases[index])
        if index == 0:
            flat = x.to(weight.dtype)
            a_input = flat if update_input is None else update_input.to(flat.dtype)
            low = a_input @ _concat_scaled(a_parts, scales, flat.dtype).T
            lows = (low,) if len(ranks) == 1 else low.split(ranks, dim=1)
            if num_leading := _num_leading_columns(weight):
                lows = _prepend_columns(flat[:, :num_leading], lows)
        b = _prepend_weight_columns(weight, b_part, num_leading)
        outputs.append(lora_output(flat, weight, biases[index], lows[index], b, num_leading, contiguous))
    return outputs, a_input, low


def _low_gradient(grads: Sequence[torch.Tensor], b_parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of x A' for all layers [tokens, all ranks]."""
    parts = [grad @ b.to(grad.dtype) for grad, b in zip(grads, b_parts, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _a_gradients(
    grad_low: torch.Tensor, a_input: torch.Tensor, a_parts: Sequence[torch.Tensor], scales: Sequence[float]
) -> Sequence[torch.Tensor]:
    ranks = [len(a) for a in a_parts]
    return _scale_rows((grad_low.T @ a_input).to(a_parts[0].dtype), ranks, scales).split(ranks)


def _dense_weight(weight: torch.Tensor | None, base: QuantizedLayer | None) -> torch.Tensor:
    if weight is not None:
        return weight
    assert base is not None
    return base.weight


def _num_leading_columns(weight: torch.Tensor) -> int:
    """Return how many leading columns of x W' are computed in the same matmul as x A' B'.

    In 16-bit dtypes, the part of an update that is smaller than the last digit of x W' is lost if x W' is
    rounded before the update is added. When a matmul accumulates onto an existing result, a CPU rounds only
    the sum, but cuBLAS rounds the product too. The sum of the update and a few columns of x W' is smaller,
    so its last digit is finer.
    """
    return 0 if weight.is_cpu or weight.dtype.itemsize > 2 else min(64, weight.shape[1])


def _prepend_weight_columns(weight: torch.Tensor, b: torch.Tensor, num_leading: int) -> torch.Tensor:
    """Return the leading columns of W followed by B [out, num_leading + rank]."""
    b = b.to(weight.dtype)
    return torch.cat((weight[:, :num_leading], b), dim=1) if num_leading else b


def _prepend_columns(columns: torch.Tensor, lows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return each of `lows` with the same columns prepended, in one copy."""
    pieces = [piece for low in lows for piece in (columns, low)]
    return torch.cat(pieces, dim=1).split([columns.shape[1] + low.shape[1] for low in lows], dim=1)


def _b_gradient(grad: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return grad' low [out, rank]. With the narrow factor first, a CPU needs a third of the time."""
    return (low.T @ grad).T.contiguous() if grad.device.type == "cpu" else grad.T @ low


def _concat_scaled(
    parts: Sequence[torch.Tensor], scales: Sequence[float], dtype: torch.dtype
) -> torch.Tensor:
    """Return scale * A of all layers, concatenated so that they read their input once."""
    concatenated = parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
    return _scale_rows(concatenated, [len(part) for part in parts], scales).to(dtype)


def _scale_rows(concatenated: torch.Tensor, ranks: Sequence[int], scales: Sequence[float]) -> torch.Tensor:
    """Multiply each layer's rows by its scale. Usually all scales are equal."""
    if len(set(scales)) == 1:
        return concatenated * scales[0]
    return torch.cat([part * scale for part, scale in zip(concatenated.split(ranks), scales, strict=True)])


# These are custom operations, because the compiler would turn an in-place addmm_ into one that copies its
# accumulator first, which costs a twentieth of a step on a GPU
@register_operation(lambda flat, weight, *_: flat.new_empty(flat.shape[0], weight.shape[0]))
def lora_output(
    flat: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    low: torch.Tensor,
    b: torch.Tensor,
    num_leading: int,
    contiguous: bool,
) -> torch.Tensor:
    """Return x W' + bias + low B', with one matmul accumulated onto the other in place.

    `low` and B start with the leading columns of x and W. The small matmul comes first in 16-bit dtypes, and
    always on a GPU, because in the other order it would read and write all of the output.
    """
    if not num_leading and flat.is_cpu and flat.dtype.itemsize > 2:
        return (F.linear if contiguous else linear)(flat, weight, bias).addmm_(low, b.T)
    y = F.linear(low, b, bias)
    if num_leading == flat.shape[1]:
        return y
    return y.addmm_(flat[:, num_leading:], weight[:, num_leading:].T)


@register_operation(lambda grad_low, a, *_: grad_low.new_empty(grad_low.shape[0], a.shape[1]))
def lora_input_gradient(
    grad_low: torch.Tensor, a: torch.Tensor, grads: list[torch.Tensor], weights: list[torch.Tensor]
) -> torch.Tensor:
    """Return the gradient of the layers' shared input, accumulated in place."""
    total = grad_low @ a
    for grad, weight in zip(grads, weights, strict=True):
        total.addmm_(grad, weight)
    return total
