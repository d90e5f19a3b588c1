"""Simulated dtypes: values are rounded to one dtype and computed in another."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from whet.data.batches import Batch, Column


class _Round(torch.autograd.Function):
    """Round a tensor to a dtype and convert it back, with a straight-through gradient."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # Any: autograd's context
        """Return the rounded tensor in its original dtype."""
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        """Return the gradient unchanged."""
        return gradients[0], None


@contextlib.contextmanager
def simulate_dtype(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round every weight, and inside the `with` block also the inputs and outputs of every module."""

    def round_all(value: Any) -> Any:  # Any: inputs or outputs of a module
        return map_tensors(value, lambda x: _Round.apply(x, dtype) if x.is_floating_point() else x)

    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda _, inputs: round_all(inputs)))
        hooks.append(module.register_forward_hook(lambda _, __, output: round_all(output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def convert_batch(batch: Batch, dtype: torch.dtype | None, *, rounding: bool) -> Batch:
    """Convert the floating-point values of a batch to a dtype; with `rounding`, round them and keep fp32."""
    if dtype is None:
        return batch

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype).float() if rounding else tensor.to(dtype)

    columns = {
        name: column if name == "outcomes" else Column(convert(column.tensor), column.axis)
        for name, column in batch.columns.items()
    }
    weights = None if batch.weights is None else convert(batch.weights)
    return dataclasses.replace(batch, weights=weights, columns=columns)


def tensors_in(value: Any) -> list[torch.Tensor]:  # Any: as in `map_tensors`
    """Return every tensor in a value, in the order in which `map_tensors` visits them."""
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, collect)
    return tensors


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to every tensor in a value: a tensor, or tuples, lists and dataclasses of them."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        changed = [map_tensors(each, change) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if any(isinstance(part, torch.Tensor) for part in parts.values()):
            return dataclasses.replace(
                value, **{name: map_tensors(part, change) for name, part in parts.items()}
            )
    return value
