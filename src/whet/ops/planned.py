"""Which device a computation without numbers is planned for, where how it is done depends on that."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

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
