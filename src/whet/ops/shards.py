"""Tensors that ranks hold in parts (torch's DTensor), as wholes and back."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole_tensors(tensors: Mapping[str, torch.Tensor], *, keep: bool = True) -> dict[str, torch.Tensor]:
    """The same with every tensor whole: those in parts are gathered, by all ranks together, on the host.

    A rank that does not `keep` them takes part, and gets only what it has whole anyway.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor
            continue
        gathered = tensor.full_tensor().detach()
        if keep:
            found[name] = gathered.cpu()
    return found


def part_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor as this rank holds another of its shape."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole.to(like.device)
    # every rank has the whole: nothing is sent
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
