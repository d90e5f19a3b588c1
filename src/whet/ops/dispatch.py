"""Which implementation of an operation runs: whether Triton kernels work, and which device is planned for."""

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar

import torch

log = logging.getLogger("whet")


@functools.cache
def kernels_work() -> bool:
    """Whether Triton can build kernels here; else plain torch is used, more slowly, and a line says so."""
    problem = kernels_problem()
    if problem is not None:
        log.warning("slower than it could be: Triton cannot build kernels on this machine (%s)", problem)
    return problem is None


def kernels_problem() -> str | None:
    """Why Triton, which comes with torch for CUDA, cannot build kernels; often a C compiler is missing."""
    try:
        from whet.ops.kernels.fused_decode_triton import silu_gate_on_gpu

        one = torch.ones(1, 1, device="cuda")
        silu_gate_on_gpu(one, one)
    except Exception as error:  # whatever a machine may lack
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


_planned: ContextVar[str | None] = ContextVar("planned device", default=None)


@contextlib.contextmanager
def planned_for(device: str) -> Iterator[None]:
    """Fake tensors are taken to be on such a device, whatever they say."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def device_type(tensor: torch.Tensor) -> str:
    """The kind of device that a tensor is on, or is planned to be on."""
    return _planned.get() or tensor.device.type


def is_plan() -> bool:
    """Whether tensors have no numbers, so that kernels of another device cannot be called."""
    return _planned.get() is not None
