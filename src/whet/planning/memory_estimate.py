"""Estimate the peak memory of a training step by running it on fake tensors, which have no storage.

The model's real code runs, forward and backward, while a dispatch mode tracks the size of all live storages.
Of each run of identical layers only two are executed, and the second represents the rest.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from whet.data.batches import Batch
from whet.hardware import Precision
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.models.transformers_bridge import Bridge
from whet.objectives.objective import Objective
from whet.ops.dispatch import plan_for_device
from whet.training.loss import weighted_loss
from whet.training.optim.masked_optimizer import MaskedOptimizer

_aten = torch.ops.aten


@dataclass
class Segment:
    """A part of a step, such as the forward pass of one layer. All sizes are in bytes."""

    name: str
    change: int = 0  # live memory at its end, relative to its start
    peak: int = 0  # largest live memory, relative to its start
    matmul_bytes: int = 0  # total outputs of matmuls and attention
    last_matmul_bytes: int = 0  # output of the last of them


def _bincount(x: torch.Tensor, _: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    return x.new_empty(minlength)


def _grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    rows = (len(offs),) if b.dim() == 2 else ()  # for the gradient of the weights, one matrix per expert
    return a.new_empty(*rows, a.shape[0], b.shape[-1])


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel(), x.dim(), dtype=torch.long)  # all entries, as in batches without padding


# replacements for operations that fake tensors do not support, or only in some dtypes
_REPLACEMENTS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.bincount.default: _bincount,
    _aten.nonzero.default: _nonzero,
    _aten._grouped_mm.default: _grouped,
}

_MATMULS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
# bytes of temporary memory inside an operation, which a dispatch mode cannot see, from its arguments
_WORKSPACE_BYTES: dict[Any, Callable[..., int]] = {
    _aten.logsumexp.default: lambda x, *_: x.numel() * x.element_size(),  # exp(x - max) before the sum
}


class MemoryLedger(TorchDispatchMode):
    """Tracks the bytes of live storages, segment by segment."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.segments = [Segment("begin")]
        self._segment_start = 0  # live bytes at the start of the current segment
        self._storages: dict[int, weakref.ref[Any]] = {}  # Any: storages, by address

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in this mode, and importing the compiler takes seconds

    def begin(self, name: str) -> None:
        """Close the current segment and start a new one."""
        self.close()
        self.segments.append(Segment(name))
        self._segment_start = self.live

    def close(self) -> None:
        """Record by how much the current segment has changed the live memory so far."""
        self.segments[-1].change = self.live - self._segment_start

    def _track(self, tensor: torch.Tensor, *, new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes() if new else 0
        self._storages[key] = weakref.ref(storage, lambda _: self._release(key, size))
        self.live += size
        self._update_peak()

    def _update_peak(self, workspace: int = 0) -> None:
        segment = self.segments[-1]
        segment.peak = max(segment.peak, self.live + workspace - self._segment_start)

    def _release(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Any: torch's
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # by far the most frequent call
            return func(*args, **kwargs)
        for value in tree_iter((args, kwargs)):  # storages from before the trace are not counted here
            if isinstance(value, torch.Tensor):
                self._track(value, new=False)
        if func in _WORKSPACE_BYTES:
            self._update_peak(_WORKSPACE_BYTES[func](*args))
        output = _REPLACEMENTS.get(func, func)(*args, **kwargs)
        if func in _MATMULS:
            segment = self.segments[-1]
            segment.last_matmul_bytes = sum(
                t.numel() * t.element_size() for t in tree_iter(output) if isinstance(t, torch.Tensor)
            )
            segment.matmul_bytes += segment.last_matmul_bytes
        for value in tree_iter(output):
            if isinstance(value, torch.Tensor):
                self._track(value, new=True)
        return output


class FakeModel:
    """A model with fake tensors, in which each run of identical layers is shortened to two layers.

    Args:
        model: A model on the meta device, which is modified.
        fake: The mode that creates the fake tensors.
    """

    def __init__(self, model: LanguageModel, fake: FakeTensorMode) -> None:
        blocks = list(model.blocks())
        selected, self.repeats = _representatives(model, blocks)
        if isinstance(model, Decoder):
            model.spec = replace(model.spec, blocks=tuple(model.spec.blocks[index] for index in selected))
        _set_blocks(model, [blocks[index] for index in selected])
        replace_meta_tensors(model, fake)
        self.model = model


def _representatives(model: LanguageModel, blocks: list[nn.Module]) -> tuple[list[int], list[int]]:
    """Return the indices of the layers to run, and how many layers each of them represents."""

    def describe(index: int) -> object:
        spec = model.spec.blocks[index] if isinstance(model, Decoder) else type(blocks[index])
        tensors = [*blocks[index].named_parameters(), *blocks[index].named_buffers()]
        return spec, [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]

    layers = [describe(index) for index in range(len(blocks))]
    selected: list[int] = []
    repeats: list[int] = []
    for index, layer in enumerate(layers):
        is_repeated = (
            len(selected) > 1
            and layers[selected[-1]] == layers[selected[-2]] == layer
            and selected[-1] == selected[-2] + 1
        )
        if is_repeated and index == selected[-1] + repeats[-1]:
            repeats[-1] += 1
        else:
            selected.append(index)
            repeats.append(1)
    return selected, repeats


def _set_blocks(model: LanguageModel, blocks: list[nn.Module]) -> None:
    if isinstance(model, Decoder):
        model.layers = nn.ModuleList(blocks)
        return
    assert isinstance(model, Bridge)
    block_list: object = model.blocks()
    owners = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is block_list
    ]
    for module, name in owners:
        setattr(module, name, nn.ModuleList(blocks))


def replace_meta_tensors(module: nn.Module, fake: FakeTensorMode) -> None:
    """Replace tensors on the meta device by fake tensors; tied tensors stay tied."""
    fake_tensors: dict[int, torch.Tensor] = {}

    def to_fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fake_tensors:
            with fake:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            fake_tensors[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        return fake_tensors[id(tensor)]

    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = to_fake(tensor)  # type: ignore[assignment]  # the type stays the same


@dataclass(frozen=True)
class Trace:
    """The memory of one micro-batch in bytes, without weights, optimizer state and earlier gradients."""

    peak: int
    at: str  # the segment of the peak
    activations: int  # live at the start of the loss
    loss: int  # the peak of the loss, in addition to the activations
    gradients: int  # live at the end


def trace(
    fake_model: FakeModel,
    objective: Objective,
    batch: Batch,
    *,
    fake: FakeTensorMode,
    precision: Precision,
    device: str,
    accumulate: bool = False,
    compiled: bool = False,
    scattered: bool = False,
) -> Trace:
    """Run one micro-batch forward and backward on fake tensors, and return its memory.

    Args:
        fake_model: The model.
        objective: The objective; its frozen models have fake tensors, too.
        batch: A batch of fake tensors.
        fake: The mode of all fake tensors.
        precision: The dtypes of the run.
        device: The type of the planned device.
        accumulate: Whether gradients of an earlier micro-batch exist, which are then not counted.
        compiled: Whether the run is compiled, and recomputes cheap activations in the backward pass.
        scattered: Whether FSDP scatters a layer's gradients to other devices after its backward pass.
    """
    model, ledger = fake_model.model, MemoryLedger()
    parameters = [*model.parameters(), *(objective.heads.parameters() if objective.heads else ())]
    model.train()
    with (
        fake,
        plan_for_device(device),
        _attention_kernel(device, precision),
        _record_segments(model, ledger) as recorder,
    ):
        for p in parameters:
            p.grad = torch.empty_like(p) if accumulate and p.requires_grad else None
        with ledger:
            weights = dict.fromkeys(objective.coefficients, 1.0)
            loss, metrics = weighted_loss(model, objective, batch, weights=weights, precision=precision)
            del metrics
            recorder.is_forward = False
            loss.backward()
            del loss
        ledger.close()
        for p in parameters:
            p.grad = None
    layers = list(model.blocks())
    scattered_bytes = [_gradient_bytes(layer) if scattered and not accumulate else 0 for layer in layers]
    recomputed_bytes = [0] * len(layers)
    if compiled and not model.grad_checkpoint:
        recomputed_bytes = [_recomputable_bytes(ledger.segments, index) for index in range(len(layers))]
    return _summarize(
        ledger.segments,
        fake_model.repeats,
        scattered_bytes=scattered_bytes,
        recomputed_bytes=recomputed_bytes,
    )


def _gradient_bytes(layer: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)


def _recomputable_bytes(segments: list[Segment], index: int) -> int:
    """Return the activations that a compiled layer recomputes: all but the outputs of its matmuls."""
    forward = next(segment for segment in segments if segment.name == f"forward {index}")
    has_backward = any(segment.name == f"backward {index}" for segment in segments)
    return max(0, forward.change - forward.matmul_bytes) if has_backward else 0


@contextlib.contextmanager
def _attention_kernel(device: str, precision: Precision) -> Iterator[None]:
    """Use the math kernel for fp32 on GPUs, where kernels for grouped heads need a 16-bit dtype."""
    if device == "cpu" or precision.compute != torch.float32:
        yield
    else:
        with sdpa_kernel(SDPBackend.MATH):
            yield


class _SegmentRecorder:
    """Starts a new segment of the ledger at the forward and backward pass of every layer."""

    def __init__(self, ledger: MemoryLedger, layers: int) -> None:
        self.ledger = ledger
        self.layers = layers
        self.is_forward = True  # False in the backward pass, where recomputed layers call the hooks again

    def before_layer(self, index: int, inputs: tuple[Any, ...]) -> None:  # Any: the arguments of a layer
        """Start the forward segment of a layer."""
        if not self.is_forward or not torch.is_grad_enabled():
            return
        self.ledger.begin(f"forward {index}")
        if index == 0 and inputs and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self.ledger.begin("embedding"))

    def after_layer(self, index: int, output: Any) -> None:  # Any: the output of a layer
        """Start the loss segment after the last layer, and the backward segment once a gradient arrives."""
        if not self.is_forward or not torch.is_grad_enabled():
            return
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.ledger.begin(f"backward {index}"))
        if index == self.layers - 1:
            self.ledger.begin("loss")


@contextlib.contextmanager
def _record_segments(model: LanguageModel, ledger: MemoryLedger) -> Iterator[_SegmentRecorder]:
    blocks = list(model.blocks())
    recorder = _SegmentRecorder(ledger, len(blocks))

    def add_hooks(index: int, block: nn.Module) -> list[RemovableHandle]:
        return [
            block.register_forward_pre_hook(lambda _, inputs: recorder.before_layer(index, inputs)),
            block.register_forward_hook(lambda _, __, output: recorder.after_layer(index, output)),
        ]

    handles = [handle for index, block in enumerate(blocks) for handle in add_hooks(index, block)]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _summarize(
    segments: list[Segment],
    repeats: list[int],
    *,
    scattered_bytes: list[int],
    recomputed_bytes: list[int],
) -> Trace:
    """Add up the segments, with each layer's counted as often as the layer is repeated."""
    live = peak = activations = loss = 0
    at = ""
    for segment in segments:
        kind, _, index = segment.name.partition(" ")
        times, change = 1, segment.change
        if index:
            layer = int(index)
            times = repeats[layer]
            if kind == "backward":
                change += recomputed_bytes[layer] - scattered_bytes[layer]
            else:
                change -= recomputed_bytes[layer]
        if kind == "loss" and not activations:
            activations, loss = live, segment.peak
        # the peak of repeated layers is in the first or the last of them
        segment_peak = max(live, live + (times - 1) * change) + segment.peak
        if segment_peak > peak:
            peak, at = segment_peak, kind
        live += times * change
    return Trace(peak, at, activations, loss, live)


def update_bytes(optimizer: torch.optim.Optimizer, fake: FakeTensorMode) -> int:
    """Return the temporary memory of the largest parameter's update, which is 0 for fused optimizers."""
    if not isinstance(optimizer, MaskedOptimizer):
        return 0
    parameters = ((p, group) for group in optimizer.param_groups for p in group["params"])
    largest, group = max(parameters, key=lambda pair: pair[0].numel())
    with fake, torch.no_grad():
        p = nn.Parameter(torch.empty(largest.shape, dtype=largest.dtype, device="cpu"))
        p.grad = torch.empty_like(p)
        optimizer.state[p].update(optimizer.create_state(p, group))
        optimizer.found_inf = torch.zeros(())
        with MemoryLedger() as ledger:
            optimizer._step_tensor(p, group)
        del optimizer.state[p]
    return ledger.segments[-1].peak


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer state; the parameters are on the meta device."""
    total = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(optimizer, MaskedOptimizer):
                state = optimizer.create_state(p, group)
                total += sum(t.numel() * t.element_size() for t in state.values())
            else:  # torch's Adam and AdamW have two moments
                total += 2 * p.numel() * p.element_size()
    return total
