"""What a number format does to a model's gradients: one batch, the same weights, one path a format.

Each model is cut where its outputs leave it (`hidden` of a language model, `decide` of a tabular one). The
reference runs through, and its gradient at the cut is what every path starts its backward pass from. What
lies above the cut (the head) is run on the reference's values in the path's own format. So no path can hide
a difference behind another loss, and none compares zeros with zeros because an upstream gradient was lost.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from whet.data.batches import Batch
from whet.errors import DataError
from whet.studies.simulated_dtypes import in_format, mapped, rounded, tensors_of

LossFunction = Callable[
    [Any, Batch], torch.Tensor
]  # Any: the kind of model it is for; it may have `heads` to train
Readout = Callable[[Any, Any], torch.Tensor]  # Any: a model and what came out of it at the cut
Verdict = Literal["fine", "moderate", "major"]

VERDICTS: tuple[Verdict, ...] = ("fine", "moderate", "major")
COSINE = 0.99  # below it a gradient points elsewhere
_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)  # of an fp16 loss: the first that does not overflow
_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Path:
    """A way to compute: in a format of the device's own, or in fp32 with everything rounded to a format."""

    name: str
    dtype: torch.dtype
    simulated: bool = False
    tf32: bool = False


def paths_on(device: torch.device) -> list[Path]:
    """The formats that a device has, then the simulated ones."""
    real = [Path("bf16", torch.bfloat16), Path("fp16", torch.float16)]
    if device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            real = real[1:]
        if torch.cuda.get_device_capability(device) >= (8, 0):
            real.insert(0, Path("tf32", torch.float32, tf32=True))
    elif device.type == "cpu":
        real.insert(0, Path("fp32", torch.float32))
    simulated = [Path(f"sim-{path.name}", path.dtype, simulated=True) for path in real[-2:]]
    return [*real, *simulated]


@dataclass(frozen=True)
class ComparisonRow:
    """One parameter on one path, against the reference."""

    name: str
    reference: float  # norm of its gradient
    norm: float
    cosine: float

    @property
    def ratio(self) -> float:
        """norm / reference; both zero: 1; only the reference zero, or anything not finite: infinite."""
        if not (math.isfinite(self.norm) and math.isfinite(self.reference)):
            return math.inf
        if self.reference > 0:
            return self.norm / self.reference
        return 1.0 if self.norm == 0 else math.inf

    @property
    def factor(self) -> float:
        """How far off the norm is, too large or too small."""
        return self.ratio if self.ratio >= 1 else (1 / self.ratio if self.ratio else math.inf)

    @property
    def delta(self) -> float:
        """Difference of the norms."""
        return abs(self.norm - self.reference)

    @property
    def relative(self) -> float:
        """The same, over the reference's."""
        return self.delta / max(abs(self.reference), 1e-12)

    @property
    def verdict(self) -> Verdict:
        """By the factor, and at least moderate where the direction is lost; a NaN is no direction."""
        if not self.factor <= 5:
            return "major"
        return "fine" if self.factor <= 2 and self.cosine >= COSINE else "moderate"


@dataclass(frozen=True)
class PathResult:
    """What one path made of the batch."""

    path: Path
    rows: list[ComparisonRow]
    largest_difference: float  # of the logits, or of the outputs
    choices: list[list[tuple[int, ...]]]  # of each router in turn: the experts of each row, in order of index
    divergent: list[tuple[int, int]]  # (router, row) whose experts are not the reference's
    loss_scale: float = 1.0

    @property
    def verdict(self) -> Verdict:
        """The worst of its parameters': no finite ratio makes an infinite one forgotten."""
        return max((row.verdict for row in self.rows), key=VERDICTS.index, default="fine")

    @property
    def worst(self) -> ComparisonRow:
        """The parameter that is furthest off."""
        return max(self.rows, key=lambda row: (row.factor, -row.cosine if row.cosine == row.cosine else 2))

    def named(self, verdict: Verdict) -> list[str]:
        """The parameters with this verdict."""
        return [row.name for row in self.rows if row.verdict == verdict]


@dataclass(frozen=True)
class Diagnosis:
    """Every path against the reference."""

    reference: str  # its format
    batch: int  # rows, or supervised tokens
    parameters: int
    loss: float
    choices: list[list[tuple[int, ...]]]
    results: list[PathResult]

    @property
    def verdict(self) -> Verdict:
        """The worst of all paths'."""
        return max((result.verdict for result in self.results), key=VERDICTS.index)

    @property
    def routed(self) -> int:
        """How many choices of experts there are."""
        return sum(map(len, self.choices))


@dataclass
class _Pass:
    """What a forward and a backward pass leave."""

    loss: float
    gradients: dict[str, torch.Tensor]
    outputs: torch.Tensor
    choices: list[list[tuple[int, ...]]]
    calls: list["_Call"] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        return all(bool(g.isfinite().all()) for g in self.gradients.values())


@dataclass
class _Call:
    """One pass through the cut: what came out, what the loss read instead, and the gradient there."""

    real: list[torch.Tensor]
    leaves: list[torch.Tensor]

    def upstream(self) -> list[torch.Tensor | None]:
        return [leaf.grad for leaf in self.leaves]


@dataclass(frozen=True)
class _Copy:
    """A model and a loss of their own: what a path does to them, no other sees."""

    model: nn.Module
    loss: LossFunction

    @classmethod
    def of(cls, model: nn.Module, loss: LossFunction, dtype: torch.dtype) -> "_Copy":
        copied = cls(*copy.deepcopy((model, loss)))
        for module in copied.modules().values():
            module.to(dtype)
        return copied

    def modules(self) -> dict[str, nn.Module]:
        """The model, and what the loss trains beside it, by what their parameters' names begin with."""
        heads = getattr(self.loss, "heads", None)
        return {"": self.model} if heads is None else {"": self.model, "heads.": heads}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, module in self.modules().items():
            for name, parameter in module.named_parameters():
                yield prefix + name, parameter


class Examination:
    """One model, one batch, one loss."""

    def __init__(
        self, model: nn.Module, batch: Batch, loss: LossFunction, *, cut: str, readout: Readout
    ) -> None:
        self.model = model
        self.batch = batch
        self.loss = loss
        self.cut = cut
        self.readout = readout
        self.device = next(model.parameters()).device

    def diagnose(self, paths: Sequence[Path] | None = None) -> Diagnosis:
        """Every path against fp64 on a CPU (fp32 where a layer has no fp64), against fp32 elsewhere."""
        reference, dtype = self._reference()
        if not any(bool(gradient.any()) for gradient in reference.gradients.values()):
            raise DataError(
                "every gradient of this batch is zero: there is nothing to compare",
                hint="take a larger batch, or one whose answers differ in their rewards",
            )
        chosen = paths_on(self.device) if paths is None else paths
        results = [self._compare(path, reference) for path in chosen if path.tf32 or path.dtype != dtype]
        return Diagnosis(
            _SHORT[dtype],
            self.batch.supervised,
            sum(gradient.numel() for gradient in reference.gradients.values()),
            reference.loss,
            reference.choices,
            results,
        )

    def _reference(self) -> tuple[_Pass, torch.dtype]:
        if self.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # a layer, or a teacher, that mixes it with fp32
                return self._run(self._copy(torch.float64), torch.float64), torch.float64
        return self._run(self._copy(torch.float32), torch.float32), torch.float32

    def _copy(self, dtype: torch.dtype) -> _Copy:
        return _Copy.of(self.model, self.loss, dtype)

    def _compare(self, path: Path, reference: _Pass) -> PathResult:
        found, scale = self._on(path, reference), 1.0
        if path.dtype == torch.float16 and not path.simulated:
            for scale in _SCALES:
                found = self._on(path, reference, scale=scale)
                if found.finite or not bool(found.outputs.isfinite().all()):
                    break
        rows = [_row(name, wanted, found.gradients[name]) for name, wanted in reference.gradients.items()]
        apart = (found.outputs - reference.outputs).abs()
        largest = float(apart.max()) if bool(apart.isfinite().all()) else math.inf
        pairs = enumerate(zip(reference.choices, found.choices, strict=True))
        divergent = [
            (router, row)
            for router, (ours, theirs) in pairs
            for row, (one, other) in enumerate(zip(ours, theirs, strict=True))
            if one != other
        ]
        return PathResult(path, rows, largest, found.choices, divergent, scale)

    def _on(self, path: Path, reference: _Pass, *, scale: float = 1.0) -> _Pass:
        subject = self._copy(torch.float32)
        with contextlib.ExitStack() as context:
            if path.simulated:
                for module in subject.modules().values():
                    context.enter_context(rounded(module, path.dtype))
            elif path.tf32:
                context.enter_context(_tf32())
            elif path.dtype != torch.float32:
                for _, parameter in subject.parameters():
                    if not parameter.requires_grad:  # a frozen base is kept in the format itself
                        parameter.data = parameter.data.to(path.dtype)
                context.enter_context(torch.autocast(self.device.type, dtype=path.dtype))
            return self._run(subject, path.dtype if path.simulated else None, like=reference, scale=scale)

    def _run(
        self,
        subject: _Copy,
        dtype: torch.dtype | None,
        *,
        like: _Pass | None = None,
        scale: float = 1.0,
    ) -> _Pass:
        """Forward and backward: without `like` from the loss, else from its gradient at the cut."""
        model = subject.model
        for module in subject.modules().values():
            module.train(False)
        batch = in_format(self.batch, dtype, rounding=like is not None)
        calls: list[_Call] = []
        with _recorded(model) as records, _cut(model, self.cut, calls, like):
            loss = subject.loss(model, batch)
            (loss * scale).backward(retain_graph=True)  # a router's own loss reaches below the cut
        for place, call in enumerate(calls):
            upstream = (like.calls[place] if like is not None else call).upstream()
            gradients = {
                real: gradient.to(real.dtype) * scale
                for real, gradient in zip(call.real, upstream, strict=True)
                if gradient is not None and real.requires_grad
            }
            torch.autograd.backward(list(gradients), list(gradients.values()))
        found = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad / scale).double().cpu()
            for name, p in subject.parameters()
            if p.requires_grad
        }
        with torch.no_grad():
            outputs = self.readout(model, calls[0].real[0]).detach().double().cpu()
        choices = [
            [tuple(sorted(row)) for routing in record for row in routing.chosen.tolist()]
            for record in records
        ]
        return _Pass(float(loss.detach()), found, outputs, choices, calls)


def _row(name: str, wanted: torch.Tensor, found: torch.Tensor) -> ComparisonRow:
    reference, norm = float(wanted.norm()), float(found.norm())
    if reference == 0 or norm == 0:
        cosine = float(reference == norm)
    else:
        cosine = float(torch.dot((wanted / reference).flatten(), (found / norm).flatten()))
    return ComparisonRow(name, reference, norm, cosine if math.isfinite(norm) else math.nan)


@contextlib.contextmanager
def _cut(model: nn.Module, method: str, calls: list[_Call], like: _Pass | None) -> Iterator[None]:
    """Let the loss see leaves: copies of what the model gives, or of what it gave in the reference."""
    original = getattr(model, method)

    def replaced(*arguments: Any, **named: Any) -> Any:  # Any: whatever the method takes and gives
        found = original(*arguments, **named)
        if not torch.is_grad_enabled():
            return found  # a reference model's opinion, say: nothing goes back through it
        real = tensors_of(found)
        values = real if like is None else like.calls[len(calls)].leaves
        leaves = [
            value.detach().to(tensor.dtype).requires_grad_(tensor.is_floating_point())
            for tensor, value in zip(real, values, strict=True)
        ]
        calls.append(_Call(real, leaves))
        given = iter(leaves)
        return mapped(found, lambda _: next(given))

    object.__setattr__(model, method, replaced)
    try:
        yield
    finally:
        object.__delattr__(model, method)


@contextlib.contextmanager
def _recorded(model: nn.Module) -> Iterator[list[list[Any]]]:  # Any: what a router records
    """What the routers of a model choose in a `with` block: of those that have a `record`."""
    routers: list[Any] = [module for module in model.modules() if hasattr(module, "record")]
    records: list[list[Any]] = [[] for _ in routers]
    for router, record in zip(routers, records, strict=True):
        router.record = record
    try:
        yield records
    finally:
        for router in routers:
            router.record = None


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
