"""Comparison of a model's gradients between dtypes, on one batch with the same weights.

The model is split at a boundary: the output of `hidden` (language model) or `decide` (tabular model). Every
dtype starts its backward pass from the reference's gradient at the boundary, and computes the part above it
(the head) from the reference's activations. So a different loss cannot hide a difference between gradients,
and a lost upstream gradient cannot make a comparison of zeros with zeros.
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
from whet.studies.simulated_dtypes import convert_batch, map_tensors, simulate_dtype, tensors_in

LossFunction = Callable[[Any, Batch], torch.Tensor]  # Any: the model; the function may have trainable `heads`
Readout = Callable[[Any, Any], torch.Tensor]  # Any: a model and its output at the boundary
Verdict = Literal["fine", "moderate", "major"]

VERDICTS: tuple[Verdict, ...] = ("fine", "moderate", "major")
COSINE = 0.99  # minimum cosine similarity of gradients
_LOSS_SCALES = (
    2.0**16,
    2.0**12,
    2.0**8,
    2.0**4,
    1.0,
)  # loss scales for fp16; the first that does not overflow is used
_DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class ComputePath:
    """A dtype to compute in: native on the device, or simulated in fp32 by rounding every value."""

    name: str
    dtype: torch.dtype
    simulated: bool = False
    tf32: bool = False


def paths_on(device: torch.device) -> list[ComputePath]:
    """Return the dtypes that a device supports, then the simulated ones."""
    native = [ComputePath("bf16", torch.bfloat16), ComputePath("fp16", torch.float16)]
    if device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            native = native[1:]
        if torch.cuda.get_device_capability(device) >= (8, 0):
            native.insert(0, ComputePath("tf32", torch.float32, tf32=True))
    elif device.type == "cpu":
        native.insert(0, ComputePath("fp32", torch.float32))
    simulated = [ComputePath(f"sim-{path.name}", path.dtype, simulated=True) for path in native[-2:]]
    return [*native, *simulated]


@dataclass(frozen=True)
class ComparisonRow:
    """The gradient of one parameter compared with the reference."""

    name: str
    reference: float  # gradient norm of the reference
    norm: float
    cosine: float

    @property
    def ratio(self) -> float:
        """norm / reference; 1 if both are zero; infinite if only the reference is or a norm is non-finite."""
        if not (math.isfinite(self.norm) and math.isfinite(self.reference)):
            return math.inf
        if self.reference > 0:
            return self.norm / self.reference
        return 1.0 if self.norm == 0 else math.inf

    @property
    def factor(self) -> float:
        """The factor, at least 1, by which the norm is too large or too small."""
        return self.ratio if self.ratio >= 1 else (1 / self.ratio if self.ratio else math.inf)

    @property
    def delta(self) -> float:
        """The absolute difference of the norms."""
        return abs(self.norm - self.reference)

    @property
    def relative(self) -> float:
        """The absolute difference of the norms divided by the reference norm."""
        return self.delta / max(abs(self.reference), 1e-12)

    @property
    def verdict(self) -> Verdict:
        """The verdict by the factor; at least moderate if the cosine is low or NaN."""
        if not self.factor <= 5:
            return "major"
        return "fine" if self.factor <= 2 and self.cosine >= COSINE else "moderate"


@dataclass(frozen=True)
class PathResult:
    """The gradients, outputs and routing of one dtype compared with the reference."""

    path: ComputePath
    rows: list[ComparisonRow]
    largest_difference: float  # of the logits or the outputs
    choices: list[list[tuple[int, ...]]]  # sorted expert indices by router and row
    divergent: list[tuple[int, int]]  # (router, row) whose experts differ from the reference
    loss_scale: float = 1.0

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all parameters."""
        return max((row.verdict for row in self.rows), key=VERDICTS.index, default="fine")

    @property
    def worst(self) -> ComparisonRow:
        """The parameter with the largest deviation."""
        return max(self.rows, key=lambda row: (row.factor, -row.cosine if row.cosine == row.cosine else 2))

    def parameters_with(self, verdict: Verdict) -> list[str]:
        """Return the names of the parameters with a verdict."""
        return [row.name for row in self.rows if row.verdict == verdict]


@dataclass(frozen=True)
class Diagnosis:
    """All dtypes compared with the reference."""

    reference: str  # its dtype
    batch: int  # rows, or supervised tokens
    parameters: int
    loss: float
    choices: list[list[tuple[int, ...]]]
    results: list[PathResult]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all dtypes."""
        return max((result.verdict for result in self.results), key=VERDICTS.index)

    @property
    def routed(self) -> int:
        """The number of routing decisions."""
        return sum(map(len, self.choices))


@dataclass
class _Pass:
    """The results of a forward and a backward pass."""

    loss: float
    gradients: dict[str, torch.Tensor]
    outputs: torch.Tensor
    choices: list[list[tuple[int, ...]]]
    calls: list["_Call"] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        return all(bool(g.isfinite().all()) for g in self.gradients.values())


@dataclass
class _Call:
    """One call at the boundary: the real outputs, and the leaf tensors that the loss read instead."""

    real: list[torch.Tensor]
    leaves: list[torch.Tensor]

    def upstream(self) -> list[torch.Tensor | None]:
        return [leaf.grad for leaf in self.leaves]


@dataclass(frozen=True)
class _Copy:
    """A private copy of the model and the loss for one dtype."""

    model: nn.Module
    loss: LossFunction

    @classmethod
    def create(cls, model: nn.Module, loss: LossFunction, dtype: torch.dtype) -> "_Copy":
        copied = cls(*copy.deepcopy((model, loss)))
        for module in copied.modules().values():
            module.to(dtype)
        return copied

    def modules(self) -> dict[str, nn.Module]:
        """Return the model and the trained modules of the loss, by the prefix of their parameter names."""
        heads = getattr(self.loss, "heads", None)
        return {"": self.model} if heads is None else {"": self.model, "heads.": heads}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, module in self.modules().items():
            for name, parameter in module.named_parameters():
                yield prefix + name, parameter


class DtypeComparison:
    """Compares the gradients of one model, batch and loss between dtypes."""

    def __init__(
        self, model: nn.Module, batch: Batch, loss: LossFunction, *, boundary: str, readout: Readout
    ) -> None:
        self.model = model
        self.batch = batch
        self.loss = loss
        self.boundary = boundary
        self.readout = readout
        self.device = next(model.parameters()).device

    def diagnose(self, paths: Sequence[ComputePath] | None = None) -> Diagnosis:
        """Compare dtypes with fp64 on a CPU (fp32 if a layer does not support it), with fp32 elsewhere."""
        reference, dtype = self._reference()
        if not any(bool(gradient.any()) for gradient in reference.gradients.values()):
            raise DataError(
                "all gradients of this batch are zero, so they cannot be compared",
                hint="use a larger batch, or one whose completions have different rewards",
            )
        selected = paths_on(self.device) if paths is None else paths
        results = [self._compare(path, reference) for path in selected if path.tf32 or path.dtype != dtype]
        return Diagnosis(
            _DTYPE_NAMES[dtype],
            self.batch.supervised,
            sum(gradient.numel() for gradient in reference.gradients.values()),
            reference.loss,
            reference.choices,
            results,
        )

    def _reference(self) -> tuple[_Pass, torch.dtype]:
        if self.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # a layer or a teacher that mixes fp64 with fp32
                return self._run(self._copy(torch.float64), torch.float64), torch.float64
        return self._run(self._copy(torch.float32), torch.float32), torch.float32

    def _copy(self, dtype: torch.dtype) -> _Copy:
        return _Copy.create(self.model, self.loss, dtype)

    def _compare(self, path: ComputePath, reference: _Pass) -> PathResult:
        result, scale = self._run_path(path, reference), 1.0
        if path.dtype == torch.float16 and not path.simulated:
            for scale in _LOSS_SCALES:
                result = self._run_path(path, reference, scale=scale)
                if result.is_finite or not bool(result.outputs.isfinite().all()):
                    break
        rows = [
            _compare_gradients(name, gradient, result.gradients[name])
            for name, gradient in reference.gradients.items()
        ]
        difference = (result.outputs - reference.outputs).abs()
        largest = float(difference.max()) if bool(difference.isfinite().all()) else math.inf
        pairs = enumerate(zip(reference.choices, result.choices, strict=True))
        divergent = [
            (router, row)
            for router, (expected, actual) in pairs
            for row, (expected_experts, experts) in enumerate(zip(expected, actual, strict=True))
            if expected_experts != experts
        ]
        return PathResult(path, rows, largest, result.choices, divergent, scale)

    def _run_path(self, path: ComputePath, reference: _Pass, *, scale: float = 1.0) -> _Pass:
        subject = self._copy(torch.float32)
        with contextlib.ExitStack() as stack:
            if path.simulated:
                for module in subject.modules().values():
                    stack.enter_context(simulate_dtype(module, path.dtype))
            elif path.tf32:
                stack.enter_context(_tf32())
            elif path.dtype != torch.float32:
                for _, parameter in subject.parameters():
                    if not parameter.requires_grad:  # frozen base weights are stored in the dtype itself
                        parameter.data = parameter.data.to(path.dtype)
                stack.enter_context(torch.autocast(self.device.type, dtype=path.dtype))
            return self._run(
                subject, path.dtype if path.simulated else None, reference=reference, scale=scale
            )

    def _run(
        self,
        subject: _Copy,
        dtype: torch.dtype | None,
        *,
        reference: _Pass | None = None,
        scale: float = 1.0,
    ) -> _Pass:
        """Run forward and backward, from the loss or from the reference's gradient at the boundary."""
        model = subject.model
        for module in subject.modules().values():
            module.train(False)
        batch = convert_batch(self.batch, dtype, rounding=reference is not None)
        calls: list[_Call] = []
        with _record_routing(model) as records, _split_graph(model, self.boundary, calls, reference):
            loss = subject.loss(model, batch)
            (loss * scale).backward(retain_graph=True)  # router losses have gradients below the boundary
        for index, call in enumerate(calls):
            upstream = (reference.calls[index] if reference is not None else call).upstream()
            seeds = {
                real: gradient.to(real.dtype) * scale
                for real, gradient in zip(call.real, upstream, strict=True)
                if gradient is not None and real.requires_grad
            }
            torch.autograd.backward(list(seeds), list(seeds.values()))
        gradients = {
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
        return _Pass(float(loss.detach()), gradients, outputs, choices, calls)


def _compare_gradients(name: str, expected: torch.Tensor, actual: torch.Tensor) -> ComparisonRow:
    reference, norm = float(expected.norm()), float(actual.norm())
    if reference == 0 or norm == 0:
        cosine = float(reference == norm)
    else:
        cosine = float(torch.dot((expected / reference).flatten(), (actual / norm).flatten()))
    return ComparisonRow(name, reference, norm, cosine if math.isfinite(norm) else math.nan)


@contextlib.contextmanager
def _split_graph(
    model: nn.Module, method: str, calls: list[_Call], reference: _Pass | None
) -> Iterator[None]:
    """Replace a method's outputs by leaves: copies of its outputs, or of the reference's outputs if given."""
    original = getattr(model, method)

    def wrapper(*args: Any, **kwargs: Any) -> Any:  # Any: the signature of the method
        output = original(*args, **kwargs)
        if not torch.is_grad_enabled():
            return output  # no backward pass, e.g. of a reference model
        real = tensors_in(output)
        values = real if reference is None else reference.calls[len(calls)].leaves
        leaves = [
            value.detach().to(tensor.dtype).requires_grad_(tensor.is_floating_point())
            for tensor, value in zip(real, values, strict=True)
        ]
        calls.append(_Call(real, leaves))
        remaining = iter(leaves)
        return map_tensors(output, lambda _: next(remaining))

    object.__setattr__(model, method, wrapper)
    try:
        yield
    finally:
        object.__delattr__(model, method)


@contextlib.contextmanager
def _record_routing(model: nn.Module) -> Iterator[list[list[Any]]]:  # Any: a router's records
    """Yield the routing decisions in a `with` block, one list per router that has `routing_records`."""
    routers: list[Any] = [module for module in model.modules() if hasattr(module, "routing_records")]
    records: list[list[Any]] = [[] for _ in routers]
    for router, record in zip(routers, records, strict=True):
        router.routing_records = record
    try:
        yield records
    finally:
        for router in routers:
            router.routing_records = None


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
