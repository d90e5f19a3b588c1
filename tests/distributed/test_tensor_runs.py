"""Tensor-parallel runs, combined with FSDP2."""

import pytest
import torch
from safetensors.torch import load_file

import tiny
from distributed.checks import train_or_resume
from distributed.harness import run_world
from distributed.test_resume import distance
from whet.model_io.sharded_tensors import has_shards


def config(tiny_directory, directory, steps, **parallel):
    settings = tiny.run_config(
        tiny_directory,
        directory,
        method={"kind": "full"},
        optim={"lr": 1e-3, "warmup": 2, "clip": 1.0},
        run={"steps": steps, "batch_size": 5, "micro_batch_tokens": 256},
        eval={"every": 10},
        checkpoint={"keep": 10},
    )
    return {**settings, "parallel": parallel}


def weights(directory):
    return load_file(directory / "runs" / "test" / "final" / "model.safetensors")


@pytest.mark.parametrize(("steps", "stop_at"), [(6, 4), pytest.param(20, 12, marks=pytest.mark.slow)])
def test_two_by_two_ranks_equal_one_and_fewer_can_resume(tiny_directory, tmp_path, steps, stop_at):
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    expected = train_or_resume(None, single, config=config(tiny_directory, single, steps, kind="none"))
    ranks = run_world(
        *(4, "train_or_resume"),
        out=sharded / "first",
        timeout=120,
        config=config(tiny_directory, sharded, steps, kind="fsdp", tensor=2),
        stop_at=stop_at,
    )
    run = sharded / "runs" / "test"
    assert has_shards(run / "checkpoints" / f"step-{stop_at:06d}")
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"][:stop_at], rel=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"][:stop_at], rel=1e-4)
        assert rank["evaluations"][0]["eval_loss"] == pytest.approx(expected["evaluations"][0]["eval_loss"])
        assert rank["hashes"] == ranks[0]["hashes"]
    assert ranks[0]["records"] == ranks[1]["records"]  # of one tensor-parallel group
    assert ranks[0]["records"] != ranks[2]["records"]
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("tensor: 2", "tensor: 1"))
    run_world(2, "train_or_resume", out=sharded / "second", timeout=120, resume_from=str(run))
    assert distance(weights(single), weights(sharded)) < 1e-6


@pytest.mark.slow
def test_tensor_parallel_without_data_parallel(tiny_directory, tmp_path):
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    train_or_resume(None, single, config=config(tiny_directory, single, 20, kind="none"))
    run_world(
        *(2, "train_or_resume"),
        out=sharded / "out",
        config=config(tiny_directory, sharded, 20, kind="fsdp", tensor=2),
    )
    assert distance(weights(single), weights(sharded)) < 1e-6
    assert all(tensor.dtype == torch.float32 for tensor in weights(sharded).values())
