"""Runs that stop and resume on more or fewer processes."""

import sys

import pytest
import torch
from safetensors.torch import load_file

import tiny
from distributed.checks import recorded_train
from distributed.harness import run_world
from whet.config.load_config import load_config
from whet.planning.plan import plan_run

STEPS = 20


def config(tiny_directory, directory, kind, **sections):
    """Three epochs of uneven micro-batches: the ranks have different numbers of them, and some have none."""
    sections = {
        "method": {"kind": "full"},
        "optim": {"lr": 1e-3, "warmup": 2, "clip": 1.0},
        "eval": {"every": 10},
        **sections,
    }
    run = {
        "steps": STEPS,
        "batch_size": 5,
        "micro_batch_tokens": 256,
        "name": kind,
        **sections.pop("run", {}),
    }
    settings = tiny.run_config(tiny_directory, directory, **sections, run=run)
    settings["parallel"] = {"kind": kind}
    return settings


@pytest.fixture(scope="module")
def runs(tiny_directory, tmp_path_factory):
    """Train one full run per kind and world size: {(kind, processes): (directory, results of each rank)}."""
    single = tmp_path_factory.mktemp("single")
    recorder = recorded_train(config(tiny_directory, single, "none"))
    torch.save(recorder.gradient, single / "none.gradient")
    results = {("none", 1): (single, [recorder.results()])}
    for size in (2, 4):
        out = tmp_path_factory.mktemp(f"world-{size}")
        configs = {kind: config(tiny_directory, out, kind) for kind in ("ddp", "fsdp")}
        ranks = run_world(size, "train_and_record", out=out, timeout=120, configs=configs)
        results |= {(kind, size): (out, [each[kind] for each in ranks]) for kind in configs}
    return results


def distance(a, b):
    """Return the relative L2 distance of all tensors."""
    squares = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return float((squares / sum(tensor.double().square().sum() for tensor in a.values())).sqrt())


def weights(directory, kind):
    return load_file(directory / "runs" / kind / "final" / "model.safetensors")


every_world = pytest.mark.parametrize(
    ("kind", "size"), [(kind, size) for kind in ("ddp", "fsdp") for size in (2, 4)]
)


@every_world
def test_weights_losses_and_gradients_equal_one_process(runs, kind, size):
    (directory, [single]), (out, ranks) = runs["none", 1], runs[kind, size]
    assert distance(weights(directory, "none"), weights(out, kind)) < 1e-6
    gradients = [{"g": torch.load(path)} for path in (directory / "none.gradient", out / f"{kind}.gradient")]
    assert distance(*gradients) < 1e-6
    for each in ranks:
        assert each["losses"] == pytest.approx(single["losses"], rel=1e-6)
        assert each["norms"] == pytest.approx(single["norms"], rel=1e-5)


@every_world
def test_ranks_have_identical_weights_after_each_step(runs, kind, size):
    hashes = [each["hashes"] for each in runs[kind, size][1]]
    assert len(hashes[0]) == STEPS
    assert len(set(hashes[0])) == STEPS  # the weights change
    assert all(each == hashes[0] for each in hashes)


@every_world
def test_shares_are_disjoint_and_exhaustive_in_each_step(runs, kind, size):
    [single], ranks = runs["none", 1][1], runs[kind, size][1]
    uneven = 0
    for step in range(STEPS):
        shares = [batch for each in ranks for batch in each["records"][step]]
        assert sorted(shares) == sorted(single["records"][step])
        uneven += len({len(each["records"][step]) for each in ranks}) > 1
    assert uneven


@every_world
def test_evaluations_equal_one_process_on_every_rank(runs, kind, size):
    [single], ranks = runs["none", 1][1], runs[kind, size][1]
    assert len(single["evaluations"]) == 3
    for each in ranks:
        for metrics, expected in zip(each["evaluations"], single["evaluations"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-6)


@every_world
def test_one_rank_writes_the_run(runs, kind, size):
    run = runs[kind, size][0] / "runs" / kind
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in row and '"summary"' not in row for row in rows) == STEPS
    assert sum('"summary"' in row for row in rows) == 1
    assert not list(run.parent.glob(".*"))
    assert (run / "log.txt").read_text().count(f"{kind} on {size} processes") == 1


def test_memory_per_rank_falls_with_world_size(runs):
    [single] = runs["none", 1][1]
    for size in (2, 4):
        sizes = [each["bytes"] for each in runs["fsdp", size][1]]
        print(f"bytes per rank of {size}: {sizes}, single {single['bytes']}")
        assert sum(sizes) < 1.02 * single["bytes"]  # only the step count of each weight is replicated
        assert max(sizes) < 1.1 * single["bytes"] / size
        assert {each["bytes"] for each in runs["ddp", size][1]} == {single["bytes"]}


@every_world
def test_memory_per_rank_equals_the_plan(runs, kind, size):
    directory, ranks = runs[kind, size]
    config = load_config(directory / "runs" / kind / "config.yaml")
    memory = plan_run(config, device="cpu", gpus=size, suggest=False).memory
    size_per_rank = max(each["bytes"] for each in ranks)
    assert memory.weights + memory.adapters + memory.optimizer == pytest.approx(size_per_rank, rel=0.02)


def test_gradient_buckets_overlap_the_last_backward_pass(runs, tiny_directory, tmp_path):
    settings = config(tiny_directory, tmp_path, "ddp")
    ranks = run_world(2, "train_with_small_buckets", out=tmp_path / "out", config=settings)
    for each in ranks:
        assert each["hashes"] == ranks[0]["hashes"]
        assert all(sent == count > 5 for sent, count in each["sent_early"][1:])
    assert distance(weights(runs["none", 1][0], "none"), weights(tmp_path, "ddp")) < 1e-6


def test_metric_receives_answers_of_all_ranks_and_is_computed_once(tiny_directory, tmp_path):
    """Also a random metric, because early stopping must get the same value on all ranks."""
    source = (
        "import os\ndef count(answers, records):\n    return len(answers) * (len(records) == len(answers))\n"
        "def process(answers):\n    return os.getpid()\n"
        "def length(answers):\n    return sum(map(len, answers)) / len(answers)\n"
    )
    (tmp_path / "shared_metrics.py").write_text(source)
    references = {name: f"{tmp_path}/shared_metrics.py:{name}" for name in ("count", "process", "length")}
    settings = {"eval": {"every": 2, "metrics": references, "max_new_tokens": 4}, "run": {"steps": 2}}
    single = recorded_train(config(tiny_directory, tmp_path / "single", "none", **settings)).results()
    shared = config(tiny_directory, tmp_path / "two", "ddp", **settings)
    first, second = run_world(2, "train_or_resume", out=tmp_path / "out", timeout=120, config=shared)
    sys.modules.pop("shared_metrics")
    assert first["evaluations"] == second["evaluations"]
    for metrics, expected in zip(first["evaluations"], single["evaluations"], strict=True):
        assert metrics["eval_count"] == expected["eval_count"] == 6
        assert metrics["eval_length"] == expected["eval_length"]
