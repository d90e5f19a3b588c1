"""The memory of a training step, found by making one in which no tensor has any storage.

The model's own code runs, forward and backward, on fake tensors; a ledger of what is alive gives the peak.
Of layers that are alike two are run, and the second stands for all the others.
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
from whet.ops.dispatch import planned_for
from whet.training.loss import weighted_loss
from whet.training.optim.masked_optimizer import MaskedOptimizer

_aten = torch.ops.aten


@dataclass
class Segment:
    """A stretch of a step: what it adds to what is alive, and the most that it has alive at once."""

    name: str
    change: int = 0
    peak: int = 0
    products: int = 0  # bytes that matrix products and attention gave
    last: int = 0  # those of the last of them


def _bincount(x: torch.Tensor, _: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    return x.new_empty(minlength)


def _grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    rows = (len(offs),) if b.dim() == 2 else ()  # the gradient of weights, one for each expert
    return a.new_empty(*rows, a.shape[0], b.shape[-1])


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel(), x.dim(), dtype=torch.long)  # all of it, as in batches without padding


# what torch cannot do without numbers, or only in some dtypes
_KNOWN: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.bincount.default: _bincount,
    _aten.nonzero.default: _nonzero,
    _aten._grouped_mm.default: _grouped,
}

_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
# what operations take for themselves and no mode can see: bytes, from their arguments
_INSIDE: dict[Any, Callable[..., int]] = {
    _aten.logsumexp.default: lambda x, *_: x.numel() * x.element_size(),  # exp(x - max) before its sum
}


class MemoryLedger(TorchDispatchMode):
    """Adds up the storages that are alive, in segments."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.segments = [Segment("begin")]
        self._began = 0
        self._known: dict[int, weakref.ref[Any]] = {}  # Any: storages, by where they are

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while it counts, and the compiler takes seconds to import

    def begin(self, name: str) -> None:
        """A new segment."""
        self.close()
        self.segments.append(Segment(name))
        self._began = self.live

    def close(self) -> None:
        """What the current segment changed, so far."""
        self.segments[-1].change = self.live - self._began

    def _note(self, tensor: torch.Tensor, *, new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if new else 0
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.live += size
        self._peak_of(0)

    def _peak_of(self, more: int) -> None:
        segment = self.segments[-1]
        segment.peak = max(segment.peak, self.live + more - self._began)

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Any: torch's
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # most of the calls, by far
            return func(*args, **kwargs)
        for each in tree_iter((args, kwargs)):  # what was there before: its bytes are counted elsewhere
            if isinstance(each, torch.Tensor):
                self._note(each, new=False)
        if func in _INSIDE:
            self._peak_of(_INSIDE[func](*args))
        found = _KNOWN.get(func, func)(*args, **kwargs)
        if func in _PRODUCTS:
            segment = self.segments[-1]
            segment.last = sum(
                t.numel() * t.element_size() for t in tree_iter(found) if isinstance(t, torch.Tensor)
            )
            segment.products += segment.last
        for each in tree_iter(found):
            if isinstance(each, torch.Tensor):
                self._note(each, new=True)
        return found


class Sketch:
    """A model whose tensors are fake, with every layer that differs from the others, and a second of each."""

    def __init__(self, model: LanguageModel, fake: FakeTensorMode) -> None:
        """`model` is on the meta device; it is changed."""
        blocks = list(model.blocks())
        kept, self.repeats = _representatives(model, blocks)
        if isinstance(model, Decoder):
            model.spec = replace(model.spec, blocks=tuple(model.spec.blocks[index] for index in kept))
        _put_blocks(model, [blocks[index] for index in kept])
        fill(model, fake)
        self.model = model


def _representatives(model: LanguageModel, blocks: list[nn.Module]) -> tuple[list[int], list[int]]:
    """Which layers to run, and how many each stands for."""

    def kind(index: int) -> object:
        spec = model.spec.blocks[index] if isinstance(model, Decoder) else type(blocks[index])
        tensors = [*blocks[index].named_parameters(), *blocks[index].named_buffers()]
        return spec, [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]

    kinds = [kind(index) for index in range(len(blocks))]
    kept: list[int] = []
    repeats: list[int] = []
    for index, each in enumerate(kinds):
        again = len(kept) > 1 and kinds[kept[-1]] == kinds[kept[-2]] == each and kept[-1] == kept[-2] + 1
        if again and index == kept[-1] + repeats[-1]:
            repeats[-1] += 1
        else:
            kept.append(index)
            repeats.append(1)
    return kept, repeats


def _put_blocks(model: LanguageModel, blocks: list[nn.Module]) -> None:
    if isinstance(model, Decoder):
        model.layers = nn.ModuleList(blocks)
        return
    assert isinstance(model, Bridge)
    every: object = model.blocks()
    owners = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is every
    ]
    for module, name in owners:
        setattr(module, name, nn.ModuleList(blocks))


def fill(module: nn.Module, fake: FakeTensorMode) -> None:
    """Fake tensors in the place of those on the meta device; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with fake:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        return made[id(tensor)]

    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = faked(tensor)  # type: ignore[assignment]  # of the kind that it was


@dataclass(frozen=True)
class Trace:
    """The memory of one micro-batch, beside the weights, the optimizer's state and earlier gradients."""

    peak: int
    at: str  # the segment of the peak
    activations: int  # alive when the loss begins
    loss: int  # the most that the loss takes at once, beside those
    gradients: int  # what is left at the end


def trace(
    sketch: Sketch,
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
    """Run one micro-batch.

    `accumulate`: gradients of an earlier one are there, and not counted. `compiled`: what is cheap to compute
    again is not kept. `scattered`: a layer's gradients go to other devices when it is done.
    """
    model, ledger = sketch.model, MemoryLedger()
    learners = [*model.parameters(), *(objective.heads.parameters() if objective.heads else ())]
    model.train()
    with fake, planned_for(device), _attention_of(device, precision), _watched(model, ledger) as bounds:
        for p in learners:
            p.grad = torch.empty_like(p) if accumulate and p.requires_grad else None
        with ledger:
            weights = dict.fromkeys(objective.coefficients, 1.0)
            loss, metrics = weighted_loss(model, objective, batch, weights=weights, precision=precision)
            del metrics
            bounds.forward = False
            loss.backward()
            del loss
        ledger.close()
        for p in learners:
            p.grad = None
    layers = list(model.blocks())
    leaving = [_trained_bytes(layer) if scattered and not accumulate else 0 for layer in layers]
    dropped = [0] * len(layers)
    if compiled and not model.grad_checkpoint:
        dropped = [_recomputable(ledger.segments, index) for index in range(len(layers))]
    return _summary(ledger.segments, sketch.repeats, leaving=leaving, dropped=dropped)


def _trained_bytes(layer: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)


def _recomputable(segments: list[Segment], index: int) -> int:
    """What a compiled layer does not keep: all but the results of its products."""
    forward = next(segment for segment in segments if segment.name == f"forward {index}")
    backward = any(segment.name == f"backward {index}" for segment in segments)
    return max(0, forward.change - forward.products) if backward else 0


@contextlib.contextmanager
def _attention_of(device: str, precision: Precision) -> Iterator[None]:
    """On a GPU the kernels that take grouped heads need 16 bits; on a CPU torch chooses by itself."""
    if device == "cpu" or precision.compute != torch.float32:
        yield
    else:
        with sdpa_kernel(SDPBackend.MATH):
            yield


class _Bounds:
    """Begins segments of a ledger at the bounds of layers, forward and back."""

    def __init__(self, ledger: MemoryLedger, layers: int) -> None:
        self.ledger = ledger
        self.layers = layers
        self.forward = True  # layers that are recomputed go forward in the backward pass

    def before(self, index: int, inputs: tuple[Any, ...]) -> None:  # Any: what a layer takes
        """A layer begins."""
        if not self.forward or not torch.is_grad_enabled():
            return
        self.ledger.begin(f"forward {index}")
        if index == 0 and inputs and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self.ledger.begin("embedding"))

    def after(self, index: int, output: Any) -> None:  # Any: what a layer gives
        """A layer ends."""
        if not self.forward or not torch.is_grad_enabled():
            return
        out = output if isinstance(output, torch.Tensor) else output[0]
        if out.requires_grad:
            out.register_hook(lambda _: self.ledger.begin(f"backward {index}"))
        if index == self.layers - 1:
            self.ledger.begin("loss")


@contextlib.contextmanager
def _watched(model: LanguageModel, ledger: MemoryLedger) -> Iterator[_Bounds]:
    blocks = list(model.blocks())
    bounds = _Bounds(ledger, len(blocks))

    def watch(index: int, block: nn.Module) -> list[RemovableHandle]:
        return [
            block.register_forward_pre_hook(lambda _, inputs: bounds.before(index, inputs)),
            block.register_forward_hook(lambda _, __, output: bounds.after(index, output)),
        ]

    handles = [handle for index, block in enumerate(blocks) for handle in watch(index, block)]
    try:
        yield bounds
    finally:
        for handle in handles:
            handle.remove()


def _summary(segments: list[Segment], repeats: list[int], *, leaving: list[int], dropped: list[int]) -> Trace:
    live = peak = activations = loss = 0
    at = ""
    for segment in segments:
        kind, _, index = segment.name.partition(" ")
        times, change = 1, segment.change
        if index:
            layer = int(index)
            times = repeats[layer]
            change += dropped[layer] - leaving[layer] if kind == "backward" else -dropped[layer]
        if kind == "loss" and not activations:
            activations, loss = live, segment.peak
        # of several in a row the first or the last is the largest
        highest = max(live, live + (times - 1) * change) + segment.peak
        if highest > peak:
            peak, at = highest, kind
        live += times * change
    return Trace(peak, at, activations, loss, live)


def update_bytes(optimizer: torch.optim.Optimizer, fake: FakeTensorMode) -> int:
    """The most that the update of one parameter takes at once: nothing for fused kernels."""
    if not isinstance(optimizer, MaskedOptimizer):
        return 0
    every = ((p, group) for group in optimizer.param_groups for p in group["params"])
    largest, group = max(every, key=lambda both: both[0].numel())
    with fake, torch.no_grad():
        p = nn.Parameter(torch.empty(largest.shape, dtype=largest.dtype, device="cpu"))
        p.grad = torch.empty_like(p)
        optimizer.state[p].update(optimizer.create_state(p, group))
        optimizer.found_inf = torch.zeros(())
        with MemoryLedger() as ledger:
            optimizer._step_one(p, group)
        del optimizer.state[p]
    return ledger.segments[-1].peak


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer remembers of its parameters, which are on the meta device."""
    total = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(optimizer, MaskedOptimizer):
                state = optimizer.create_state(p, group)
                total += sum(t.numel() * t.element_size() for t in state.values())
            else:  # torch's Adam and AdamW: two moments
                total += 2 * p.numel() * p.element_size()
    return total
