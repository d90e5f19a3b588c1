"""Sharded checkpoints written by all ranks, as safetensors files that torch's DCP can read.

The files are written by `whet.storage`, because DCP's writer pickles its plans and metadata. The metadata of
each safetensors file describes its shards.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from whet.errors import CheckpointError, StorageError
from whet.model_io.sharded_tensors import SHARD_FILE, read_tensor_infos
from whet.parallel import object_exchange
from whet.parallel.object_exchange import ProcessGroup
from whet.storage import (
    FileRecord,
    create_directory_atomically,
    file_sha256,
    write_manifest,
    write_safetensors,
    write_text,
)


def write_sharded(
    path: Path, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str], *, group: ProcessGroup = None
) -> None:
    """Write a checkpoint directory atomically; every rank must call this.

    Each rank writes its shards and reads them back; one rank writes the replicated tensors. The first rank
    creates the directory, adds the texts and the manifest, and renames it when all ranks have finished. If
    any rank fails, all ranks raise the StorageError, and the directory is removed.

    Args:
        path: the checkpoint directory; an existing one is replaced.
        tensors: the tensors by name, sharded (DTensor) or replicated.
        texts: the contents of further files by name.
        group: the ranks that write.
    """
    with contextlib.ExitStack() as stack:
        staging = Path(
            run_on_first_rank(
                lambda: str(stack.enter_context(create_directory_atomically(path, replace=True))), group
            )
        )
        parts = {name: local_shard(tensor) for name, tensor in tensors.items()}
        parts = {name: part for name, part in parts.items() if part.numel() or not tensors[name].numel()}
        offsets = {name: _offset(tensor) for name, tensor in tensors.items()}
        assigned, rank = _assign_parts(parts, offsets, group), dist.get_rank(group)
        files = _on_all(lambda: _write_shard(staging, assigned, offsets, rank), path, group)

        def finish() -> None:
            _check_complete(staging, tensors)
            written = {name: FileRecord(**fields) for shard in files for name, fields in shard.items()}
            written |= {name: write_text(staging / name, text) for name, text in texts.items()}
            write_manifest(staging, written)
            stack.close()

        run_on_first_rank(finish, group)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_shard(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded like `tensor`, with `part` (on any device) as this rank's shard."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part


def run_on_first_rank(do: Callable[[], Any], group: ProcessGroup) -> Any:  # Any: JSON values
    """Call `do` on the first rank; return its result, or raise its error, on all ranks."""
    result, failure = None, None
    if dist.get_rank(group) == 0:
        try:
            result = do()
        except Exception as error:
            failure = object_exchange.describe_error(error)
    result, failure = object_exchange.broadcast([result, failure], group)
    if failure is not None:
        raise object_exchange.restore_error(failure)
    return result


def _on_all(do: Callable[[], Any], path: Path, group: ProcessGroup) -> list[Any]:  # Any: JSON values
    """Call `do` on every rank; return the results of all ranks, or raise the first error, on all ranks."""
    result, failure = None, None
    try:
        result = do()
    except Exception as error:
        failure = object_exchange.describe_error(_add_rank(error, dist.get_rank(group), path))
    outcomes = object_exchange.gather([result, failure], group)
    for _, failed in outcomes:
        if failed is not None:
            raise object_exchange.restore_error(failed)
    return [each for each, _ in outcomes]


def _add_rank(error: Exception, rank: int, path: Path) -> Exception:
    if isinstance(error, OSError):
        return StorageError(f"{path} could not be written by rank {rank}: {error.strerror or error}")
    if isinstance(error, StorageError):
        return StorageError(f"rank {rank}: {error.message}", hint=error.hint)
    return error


def _check_complete(staging: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless the written files contain every tensor in its full shape."""
    stored = read_tensor_infos(staging)
    for name, tensor in tensors.items():
        if name not in stored or stored[name].shape != tensor.shape:
            raise CheckpointError(f"{staging}: {name} was not written completely")


def _write_shard(
    staging: Path, parts: Mapping[str, torch.Tensor], offsets: Mapping[str, Sequence[int]], rank: int
) -> dict[str, dict[str, Any]]:  # Any: the fields of a Written
    """Write this rank's file and read it back."""
    if not staging.is_dir():
        raise StorageError(
            f"{staging.parent} on this rank is not the directory that the first rank writes to",
            hint="set run.dir to a file system that all nodes share",
        )
    if not parts:
        return {}
    path = staging / SHARD_FILE.format(rank + 1)
    sharding = {name: {"saved_offsets": list(offsets[name])} for name in parts}
    metadata = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0"}
    written = write_safetensors(path, parts, metadata=metadata)
    _verify(path, written, names=set(parts))
    return {path.name: vars(written)}


def _assign_parts(
    parts: Mapping[str, torch.Tensor], offsets: Mapping[str, Sequence[int]], group: ProcessGroup
) -> dict[str, torch.Tensor]:
    """Return the parts that this rank writes; the rank with the least to write writes replicated parts."""
    sizes = object_exchange.gather(
        {name: [offsets[name], part.nbytes] for name, part in parts.items()}, group
    )
    owners: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, rank_parts in enumerate(sizes):
        for name, (offset, _) in rank_parts.items():
            owners[name, tuple(offset)].append(rank)
    load, names = [0] * len(sizes), set[str]()
    for (name, _), ranks in sorted(owners.items()):
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += sizes[writer][name][1]
        names |= {name} if writer == dist.get_rank(group) else set()
    return {name: part for name, part in parts.items() if name in names}


def _offset(tensor: torch.Tensor) -> Sequence[int]:
    """Return the offset of this rank's shard in the full tensor, one value per dimension."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(offset)


def _verify(path: Path, written: FileRecord, *, names: set[str]) -> None:
    """Read a file back, and raise StorageError unless it is what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            has_all_names = set(file.keys()) == names
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} cannot be read back: {error}") from error
    if not has_all_names or file_sha256(path) != written.sha256:
        raise StorageError(f"{path} differs from the data that was written to it")
