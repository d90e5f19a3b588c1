"""Checkpoints that all ranks write together: safetensors files in the layout of torch's distributed
checkpoints (DCP), which reads them.

The bytes go through whet's one writer. DCP's own saving pickles its plans and its metadata: here each
safetensors file says itself which parts it holds.
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
from whet.model_io.sharded_tensors import SHARD, stored_tensors
from whet.parallel import object_exchange
from whet.parallel.object_exchange import ProcessGroup
from whet.storage import Written, new_directory, sha256_of, write_manifest, write_safetensors, write_text


def write_sharded(
    path: Path, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str], *, group: ProcessGroup = None
) -> None:
    """Write a checkpoint directory together, complete or not at all; every rank calls this.

    Each writes its own shards (of what all of them hold, one does) and reads them again; the first rank
    makes the directory, adds the texts and the manifest, and gives it its name when all have written. Where
    anybody fails, everybody gets the StorageError, and nothing is left.
    """
    with contextlib.ExitStack() as held:
        staging = Path(on_first(lambda: str(held.enter_context(new_directory(path, replace=True))), group))
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        parts = {name: part for name, part in parts.items() if part.numel() or not tensors[name].numel()}
        offsets = {name: _offset(tensor) for name, tensor in tensors.items()}
        mine, rank = _to_write(parts, offsets, group), dist.get_rank(group)
        files = _on_all(lambda: _write_part(staging, mine, offsets, rank), path, group)

        def finish() -> None:
            _check_whole(staging, tensors)
            written = {name: Written(**fields) for part in files for name, fields in part.items()}
            written |= {name: write_text(staging / name, text) for name, text in texts.items()}
            write_manifest(staging, written)
            held.close()

        on_first(finish, group)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of it, unless it is in shards."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, with other numbers here: wherever they are, they stay (on the CPU, say)."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part


def on_first(do: Callable[[], Any], group: ProcessGroup) -> Any:  # Any: JSON values
    """Let the first rank do something; all get its result, or its error."""
    result, failure = None, None
    if dist.get_rank(group) == 0:
        try:
            result = do()
        except Exception as error:
            failure = object_exchange.describe_error(error)
    result, failure = object_exchange.from_first([result, failure], group)
    if failure is not None:
        raise object_exchange.restore_error(failure)
    return result


def _on_all(do: Callable[[], Any], path: Path, group: ProcessGroup) -> list[Any]:  # Any: JSON values
    """Let every rank do something; all get everyone's result, or the first error of any."""
    result, failure = None, None
    try:
        result = do()
    except Exception as error:
        failure = object_exchange.describe_error(_naming_rank(error, dist.get_rank(group), path))
    everyone = object_exchange.gather([result, failure], group)
    for _, failed in everyone:
        if failed is not None:
            raise object_exchange.restore_error(failed)
    return [each for each, _ in everyone]


def _naming_rank(error: Exception, rank: int, path: Path) -> Exception:
    if isinstance(error, OSError):
        return StorageError(f"{path} could not be written by rank {rank}: {error.strerror or error}")
    if isinstance(error, StorageError):
        return StorageError(f"rank {rank}: {error.message}", hint=error.hint)
    return error


def _check_whole(staging: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The files, as a reader sees them, hold every tensor in its full shape."""
    found = stored_tensors(staging)
    for name, tensor in tensors.items():
        if name not in found or found[name].shape != tensor.shape:
            raise CheckpointError(f"{staging}: {name} was not written as a whole")


def _write_part(
    staging: Path, parts: Mapping[str, torch.Tensor], offsets: Mapping[str, Sequence[int]], rank: int
) -> dict[str, dict[str, Any]]:  # Any: the fields of a Written
    """Write what this rank has to, as one file, and read it again."""
    if not staging.is_dir():
        raise StorageError(
            f"{staging.parent} is not the directory that the first rank writes to",
            hint="set run.dir to a file system that all nodes share",
        )
    if not parts:
        return {}
    path = staging / SHARD.format(rank + 1)
    sharding = {name: {"saved_offsets": list(offsets[name])} for name in parts}
    about = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0"}
    written = write_safetensors(path, parts, metadata=about)
    _reread(path, written, names=set(parts))
    return {path.name: vars(written)}


def _to_write(
    parts: Mapping[str, torch.Tensor], offsets: Mapping[str, Sequence[int]], group: ProcessGroup
) -> dict[str, torch.Tensor]:
    """The parts that this rank writes: of those that several ranks hold, one does, the least busy."""
    sizes = object_exchange.gather(
        {name: [offsets[name], part.nbytes] for name, part in parts.items()}, group
    )
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, held in enumerate(sizes):
        for name, (offset, _) in held.items():
            holders[name, tuple(offset)].append(rank)
    load, mine = [0] * len(sizes), set[str]()
    for (name, _), ranks in sorted(holders.items()):
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += sizes[writer][name][1]
        mine |= {name} if writer == dist.get_rank(group) else set()
    return {name: part for name, part in parts.items() if name in mine}


def _offset(tensor: torch.Tensor) -> Sequence[int]:
    """Where in the whole this rank's part begins."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(offset)


def _reread(path: Path, written: Written, *, names: set[str]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            readable = set(file.keys()) == names
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} cannot be read again: {error}") from error
    if not readable or sha256_of(path) != written.sha256:
        raise StorageError(f"{path} does not hold what was written to it")
