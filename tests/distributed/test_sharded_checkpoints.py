"""Checkpoints that several ranks write: complete or absent, and readable by any number of ranks."""

import errno
import json
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distributed.ranks import run_ranks
from whet.errors import CheckpointError, StorageError
from whet.model_io.sharded_tensors import has_shards, read_full_tensors, read_into, read_tensor_infos
from whet.parallel.sharded_checkpoint import write_sharded
from whet.storage import check_manifest, write_safetensors

SHAPES = {"matrix": (5, 3), "row": (1, 7), "vector": (4,), "one": (1,), "odd": (3, 2, 2)}


def full_tensors():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def counters():
    return {"matrix::step": torch.tensor(7.0), "counts": torch.arange(6)}


def sharded(world):
    mesh = init_device_mesh("cpu", (world,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full_tensors().items()}


def save_and_load(rank, path):
    world = dist.get_world_size()
    write_sharded(path, {**sharded(world), **counters()}, {"state.json": "{}\n"})
    restored = {name: torch.zeros_like(tensor) for name, tensor in {**sharded(world), **counters()}.items()}
    read_into(restored, path)
    return {
        name: (tensor.full_tensor() if name in SHAPES else tensor).numpy()
        for name, tensor in restored.items()
    }


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_and_single_process_load_what_ranks_saved(tmp_path, world):
    expected = {**full_tensors(), **counters()}
    path = tmp_path / "checkpoints" / "step-000001"
    for received in run_ranks(save_and_load, world, path):
        for name, tensor in expected.items():
            assert torch.equal(torch.from_numpy(received[name]), tensor), name
    check_manifest(path)
    assert has_shards(path)
    assert len(list(path.glob("shard-*"))) == world
    loaded = read_full_tensors(path)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["step-000001"]


def load_sharded(rank, path):
    restored = {name: torch.zeros_like(tensor) for name, tensor in sharded(dist.get_world_size()).items()}
    read_into(restored, path)
    return {name: tensor.full_tensor().numpy() for name, tensor in restored.items()}


def test_shards_are_loaded_from_full_files(tmp_path):
    write_safetensors(tmp_path / "weights.safetensors", full_tensors())
    write_safetensors(tmp_path / "optimizer.safetensors", counters())
    for received in run_ranks(load_sharded, 2, tmp_path):
        for name, tensor in full_tensors().items():
            assert torch.equal(torch.from_numpy(received[name]), tensor), name


def save_rank_values(rank, path):
    """Save a tensor in which each rank's shard is filled with the rank."""
    mesh = init_device_mesh("cpu", (4,))
    tensor = distribute_tensor(torch.zeros(10, 2), mesh, [Shard(0)])
    tensor.to_local().fill_(rank)
    write_sharded(path, {"w": tensor}, {})


def test_loaded_tensor_contains_every_shard(tmp_path):
    run_ranks(save_rank_values, 4, tmp_path / "it")
    loaded = read_full_tensors(tmp_path / "it")["w"]
    assert loaded[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def save_in_two_dimensions(rank, path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensors = {
        "by rows and columns": distribute_tensor(full_tensors()["matrix"], mesh, [Shard(0), Shard(1)]),
        "by rows": distribute_tensor(full_tensors()["matrix"], mesh, [Shard(0), Replicate()]),
    }
    write_sharded(path, tensors, {})


def test_two_dimensional_and_replicated_shards_are_written_once(tmp_path):
    run_ranks(save_in_two_dimensions, 4, tmp_path / "it")
    for tensor in read_full_tensors(tmp_path / "it").values():
        assert torch.equal(tensor, full_tensors()["matrix"])


def fail_on_rank_1(rank, path, code):
    import whet.storage

    def full(operation, file):
        if operation == "fsync" and file.name.startswith("shard-"):
            raise OSError(code, os.strerror(code), str(file))

    write_sharded(path, sharded(2), {})
    if rank == 1:
        whet.storage.before_file_operation = full
    try:
        write_sharded(path, {name: tensor + 1 for name, tensor in sharded(2).items()}, {})
    except StorageError as error:
        return str(error)
    return "no error"


def test_full_disk_on_one_rank_raises_on_all_and_keeps_old_checkpoint(tmp_path):
    path = tmp_path / "it"
    messages = run_ranks(fail_on_rank_1, 2, path, errno.ENOSPC)
    assert messages == [f"{path} could not be written by rank 1: No space left on device"] * 2
    assert torch.equal(read_full_tensors(path)["matrix"], full_tensors()["matrix"])
    check_manifest(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]


def save_elsewhere(rank, path):
    """Save as on a node that does not share the disk of the first node."""
    import whet.parallel.sharded_checkpoint as module

    if rank == 1:
        module.run_on_first_rank, original = (
            lambda do, group: (path / "nowhere") if (result := original(do, group)) is not None else result,
            module.run_on_first_rank,
        )
    try:
        write_sharded(path / "it", sharded(2), {})
    except StorageError as error:
        return str(error)
    return "no error"


def test_ranks_without_shared_disk_raise(tmp_path):
    first, second = run_ranks(save_elsewhere, 2, tmp_path)
    assert first == second
    assert "rank 1" in first
    assert "a file system that all nodes share" in first
    assert list(tmp_path.iterdir()) == []


def test_missing_shard_is_an_error(tmp_path):
    run_ranks(save_rank_values, 4, tmp_path / "it")
    (tmp_path / "it" / "shard-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the shards of w are incomplete"):
        read_tensor_infos(tmp_path / "it")
    with pytest.raises(CheckpointError, match="is missing"):
        check_manifest(tmp_path / "it")


def test_no_pickle_is_written(tmp_path):
    run_ranks(save_rank_values, 4, tmp_path / "it")
    names = sorted(path.name for path in (tmp_path / "it").iterdir())
    assert names == ["MANIFEST.json", *(f"shard-0000{rank}.safetensors" for rank in (1, 2, 3, 4))]
    json.loads((tmp_path / "it" / "MANIFEST.json").read_text())
