"""The hot path of adapters: base products and low-rank updates of layers that read one input."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from whet.ops.kernels.custom_op import operation
from whet.ops.kernels.lora_swiglu import gated_gradients, gated_output
from whet.ops.linear import linear


class Quantised(Protocol):
    """A base layer that makes its weight when it is needed."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in], in the dtype it is computed with."""


class Operands(NamedTuple):
    """What one layer's y = x W' + bias + scale * x A' B' is made of."""

    weight: torch.Tensor | Quantised  # [out, in]
    bias: torch.Tensor | None
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scale: float

    def made(self) -> torch.Tensor:
        """The weight, from its codes where it is quantised."""
        return self.weight if isinstance(self.weight, torch.Tensor) else self.weight.weight


def low_rank_products(
    x: torch.Tensor, layers: Sequence[Operands], dropped: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The outputs of several layers on one input; gradients go to x and to every A and B.

    `dropped` is what dropout left of x, for A to read.
    """
    scales, bases, tensors = _taken_apart(layers)
    # compiled code is told that results are not transposed in memory
    plain = torch.is_grad_enabled() or torch.compiler.is_compiling()
    rows = None if dropped is None else dropped.reshape(-1, dropped.shape[-1])
    outputs = _Products.apply(x.reshape(-1, x.shape[-1]), rows, scales, bases, plain, *tensors)
    # classes of transformers take views that a product transposed in memory does not allow, and change
    # outputs in place, which may not be views made in an autograd function
    return tuple(_shaped(output, x) for output in outputs)


def low_rank_gated(x: torch.Tensor, gate: Operands, up: Operands, down: Operands) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)), where `whet.ops.kernels.lora_swiglu.suits` says so."""
    scales, bases, tensors = _taken_apart((gate, up, down))
    return _shaped(_Gated.apply(x.reshape(-1, x.shape[-1]), scales, bases, *tensors), x)


def _shaped(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return output.contiguous().view(*x.shape[:-1], output.shape[-1])


class Settled:
    """Layers that read one input, while their weights stay as they are, without gradients.

    What does not depend on the input is made once; in the steps of decoding it would take most of the time.
    """

    def __init__(self, layers: Sequence[Operands]) -> None:
        self.layers = layers
        weights = [layer.made() for layer in layers]
        self.first = _first_columns(weights[0])
        # the first columns of x are read by a unit matrix, exactly
        unit = torch.eye(self.first, layers[0].a.shape[1], dtype=weights[0].dtype, device=weights[0].device)
        rows = [part for layer in layers for part in (unit, (layer.a * layer.scale).to(unit.dtype))]
        self.a = torch.cat(rows)
        self.widths = [self.first + layer.a.shape[0] for layer in layers]
        self.b = [
            _with_columns(weight, layer.b, self.first) for weight, layer in zip(weights, layers, strict=True)
        ]

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Their outputs."""
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(self.a.dtype)
            lows = (flat @ self.a.T).split(self.widths, dim=1)
            found = []
            for layer, low, b in zip(self.layers, lows, self.b, strict=True):
                y = lora_output(flat, layer.made(), layer.bias, low, b, self.first, plain=False)
                found.append(_shaped(y, x))
        return found


def _taken_apart(
    layers: Sequence[Operands],
) -> tuple[tuple[float, ...], tuple[Quantised | None, ...], list[torch.Tensor | None]]:
    """Scales, quantised weights, and four tensors a layer, which autograd has to see."""
    bases: list[Quantised | None] = []
    tensors: list[torch.Tensor | None] = []
    for layer in layers:
        weight, base = (
            (layer.weight, None) if isinstance(layer.weight, torch.Tensor) else (None, layer.weight)
        )
        bases.append(base)
        tensors += weight, layer.bias, layer.a, layer.b
    return tuple(layer.scale for layer in layers), tuple(bases), tensors


class _Products(torch.autograd.Function):
    """One node for all of it: nothing is kept for the frozen weights, sums happen in place.

    A quantised weight is made again in the backward pass, since keeping it would undo the quantisation.
    """

    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        scales: tuple[float, ...],
        bases: tuple[Quantised | None, ...],
        plain: bool,
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        with torch.autocast(x.device.type, enabled=False):
            outputs, read, low = _outputs(x, dropped, scales, bases, plain, tensors)
        ctx.save_for_backward(read, low, *tensors)
        ctx.scales, ctx.bases, ctx.dtype = scales, bases, x.dtype
        ctx.drops = dropped is not None
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        read, low, *tensors = ctx.saved_tensors
        a_parts, b_parts = tensors[2::4], tensors[3::4]
        grad_x = grad_dropped = None
        with torch.autocast(read.device.type, enabled=False):
            grad_low = _low_gradient(grads, b_parts)
            grads_a = _a_gradients(grad_low, read, a_parts, ctx.scales)
            a = _joined(a_parts, ctx.scales, read.dtype)
            if ctx.needs_input_grad[0]:
                weights = [_weight(*both) for both in zip(tensors[0::4], ctx.bases, strict=True)]
                found = (
                    grads[0] @ weights[0]
                    if ctx.drops
                    else lora_input_gradient(grad_low, a, list(grads), weights)
                )
                grad_x = found.to(ctx.dtype)
            if ctx.drops and ctx.needs_input_grad[1]:
                grad_dropped = (grad_low @ a).to(ctx.dtype)
            lows = low.split([b.shape[1] for b in b_parts], 1)
            grads_b = [
                _outer(grad, own).to(b.dtype) for grad, own, b in zip(grads, lows, b_parts, strict=True)
            ]
        own_grads = [g for pair in zip(grads_a, grads_b, strict=True) for g in (None, None, *pair)]
        return grad_x, grad_dropped, None, None, None, *own_grads


class _Gated(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)); of what is as wide as the gate, only two tensors are kept."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context
        x: torch.Tensor,
        scales: tuple[float, ...],
        bases: tuple[Quantised | None, ...],
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        a_gate, b_gate, a_up, b_up = (t for k in (2, 6) for t in tensors[k : k + 2] if t is not None)
        with torch.autocast(x.device.type, enabled=False):
            weight = _weight(tensors[0], bases[0])
            flat = x.to(weight.dtype)
            gate = F.linear(flat, weight, tensors[1])
            up = F.linear(flat, _weight(tensors[4], bases[1]), tensors[5])
            low = flat @ _joined((a_gate, a_up), scales[:2], flat.dtype).T
            y = gated_output(gate, up, low, b_gate.to(flat.dtype), b_up.to(flat.dtype))
            [found], _, low_down = _outputs(y, None, scales[2:], bases[2:], True, tensors[8:])
        ctx.save_for_backward(flat, gate, up, low, low_down, *tensors)
        ctx.scales, ctx.bases, ctx.dtype = scales, bases, x.dtype
        return found

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # Any: autograd's context and its tuple
        flat, gate, up, low, low_down, *tensors = ctx.saved_tensors
        a_gate, a_up, a_down = tensors[2::4]
        b_gate, b_up, b_down = tensors[3::4]
        grad_x = None
        with torch.autocast(flat.device.type, enabled=False):
            grad_low, a = _low_gradient([upstream], [b_down]), _joined([a_down], ctx.scales[2:], flat.dtype)
            grad_b_down = _outer(upstream, low_down).to(b_down.dtype)
            grad_y = lora_input_gradient(grad_low, a, [upstream], [_weight(tensors[8], ctx.bases[2])])
            *grads, sums = gated_gradients(
                gate, up, grad_y, low, b_gate.to(flat.dtype), b_up.to(flat.dtype), grad_low
            )
            grad_b_gate, grad_b_up, turned = sums.split([len(a_gate), len(a_up), len(a_down)], dim=1)
            grad_a_down = (turned.T * ctx.scales[2]).to(a_down.dtype)
            grad_low = _low_gradient(grads, [b_gate, b_up])
            grad_a_gate, grad_a_up = _a_gradients(grad_low, flat, [a_gate, a_up], ctx.scales[:2])
            if ctx.needs_input_grad[0]:
                a = _joined([a_gate, a_up], ctx.scales[:2], flat.dtype)
                weights = [_weight(tensors[0], ctx.bases[0]), _weight(tensors[4], ctx.bases[1])]
                found = lora_input_gradient(grad_low, a, list(grads), weights)
                grad_x = found.to(ctx.dtype)
        return (
            *(grad_x, None, None),
            *(None, None, grad_a_gate, grad_b_gate.to(b_gate.dtype)),
            *(None, None, grad_a_up, grad_b_up.to(b_up.dtype)),
            *(None, None, grad_a_down, grad_b_down),
        )


def _outputs(
    x: torch.Tensor,
    dropped: torch.Tensor | None,
    scales: Sequence[float],
    bases: Sequence[Quantised | None],
    plain: bool,
    tensors: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The outputs of layers, what was read by their A, and what these made of it [tokens, all ranks]."""
    biases = tensors[1::4]
    a_parts, b_parts = ([t for t in tensors[k::4] if t is not None] for k in (2, 3))  # None is never there
    outputs = []
    ranks = [a.shape[0] for a in a_parts]
    for index, b_part in enumerate(b_parts):
        weight = _weight(tensors[4 * index], bases[index])
        if index == 0:
            flat = x.to(weight.dtype)
            read = flat if dropped is None else dropped.to(flat.dtype)
            low = read @ _joined(a_parts, scales, flat.dtype).T
            lows = (low,) if len(ranks) == 1 else low.split(ranks, dim=1)
            if first := _first_columns(weight):
                lows = _begun(flat[:, :first], lows)
        b = _with_columns(weight, b_part, first)
        outputs.append(lora_output(flat, weight, biases[index], lows[index], b, first, plain))
    return outputs, read, low


def _low_gradient(grads: Sequence[torch.Tensor], b_parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradient of what layers' A made [tokens, all ranks]."""
    found = [grad @ b.to(grad.dtype) for grad, b in zip(grads, b_parts, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _a_gradients(
    grad_low: torch.Tensor, read: torch.Tensor, a_parts: Sequence[torch.Tensor], scales: Sequence[float]
) -> Sequence[torch.Tensor]:
    ranks = [len(a) for a in a_parts]
    return _scaled((grad_low.T @ read).to(a_parts[0].dtype), ranks, scales).split(ranks)


def _weight(weight: torch.Tensor | None, base: Quantised | None) -> torch.Tensor:
    if weight is not None:
        return weight
    assert base is not None
    return base.weight


def _first_columns(weight: torch.Tensor) -> int:
    """How many columns of x are multiplied together with x A'; the others are added to that.

    In 16 bits, what of an update is smaller than the last digit of x W' is lost where that is rounded before
    the two are added. Of a product that adds to what is there a CPU rounds the sum, but cuBLAS both; a sum
    with few columns of x has finer digits.
    """
    return 0 if weight.is_cpu or weight.dtype.itemsize > 2 else min(64, weight.shape[1])


def _with_columns(weight: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
    """B after the first columns of W."""
    b = b.to(weight.dtype)
    return torch.cat((weight[:, :first], b), dim=1) if first else b


def _begun(columns: torch.Tensor, lows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same columns before each of these, by one copy."""
    pieces = [piece for low in lows for piece in (columns, low)]
    return torch.cat(pieces, dim=1).split([columns.shape[1] + low.shape[1] for low in lows], dim=1)


def _outer(grad: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """grad' low [out, rank]; on a CPU with the narrow factor first, in a third of the time."""
    return (low.T @ grad).T.contiguous() if grad.device.type == "cpu" else grad.T @ low


def _joined(parts: Sequence[torch.Tensor], scales: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """scale * A of all the layers, so that they read their input once."""
    whole = parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
    return _scaled(whole, [len(part) for part in parts], scales).to(dtype)


def _scaled(whole: torch.Tensor, ranks: Sequence[int], scales: Sequence[float]) -> torch.Tensor:
    """Each layer's rows times its scale; most often all are the same."""
    if len(set(scales)) == 1:
        return whole * scales[0]
    return torch.cat([part * scale for part, scale in zip(whole.split(ranks), scales, strict=True)])


# Compiled, an in-place product would become one that copies its sum first, which costs a twentieth of a step
# on a GPU: so these are operations
@operation(lambda flat, weight, *_: flat.new_empty(flat.shape[0], weight.shape[0]))
def lora_output(
    flat: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    low: torch.Tensor,
    b: torch.Tensor,
    first: int,
    plain: bool,
) -> torch.Tensor:
    """x W' + bias + low B', one product added to the other in place.

    `low` and B contain the first columns of x and W already. The small product comes first in 16 bits, and on
    a GPU in any case: the other way round it would read and write all of the output.
    """
    if not first and flat.is_cpu and flat.dtype.itemsize > 2:
        return (F.linear if plain else linear)(flat, weight, bias).addmm_(low, b.T)
    y = F.linear(low, b, bias)
    return y if first == flat.shape[1] else y.addmm_(flat[:, first:], weight[:, first:].T)


@operation(lambda grad_low, a, *_: grad_low.new_empty(grad_low.shape[0], a.shape[1]))
def lora_input_gradient(
    grad_low: torch.Tensor, a: torch.Tensor, grads: list[torch.Tensor], weights: list[torch.Tensor]
) -> torch.Tensor:
    """What all the layers' outputs say about their input, added in place."""
    total = grad_low @ a
    for grad, weight in zip(grads, weights, strict=True):
        total.addmm_(grad, weight)
    return total
