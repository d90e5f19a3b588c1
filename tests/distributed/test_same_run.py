"""The same run on 1, 2 and 4 processes: data, losses, gradients, weights and evaluations."""

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
    """Three epochs of uneven micro-batches: shares differ in number, and some ranks have none."""
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
    found = tiny.run_config(tiny_directory, directory, **sections, run=run)
    found["parallel"] = {"kind": kind}
    return found


@pytest.fixture(scope="module")
def runs(tiny_directory, tmp_path_factory):
    """{(kind, processes): (directory, what each rank saw)} of one full run each."""
    alone = tmp_path_factory.mktemp("alone")
    recorder = recorded_train(config(tiny_directory, alone, "none"))
    torch.save(recorder.gradient, alone / "none.gradient")
    found = {("none", 1): (alone, [recorder.results()])}
    for size in (2, 4):
        out = tmp_path_factory.mktemp(f"world-{size}")
        configs = {kind: config(tiny_directory, out, kind) for kind in ("ddp", "fsdp")}
        ranks = run_world(size, "train_and_record", out=out, timeout=120, configs=configs)
        found |= {(kind, size): (out, [each[kind] for each in ranks]) for kind in configs}
    return found


def distance(one, other):
    """Relative L2 over all numbers."""
    squares = sum((one[name].double() - other[name].double()).square().sum() for name in one)
    return float((squares / sum(tensor.double().square().sum() for tensor in one.values())).sqrt())


def weights(directory, kind):
    return load_file(directory / "runs" / kind / "final" / "model.safetensors")


every_world = pytest.mark.parametrize(
    ("kind", "size"), [(kind, size) for kind in ("ddp", "fsdp") for size in (2, 4)]
)


@every_world
def test_weights_losses_and_gradients_are_those_of_one_process(runs, kind, size):
    (alone, [one]), (out, ranks) = runs["none", 1], runs[kind, size]
    assert distance(weights(alone, "none"), weights(out, kind)) < 1e-6
    gradients = [{"g": torch.load(path)} for path in (alone / "none.gradient", out / f"{kind}.gradient")]
    assert distance(*gradients) < 1e-6
    for each in ranks:
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert each["norms"] == pytest.approx(one["norms"], rel=1e-5)


@every_world
def test_ranks_hold_identical_weights_after_each_step(runs, kind, size):
    hashes = [each["hashes"] for each in runs[kind, size][1]]
    assert len(hashes[0]) == STEPS
    assert len(set(hashes[0])) == STEPS  # they do change
    assert all(each == hashes[0] for each in hashes)


@every_world
def test_shares_are_disjoint_exhaustive_and_those_of_the_same_steps(runs, kind, size):
    [one], ranks = runs["none", 1][1], runs[kind, size][1]
    uneven = 0
    for step in range(STEPS):
        shares = [batch for each in ranks for batch in each["records"][step]]
        assert sorted(shares) == sorted(one["records"][step])
        uneven += len({len(each["records"][step]) for each in ranks}) > 1
    assert uneven


@every_world
def test_evaluations_are_those_of_one_process_on_every_rank(runs, kind, size):
    [one], ranks = runs["none", 1][1], runs[kind, size][1]
    assert len(one["evaluations"]) == 3
    for each in ranks:
        for mine, alone in zip(each["evaluations"], one["evaluations"], strict=True):
            assert mine == pytest.approx(alone, rel=1e-6)


@every_world
def test_one_rank_writes_one_run(runs, kind, size):
    run = runs[kind, size][0] / "runs" / kind
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in row and '"summary"' not in row for row in rows) == STEPS
    assert sum('"summary"' in row for row in rows) == 1
    assert not list(run.parent.glob(".*"))
    assert (run / "log.txt").read_text().count(f"{kind} on {size} processes") == 1


def test_weights_and_moments_a_rank_fall_with_the_world(runs):
    [one] = runs["none", 1][1]
    for size in (2, 4):
        held = [each["bytes"] for each in runs["fsdp", size][1]]
        print(f"bytes a rank of {size}: {held}, alone {one['bytes']}")
        assert sum(held) < 1.02 * one["bytes"]  # nothing is held twice but each weight's count of steps
        assert max(held) < 1.1 * one["bytes"] / size
        assert {each["bytes"] for each in runs["ddp", size][1]} == {one["bytes"]}


@every_world
def test_what_a_rank_holds_is_what_the_plan_says(runs, kind, size):
    directory, ranks = runs[kind, size]
    config = load_config(directory / "runs" / kind / "config.yaml")
    memory = plan_run(config, device="cpu", gpus=size, suggest=False).memory
    held = max(each["bytes"] for each in ranks)
    assert memory.weights + memory.adapters + memory.optimizer == pytest.approx(held, rel=0.02)


def test_gradients_are_sent_in_pieces_while_the_last_backward_pass_runs(runs, tiny_directory, tmp_path):
    settings = config(tiny_directory, tmp_path, "ddp")
    ranks = run_world(2, "train_with_small_buckets", out=tmp_path / "out", config=settings)
    for each in ranks:
        assert each["hashes"] == ranks[0]["hashes"]
        assert all(sent == count > 5 for sent, count in each["sent_early"][1:])
    assert distance(weights(runs["none", 1][0], "none"), weights(tmp_path, "ddp")) < 1e-6


def test_a_metric_sees_the_answers_of_all_ranks_and_is_computed_once(tiny_directory, tmp_path):
    """One that is random, too: early stopping must see the same value everywhere."""
    source = (
        "import os\ndef count(answers, records):\n    return len(answers) * (len(records) == len(answers))\n"
        "def process(answers):\n    return os.getpid()\n"
        "def length(answers):\n    return sum(map(len, answers)) / len(answers)\n"
    )
    (tmp_path / "shared_metrics.py").write_text(source)
    named = {name: f"{tmp_path}/shared_metrics.py:{name}" for name in ("count", "process", "length")}
    settings = {"eval": {"every": 2, "metrics": named, "max_new_tokens": 4}, "run": {"steps": 2}}
    alone = recorded_train(config(tiny_directory, tmp_path / "alone", "none", **settings)).results()
    shared = config(tiny_directory, tmp_path / "two", "ddp", **settings)
    one, two = run_world(2, "train_or_resume", out=tmp_path / "out", timeout=120, config=shared)
    sys.modules.pop("shared_metrics")
    assert one["evaluations"] == two["evaluations"]
    for mine, theirs in zip(one["evaluations"], alone["evaluations"], strict=True):
        assert mine["eval_count"] == theirs["eval_count"] == 6
        assert mine["eval_length"] == theirs["eval_length"]
