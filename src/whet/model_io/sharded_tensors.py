"""Tensors from a directory of safetensors files, whole ones or the shards that several ranks wrote.

Read through torch's distributed checkpoints (DCP), each process what it needs and nothing else: a sharded
model from whole files, a whole model from shards, or shards from other shards.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from whet.errors import CheckpointError

MOMENT = "::"  # in names: between a weight's and what an optimizer remembers of it
SHARD = "shard-{:05d}.safetensors"  # of a rank, counted from 1


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a directory: what it is as a whole."""

    shape: torch.Size
    dtype: torch.dtype


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether this process holds a part of a tensor only."""
    return isinstance(tensor, DTensor)


def has_shards(directory: Path) -> bool:
    """Whether several ranks wrote this checkpoint."""
    return any(directory.glob("shard-*.safetensors"))


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory by its name; an error unless its shards make it whole."""
    try:
        metadata = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    found = {}
    for name, tensor in metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if stored != math.prod(tensor.size):  # before anybody makes room for what a file claims
            raise CheckpointError(f"{directory}: the shards of {name} do not make it whole")
        found[name] = StoredTensor(tensor.size, tensor.properties.dtype)
    return found


def fill(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Read tensors by their names into those given, of which a sharded one gets its own part only."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that it reads on its own
            load(
                {name: tensor.detach() for name, tensor in tensors.items()},
                storage_reader=HuggingFaceStorageReader(str(directory)),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,  # nobody needs to know what the others read
            )
    except CheckpointException as failed:  # not even an Exception
        error, _ = next(iter(failed.failures.values()))
        raise CheckpointError(f"{directory} cannot be read: {error}") from error


def fill_like(likes: Mapping[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """Tensors of a directory, each cut as the one of that name here, in the dtype of the files."""
    stored = stored_tensors(directory)
    found = {name: torch.empty_like(like, dtype=stored[name].dtype) for name, like in likes.items()}
    fill(found, directory)
    return found


def whole_tensors(directory: Path, wanted: Callable[[str], bool] = bool) -> dict[str, torch.Tensor]:
    """Tensors of a directory in one piece, on the CPU: all, or those whose names are wanted."""
    found = {
        name: torch.empty(stored.shape, dtype=stored.dtype)
        for name, stored in stored_tensors(directory).items()
        if wanted(name)
    }
    fill(found, directory)
    return found
