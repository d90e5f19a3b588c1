"""Simulated number formats: values rounded to one, and computed with in another."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from whet.data.batches import Batch, Column


class _Rounded(torch.autograd.Function):
    """A tensor rounded to a format, kept in its own; the gradient goes straight through."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # Any: autograd's context
        """Rounded."""
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        """Unchanged."""
        return gradients[0], None


@contextlib.contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round every weight now, and in a `with` block what goes into and comes out of every module."""

    def round_all(value: Any) -> Any:  # Any: what modules take and give
        return mapped(value, lambda x: _Rounded.apply(x, dtype) if x.is_floating_point() else x)

    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda _, given: round_all(given)))
        hooks.append(module.register_forward_hook(lambda _, __, found: round_all(found)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_format(batch: Batch, dtype: torch.dtype | None, *, rounding: bool) -> Batch:
    """A batch whose numbers are in a format: widened to it, or with `rounding` rounded to it in fp32."""
    if dtype is None:
        return batch

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype).float() if rounding else tensor.to(dtype)

    columns = {
        name: column if name == "outcomes" else Column(converted(column.tensor), column.axis)
        for name, column in batch.columns.items()
    }
    weights = None if batch.weights is None else converted(batch.weights)
    return dataclasses.replace(batch, weights=weights, columns=columns)


def tensors_of(value: Any) -> list[torch.Tensor]:  # Any: as in `mapped`
    """Every tensor in a value, in the order in which `mapped` meets them."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(value, keep)
    return found


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor, or tuples, lists and dataclasses of them, with each tensor changed. Any: one of these."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        changed = [mapped(each, change) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if any(isinstance(part, torch.Tensor) for part in parts.values()):
            return dataclasses.replace(value, **{name: mapped(part, change) for name, part in parts.items()})
    return value
