"""Which implementation of an operation runs: fast or plain, with or without Triton, for which device.

What has a choice (a model and its layers, adapters, an optimizer, a trainer) asks for `chosen_paths` once,
when it is built, and keeps the answer. Whether a fast implementation fits some tensors, by their device and
dtype, is asked where it is used.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from whet.errors import ConfigError

log = logging.getLogger("whet")

VARIABLE = "WHET_REFERENCE"


@dataclass(frozen=True)
class Paths:
    """Fast implementations that may be used; without one, plain torch computes the same."""

    explicit_backward: bool = True  # norm, rotation and gate with a backward pass of their own
    attention: bool = True  # packed documents one by one or by varlen kernels, not by a masked square
    shared_prefixes: bool = True  # what documents or prompts begin with alike is computed once
    losses: bool = True  # from hidden states, in chunks, with their gradient: never the full logits
    grouped_experts: bool = True  # one matmul for the tokens of all experts
    fused_lora: bool = True  # base and low-rank matmuls of sibling layers in one autograd function
    quantised: bool = True  # 4-bit weights unpacked by bitsandbytes, and again in the backward pass
    fp8: bool = True  # matmuls in 8 bits, where a config asks for them
    decoding: bool = True  # CUDA graphs, kernels and matmuls for few rows, adapters prepared once
    compile: bool = True  # torch.compile, where a config asks for it
    fused_optimizer: bool = True  # Adam by one kernel
    prefetch: bool = True  # the next step is queued before the metrics of this one are read


FAST = Paths()
REFERENCE = Paths(**dict.fromkeys((field.name for field in dataclasses.fields(Paths)), False))

_paths: ContextVar[Paths | None] = ContextVar("paths", default=None)


def chosen_paths() -> Paths:
    """The implementations for what is built now: those of the surrounding `with` block, or the process's."""
    return _paths.get() or (REFERENCE if _asks_for_reference() else FAST)


def _asks_for_reference() -> bool:
    given = os.environ.get(VARIABLE, "").strip().lower()
    if given not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ConfigError(f"{VARIABLE}={given}: it is a switch", hint="set it to 1, or to 0")
    return given in ("1", "true", "yes", "on")


@contextlib.contextmanager
def using(paths: Paths) -> Iterator[None]:
    """Build with these implementations, for the time of a `with` block."""
    token = _paths.set(paths)
    try:
        yield
    finally:
        _paths.reset(token)


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """Build models and trainers that compute with plain torch alone, also after the `with` block.

    No Triton kernels, no explicit backward passes, no shared prefixes, no fused layers, no prefetch: the
    oracle of every fast path, and the first thing to try where a result looks wrong. It is slower and takes
    more memory. What is built outside of the block is not affected. `WHET_REFERENCE=1` selects it for a
    whole process.
    """
    with using(REFERENCE):
        yield


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
