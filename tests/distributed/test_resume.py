"""Runs that stop and resume on more or fewer processes."""

import json

import pytest
import torch
from safetensors.torch import load_file

import tiny
from distributed.checks import recorded_train
from distributed.harness import run_world


def config(tiny_directory, directory, kind, **sections):
    run = {"steps": 8, "batch_size": 5, "micro_batch_tokens": 256}
    method = {"kind": "full"}
    sections = {"method": method, "optim": {"lr": 1e-3}, "checkpoint": {"every": 2, "keep": 9}} | sections
    return tiny.run_config(tiny_directory, directory, **sections, run=run) | {"parallel": {"kind": kind}}


def final(directory):
    return load_file(directory / "runs" / "test" / "final" / "model.safetensors")


def distance(a, b):
    """Return the relative L2 distance of all tensors."""
    squares = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return float((squares / sum(tensor.double().square().sum() for tensor in a.values())).sqrt())


def positions(directory):
    """Return the data position of each checkpoint."""
    checkpoints = {}
    for path in (directory / "runs" / "test" / "checkpoints").glob("step-*"):
        checkpoints[path.name] = json.loads((path / "state.json").read_text())["data"]
    return checkpoints


def switch(directory, kind):
    """Change parallel.kind in the config of an existing run."""
    path = directory / "runs" / "test" / "config.yaml"
    text = path.read_text()
    assert "  kind: ddp" in text or "  kind: fsdp" in text or "  kind: none" in text
    head, _, tail = text.partition("parallel:\n")
    path.write_text(f"{head}parallel:\n  kind: {kind}\n" + tail.partition("\n")[2])


@pytest.fixture(scope="module")
def uninterrupted(tiny_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    recorded_train(config(tiny_directory, directory, "none"))
    return directory


def run_part(size, directory, *, config=None, stop_at=None):
    if size == 1:
        resume_from = None if config is not None else str(directory / "runs" / "test")
        recorded_train(config, resume_from=resume_from, stop_at=stop_at)
        return
    run_world(
        *(size, "run_part"),
        out=directory / f"out-{size}-{stop_at}",
        config=config,
        directory=str(directory),
        stop_at=stop_at,
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("ddp", 2), ("none", 1)),
        (("none", 1), ("fsdp", 2)),
        pytest.param(("fsdp", 2), ("fsdp", 2), marks=pytest.mark.slow),
        pytest.param(("fsdp", 4), ("ddp", 2), marks=pytest.mark.slow),
        pytest.param(("ddp", 4), ("fsdp", 2), marks=pytest.mark.slow),
    ],
)
def test_run_resumes_in_another_world(tiny_directory, tmp_path, uninterrupted, first, second):
    (kind, size), (next_kind, next_size) = first, second
    run_part(size, tmp_path, config=config(tiny_directory, tmp_path, kind), stop_at=3)
    assert not (tmp_path / "runs" / "test" / "final").exists()
    switch(tmp_path, next_kind)
    run_part(next_size, tmp_path)
    assert distance(final(uninterrupted), final(tmp_path)) < 1e-6
    checkpoints = positions(tmp_path)
    assert checkpoints.keys() > positions(uninterrupted).keys()  # and the checkpoint of the stop
    for name, position in positions(uninterrupted).items():
        assert checkpoints[name] == position
    rows = (tmp_path / "runs" / "test" / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, rows) if "loss" in row]
    assert steps == list(range(1, 9))


@pytest.mark.slow
def test_rank_random_state_is_restored(tiny_directory, tmp_path):
    method = {"kind": "lora", "rank": 4, "dropout": 0.3}
    settings = {
        part: config(tiny_directory, tmp_path / part, "ddp", method=method)
        for part in ("uninterrupted", "interrupted")
    }
    run_part(2, tmp_path / "uninterrupted", config=settings["uninterrupted"])
    run_part(2, tmp_path / "interrupted", config=settings["interrupted"], stop_at=3)
    run_part(2, tmp_path / "interrupted")
    a, b = (
        load_file(tmp_path / part / "runs" / "test" / "final" / "adapter_model.safetensors")
        for part in settings
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
