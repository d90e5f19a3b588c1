"""Checkpoints that all ranks write together: torch's distributed checkpoints (DCP) in safetensors files.

DCP plans who writes what and says where a shard belongs; the bytes go through whet's one writer. Its usual
metadata file, a pickle, does not exist here: each safetensors file says itself which parts it holds.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from whet.errors import CheckpointError, StorageError
from whet.models.shards import SHARD, stored_tensors
from whet.storage import Written, new_directory, sha256_of, write_manifest, write_safetensors, write_text

Group = dist.ProcessGroup | None  # None: all ranks


def write_sharded(
    path: Path, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str], *, group: Group = None
) -> None:
    """Write a checkpoint directory together, complete or not at all; every rank calls this.

    Each writes its own shards (of what all of them hold, one does) and reads them again; the first rank
    makes the directory, adds the texts and the manifest, and gives it its name when all have written. Where
    anybody fails, everybody gets the StorageError, and nothing is left.
    """
    strange = [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]
    assert not strange, strange  # DCP would write a file that nobody can read, and no error
    with contextlib.ExitStack() as held:
        staging = on_first(lambda: held.enter_context(new_directory(path, replace=True)), group)
        writer = _Writer(staging)
        try:
            save(
                dict(tensors),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
            )
        except CheckpointException as failed:  # not even an Exception
            raise _cause(failed, path) from None

        def finish() -> None:
            _check_whole(staging, tensors)
            files = writer.files | {name: write_text(staging / name, text) for name, text in texts.items()}
            write_manifest(staging, files)
            held.close()

        on_first(finish, group)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of it, unless it is in shards."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, with other numbers here: wherever they are, they stay (on the CPU, say)."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part


def on_first(do: Callable[[], Any], group: Group) -> Any:  # Any: whatever it returns
    """Let the first rank do something; all get its result, or its error."""
    box: list[tuple[Any, Exception | None]] = [(None, None)]
    if dist.get_rank(group) == 0:
        try:
            box = [(do(), None)]
        except Exception as error:
            box = [(None, error)]
    dist.broadcast_object_list(box, group=group, group_src=0)
    result, failure = box[0]
    if failure is not None:
        raise failure
    return result


def _cause(failed: CheckpointException, path: Path) -> Exception:
    """What a rank could not write; the same error on all of them."""
    rank, (error, _) = min(failed.failures.items())
    if isinstance(error, OSError):
        return StorageError(f"{path} could not be written by rank {rank}: {error.strerror or error}")
    if isinstance(error, StorageError):
        return StorageError(f"rank {rank}: {error.message}", hint=error.hint)
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _check_whole(staging: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The files, as a reader sees them, hold every tensor in its full shape."""
    found = stored_tensors(staging)
    for name, tensor in tensors.items():
        if name not in found or found[name].shape != tensor.shape:
            raise CheckpointError(f"{staging}: {name} was not written as a whole")


class _Writer(HuggingFaceStorageWriter):
    """DCP's safetensors storage with whet's writer under it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)
        self.directory = directory
        self.files: dict[str, Written] = {}  # of all ranks, on the first rank, when all have written

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Instead of making the directory: the first rank has."""
        if not self.directory.is_dir():
            raise StorageError(
                f"{self.directory.parent} is not the directory that the first rank writes to",
                hint="set run.dir to a file system that all nodes share",
            )
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's part, as one file, read again."""
        results = []
        if plan.items:
            name = SHARD.format(plan.storage_data["shard_index"])
            tensors: dict[str, torch.Tensor] = {}
            offsets = {}
            for item in plan.items:
                assert item.tensor_data is not None
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                tensors[item.index.fqn] = tensor
                offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
            written = write_safetensors(self.directory / name, tensors, metadata=about)
            _reread(self.directory / name, written, names=set(tensors))
            results = [WriteResult(item.index, written.bytes, (name, written)) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: what all have written."""
        self.files = dict(result.storage_data for each in results for result in each)


def _reread(path: Path, written: Written, *, names: set[str]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            readable = set(file.keys()) == names
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} cannot be read again: {error}") from error
    if not readable or sha256_of(path) != written.sha256:
        raise StorageError(f"{path} does not hold what was written to it")
