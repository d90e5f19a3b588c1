"""Read tensors from a directory of safetensors files, full ones or shards written by several ranks.

Uses torch's distributed checkpoints (DCP). Each process reads only what it needs. A sharded model can be
read from full tensors or from different shards, and a full model from shards.
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

STATE_SEPARATOR = "::"  # separates the name of a weight from the name of its optimizer state
SHARD_FILE = "shard-{:05d}.safetensors"  # the file of a rank, counted from 1


@dataclass(frozen=True)
class TensorInfo:
    """The full shape and the dtype of a stored tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_sharded_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sharded, so that this process has only a part of it."""
    return isinstance(tensor, DTensor)


def has_shards(directory: Path) -> bool:
    """Return whether a checkpoint consists of shards written by several ranks."""
    return any(directory.glob("shard-*.safetensors"))


def read_tensor_infos(directory: Path) -> dict[str, TensorInfo]:
    """Return shape and dtype of every tensor in a directory, by name.

    Raises:
        CheckpointError: If a file cannot be read, or the shards of a tensor are incomplete.
    """
    try:
        metadata = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    tensors = {}
    for name, tensor in metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if stored != math.prod(tensor.size):  # checked before memory of the claimed size is allocated
            raise CheckpointError(f"{directory}: the shards of {name} are incomplete")
        tensors[name] = TensorInfo(tensor.size, tensor.properties.dtype)
    return tensors


def read_into(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Read tensors by name into the given ones. Sharded tensors receive only the part of this process."""
    try:
        with warnings.catch_warnings(action="ignore"):  # DCP warns that this process reads independently
            load(
                {name: tensor.detach() for name, tensor in tensors.items()},
                storage_reader=HuggingFaceStorageReader(str(directory)),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,  # each process reads independently
            )
    except CheckpointException as failed:  # derives from BaseException
        error, _ = next(iter(failed.failures.values()))
        raise CheckpointError(f"{directory} cannot be read: {error}") from error


def read_like(templates: Mapping[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """Return tensors of a directory, sharded like the template of the same name, in the files' dtype."""
    stored = read_tensor_infos(directory)
    tensors = {
        name: torch.empty_like(template, dtype=stored[name].dtype) for name, template in templates.items()
    }
    read_into(tensors, directory)
    return tensors


def read_full_tensors(directory: Path, is_selected: Callable[[str], bool] = bool) -> dict[str, torch.Tensor]:
    """Return full tensors of a directory on the CPU: all, or those whose names are selected."""
    tensors = {
        name: torch.empty(stored.shape, dtype=stored.dtype)
        for name, stored in read_tensor_infos(directory).items()
        if is_selected(name)
    }
    read_into(tensors, directory)
    return tensors
