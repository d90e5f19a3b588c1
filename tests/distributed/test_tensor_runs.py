"""Runs whose layers are computed by several ranks together, beside FSDP2."""

import pytest
import torch
from safetensors.torch import load_file

import tiny
from distributed.checks import train_or_resume
from distributed.harness import run_world
from distributed.test_resume import distance
from whet.model_io.sharded_tensors import has_shards


def config(tiny_directory, directory, steps, **parallel):
    found = tiny.run_config(
        tiny_directory,
        directory,
        method={"kind": "full"},
        optim={"lr": 1e-3, "warmup": 2, "clip": 1.0},
        run={"steps": steps, "batch_size": 5, "micro_batch_tokens": 256},
        eval={"every": 10},
        checkpoint={"keep": 10},
    )
    return {**found, "parallel": parallel}


def weights(directory):
    return load_file(directory / "runs" / "test" / "final" / "model.safetensors")


@pytest.mark.parametrize(("steps", "stop_at"), [(6, 4), pytest.param(20, 12, marks=pytest.mark.slow)])
def test_two_by_two_ranks_make_the_same_run_and_fewer_go_on_with_it(tiny_directory, tmp_path, steps, stop_at):
    alone, many = tmp_path / "alone", tmp_path / "many"
    expected = train_or_resume(None, alone, config=config(tiny_directory, alone, steps, kind="none"))
    ranks = run_world(
        *(4, "train_or_resume"),
        out=many / "first",
        timeout=120,
        config=config(tiny_directory, many, steps, kind="fsdp", tensor=2),
        stop_at=stop_at,
    )
    run = many / "runs" / "test"
    assert has_shards(run / "checkpoints" / f"step-{stop_at:06d}")
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"][:stop_at], rel=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"][:stop_at], rel=1e-4)
        assert rank["evaluations"][0]["eval_loss"] == pytest.approx(expected["evaluations"][0]["eval_loss"])
        assert rank["hashes"] == ranks[0]["hashes"]
    assert ranks[0]["records"] == ranks[1]["records"]  # neighbours compute the same together
    assert ranks[0]["records"] != ranks[2]["records"]
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("tensor: 2", "tensor: 1"))
    run_world(2, "train_or_resume", out=many / "second", timeout=120, resume_from=str(run))
    assert distance(weights(alone), weights(many)) < 1e-6


@pytest.mark.slow
def test_layers_can_be_cut_with_one_share_of_the_data(tiny_directory, tmp_path):
    alone, many = tmp_path / "alone", tmp_path / "many"
    train_or_resume(None, alone, config=config(tiny_directory, alone, 20, kind="none"))
    run_world(
        *(2, "train_or_resume"),
        out=many / "out",
        config=config(tiny_directory, many, 20, kind="fsdp", tensor=2),
    )
    assert distance(weights(alone), weights(many)) < 1e-6
    assert all(tensor.dtype == torch.float32 for tensor in weights(many).values())
