"""A run that goes on with another number of processes goes on as if nothing had happened."""

import json

import pytest
import torch
from safetensors.torch import load_file

import tiny
import whet
from distributed.checks import train_or_resume
from distributed.harness import run_world
from whet.model_io.checkpoint_weights import checkpoint_weights
from whet.model_io.sharded_tensors import has_shards
from whet.storage import check_manifest

STEPS = 10


def config(tiny_directory, directory, kind, **sections):
    found = tiny.run_config(
        tiny_directory,
        directory,
        optim={"lr": 1e-2, "warmup": 2, "clip": 1.0},
        run={"steps": STEPS, "batch_size": 5, "micro_batch_tokens": 256},
        eval={"every": 5},
        checkpoint={"keep": 10},
        **sections,
    )
    return {**found, "parallel": {"kind": kind}}


def go_on(out, size, **arguments):
    if size == 1:
        return [train_or_resume(None, out, **arguments)]
    return run_world(size, "train_or_resume", out=out, timeout=120, **arguments)


def in_pieces(directory, settings, pieces):
    """A run on another number of processes from time to time: what each step computed, in all."""
    losses, records = [], []
    for number, (size, stop_at) in enumerate(pieces):
        what = {"config": settings} if number == 0 else {"resume_from": str(directory / "runs" / "test")}
        ranks = go_on(directory / f"ranks-{number}", size, stop_at=stop_at, **what)
        losses += ranks[0]["losses"]
        records += [
            sorted({origin for rank in step for batch in rank for origin in batch})
            for step in zip(*(rank["records"] for rank in ranks), strict=True)
        ]
    return losses, records


def weights(directory):
    (file,) = (directory / "runs" / "test" / "final").glob("*model.safetensors")
    return load_file(file)


def distance(one, other):
    """Relative L2 over all numbers."""
    assert one.keys() == other.keys()
    squares = sum((one[name].double() - other[name].double()).square().sum() for name in one)
    return float((squares / sum(tensor.double().square().sum() for tensor in one.values())).sqrt())


@pytest.mark.parametrize(
    ("kind", "method", "pieces"),
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
def test_a_run_goes_on_with_any_number_of_processes(tiny_directory, tmp_path, kind, method, pieces):
    alone = in_pieces(
        tmp_path / "alone", config(tiny_directory, tmp_path / "alone", "none", method=method), [(1, None)]
    )
    losses, records = in_pieces(
        tmp_path / "many", config(tiny_directory, tmp_path / "many", kind, method=method), pieces
    )
    assert records == alone[1]  # the same records in every step
    assert losses == pytest.approx(alone[0], rel=1e-5)
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "many")) < 1e-6
    checkpoints = tmp_path / "many" / "runs" / "test" / "checkpoints"
    for size, stop_at in pieces:
        path = checkpoints / f"step-{stop_at or STEPS:06d}"
        check_manifest(path)
        assert has_shards(path) == (kind == "fsdp" and size > 1)
        assert json.loads((path / "state.json").read_text())["step"] == (stop_at or STEPS)
    steps = [json.loads(row) for row in (checkpoints.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == list(range(1, STEPS + 1))
    assert sum("summary" in row for row in steps) == 1


def test_a_checkpoint_in_shards_can_be_opened_as_a_model(tiny_directory, tmp_path):
    settings = config(tiny_directory, tmp_path, "fsdp", method={"kind": "full"})
    settings |= {"eval": {}, "run": {**settings["run"], "steps": 2}}
    go_on(tmp_path / "ranks", 2, config=settings)
    run = tmp_path / "runs" / "test"
    path = run / "checkpoints" / "step-000002"
    assert has_shards(path)
    stored, _ = whet.load(path, dtype=torch.float32, device="cpu")
    final, _ = whet.load(run, dtype=torch.float32, device="cpu")
    for (name, one), (_, other) in zip(stored.named_parameters(), final.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("method", [{"kind": "full"}, {"kind": "lora", "rank": 4}], ids=["full", "lora"])
def test_what_people_use_holds_the_shards_of_every_rank(tiny_directory, tmp_path, method):
    settings = config(tiny_directory, tmp_path, "fsdp", method=method)
    settings |= {"eval": {}, "run": {**settings["run"], "steps": 1}}
    run_world(2, "train_and_fill", out=tmp_path / "ranks", config=settings)
    run = tmp_path / "runs" / "test"
    names = {path.name for path in (run / "final").iterdir()}
    assert {"full": "config.json", "lora": "adapter_config.json"}[method["kind"]] in names
    assert not any("shard" in name for name in names)
    for tensor in [
        *weights(tmp_path).values(),
        *checkpoint_weights(run / "checkpoints" / "step-000001").values(),
    ]:
        rows = tensor.flatten(1)[:, 0] if tensor.dim() > 1 else tensor
        expected = [float(rank) for rank, part in enumerate(rows.chunk(2)) for _ in part]
        assert rows.tolist() == expected
        assert torch.equal(tensor, rows.view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor))
    whet.load(run, device="cpu")
