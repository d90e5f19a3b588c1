"""Selection of implementations: fast paths or plain PyTorch, with or without Triton, by device.

Models, layers, adapters, optimizers and trainers call `current_paths` once, when they are built, and store
the result. Whether a fast implementation supports the device and dtype of tensors is checked at each call.
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

REFERENCE_VARIABLE = "WHET_REFERENCE"


@dataclass(frozen=True)
class Paths:
    """The enabled fast implementations. If one is disabled, plain PyTorch computes the same result."""

    explicit_backward: bool = True  # norm, RoPE and gate with an explicit backward pass
    attention: bool = True  # packed documents one at a time or by varlen kernels, not by a full mask
    shared_prefixes: bool = True  # a prefix that documents or prompts share is computed once
    losses: bool = True  # losses and their gradients in chunks, without the full logits
    grouped_experts: bool = True  # one matmul for the tokens of all experts
    fused_lora: bool = True  # base and low-rank matmuls of sibling layers in one autograd function
    quantized: bool = True  # bitsandbytes dequantizes 4-bit weights, again in the backward pass
    fp8: bool = True  # fp8 matmuls, if the config enables them
    decoding: bool = True  # CUDA graphs, fused kernels, matmuls for few rows, prepared adapters
    compile: bool = True  # torch.compile, if the config enables it
    fused_optimizer: bool = True  # Adam in one fused kernel
    prefetch: bool = True  # queue the next step before reading the metrics of the current one


FAST = Paths()
REFERENCE = Paths(**dict.fromkeys((field.name for field in dataclasses.fields(Paths)), False))

_paths: ContextVar[Paths | None] = ContextVar("paths", default=None)


def current_paths() -> Paths:
    """Return the fast paths of objects built now: the enclosing `use_paths` block's, or the environment's."""
    return _paths.get() or (REFERENCE if _reference_requested() else FAST)


def _reference_requested() -> bool:
    value = os.environ.get(REFERENCE_VARIABLE, "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ConfigError(
            f"{REFERENCE_VARIABLE}={value} is not a boolean", hint=f"set {REFERENCE_VARIABLE} to 1 or 0"
        )
    return value in ("1", "true", "yes", "on")


@contextlib.contextmanager
def use_paths(paths: Paths) -> Iterator[None]:
    """Use these fast paths for every object built in the `with` block."""
    token = _paths.set(paths)
    try:
        yield
    finally:
        _paths.reset(token)


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """Build models and trainers that use only plain PyTorch, even after the `with` block.

    The reference path has no Triton kernels, explicit backward passes, shared prefixes, fused layers or
    prefetching. It is the test oracle of every fast path, and the first thing to try if a result looks wrong.
    It is slower and needs more memory. Objects built outside the block are not affected.
    `WHET_REFERENCE=1` selects the reference path for the whole process.
    """
    with use_paths(REFERENCE):
        yield


@functools.cache
def can_build_kernels() -> bool:
    """Whether Triton can build kernels on this machine. If it cannot, log one warning."""
    problem = kernel_build_problem()
    if problem is not None:
        log.warning(
            "Triton cannot build kernels on this machine (%s): using slower plain PyTorch instead", problem
        )
    return problem is None


def kernel_build_problem() -> str | None:
    """Return why Triton cannot build kernels, or None. The usual cause is a missing C compiler."""
    try:
        from whet.ops.kernels.fused_decode_triton import silu_gate_on_gpu

        x = torch.ones(1, 1, device="cuda")
        silu_gate_on_gpu(x, x)
    except Exception as error:  # Triton, its compiler and the driver fail in many ways
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


_planned: ContextVar[str | None] = ContextVar("planned device", default=None)


@contextlib.contextmanager
def plan_for_device(device: str) -> Iterator[None]:
    """Treat fake tensors as if they were on this kind of device, in the `with` block."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def device_type(tensor: torch.Tensor) -> str:
    """Return the type of the device that a tensor is on, or is planned for."""
    return _planned.get() or tensor.device.type


def is_planning() -> bool:
    """Whether tensors are fake, as in memory planning, so device kernels cannot be called."""
    return _planned.get() is not None
