"""Runs that resume with another number of processes continue as if uninterrupted."""

import json

import pytest
import torch
from safetensors.torch import load_file

import tiny
import whet
from distributed.checks import train_or_resume
from distributed.harness import run_world
from whet.model_io.checkpoint_weights import read_checkpoint_weights
from whet.model_io.sharded_tensors import has_shards
from whet.storage import check_manifest

STEPS = 10


def config(tiny_directory, directory, kind, **sections):
    settings = tiny.run_config(
        tiny_directory,
        directory,
        optim={"lr": 1e-2, "warmup": 2, "clip": 1.0},
        run={"steps": STEPS, "batch_size": 5, "micro_batch_tokens": 256},
        eval={"every": 5},
        checkpoint={"keep": 10},
        **sections,
    )
    return {**settings, "parallel": {"kind": kind}}


def run_next_part(out, size, **arguments):
    if size == 1:
        return [train_or_resume(None, out, **arguments)]
    return run_world(size, "train_or_resume", out=out, timeout=120, **arguments)


def train_in_parts(directory, settings, parts):
    """Train a run in parts on different numbers of processes, and return the results of all steps."""
    losses, records = [], []
    for number, (size, stop_at) in enumerate(parts):
        arguments = {"config": settings} if number == 0 else {"resume_from": str(directory / "runs" / "test")}
        ranks = run_next_part(directory / f"ranks-{number}", size, stop_at=stop_at, **arguments)
        losses += ranks[0]["losses"]
        records += [
            sorted({origin for rank in step for batch in rank for origin in batch})
            for step in zip(*(rank["records"] for rank in ranks), strict=True)
        ]
    return losses, records


def weights(directory):
    (file,) = (directory / "runs" / "test" / "final").glob("*model.safetensors")
    return load_file(file)


def distance(a, b):
    """Return the relative L2 distance of all tensors."""
    assert a.keys() == b.keys()
    squares = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return float((squares / sum(tensor.double().square().sum() for tensor in a.values())).sqrt())


@pytest.mark.parametrize(
    ("kind", "method", "parts"),
    [
        ("fsdp", {"kind": "full"}, [(4, 2), (2, 4), (1, 7), (2, None)]),
        pytest.param(
            "fsdp",
            {"kind": "lora", "rank": 4},
            [(2, 3), (1, 6), (2, None)],
            marks=pytest.mark.slow,
        ),
        pytest.param("ddp", {"kind": "full"}, [(4, 2), (2, 4), (1, 7), (2, None)], marks=pytest.mark.slow),
    ],
)
def test_run_resumes_with_any_number_of_processes(tiny_directory, tmp_path, kind, method, parts):
    single = train_in_parts(
        tmp_path / "single", config(tiny_directory, tmp_path / "single", "none", method=method), [(1, None)]
    )
    losses, records = train_in_parts(
        tmp_path / "many", config(tiny_directory, tmp_path / "many", kind, method=method), parts
    )
    assert records == single[1]  # the same records in every step
    assert losses == pytest.approx(single[0], rel=1e-5)
    assert distance(weights(tmp_path / "single"), weights(tmp_path / "many")) < 1e-6
    checkpoints = tmp_path / "many" / "runs" / "test" / "checkpoints"
    for size, stop_at in parts:
        path = checkpoints / f"step-{stop_at or STEPS:06d}"
        check_manifest(path)
        assert has_shards(path) == (kind == "fsdp" and size > 1)
        assert json.loads((path / "state.json").read_text())["step"] == (stop_at or STEPS)
    steps = [json.loads(row) for row in (checkpoints.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == list(range(1, STEPS + 1))
    assert sum("summary" in row for row in steps) == 1


def test_sharded_checkpoint_can_be_loaded_as_a_model(tiny_directory, tmp_path):
    settings = config(tiny_directory, tmp_path, "fsdp", method={"kind": "full"})
    settings |= {"eval": {}, "run": {**settings["run"], "steps": 2}}
    run_next_part(tmp_path / "ranks", 2, config=settings)
    run = tmp_path / "runs" / "test"
    path = run / "checkpoints" / "step-000002"
    assert has_shards(path)
    stored, _ = whet.load(path, dtype=torch.float32, device="cpu")
    final, _ = whet.load(run, dtype=torch.float32, device="cpu")
    for (name, a), (_, b) in zip(stored.named_parameters(), final.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("method", [{"kind": "full"}, {"kind": "lora", "rank": 4}], ids=["full", "lora"])
def test_final_model_contains_the_shards_of_every_rank(tiny_directory, tmp_path, method):
    settings = config(tiny_directory, tmp_path, "fsdp", method=method)
    settings |= {"eval": {}, "run": {**settings["run"], "steps": 1}}
    run_world(2, "train_and_fill", out=tmp_path / "ranks", config=settings)
    run = tmp_path / "runs" / "test"
    names = {path.name for path in (run / "final").iterdir()}
    assert {"full": "config.json", "lora": "adapter_config.json"}[method["kind"]] in names
    assert not any("shard" in name for name in names)
    for tensor in [
        *weights(tmp_path).values(),
        *read_checkpoint_weights(run / "checkpoints" / "step-000001").values(),
    ]:
        rows = tensor.flatten(1)[:, 0] if tensor.dim() > 1 else tensor
        expected = [float(rank) for rank, part in enumerate(rows.chunk(2)) for _ in part]
        assert rows.tolist() == expected
        assert torch.equal(tensor, rows.view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor))
    whet.load(run, device="cpu")
