"""The same run on 1, 2 and 4 processes: data, losses, gradients, weights and evaluations."""

import pytest
import torch
from safetensors.torch import load_file

import tiny
from distributed.checks import watched_train
from distributed.harness import run_world

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
    """{processes: (directory, what each rank saw)} of one full run each."""
    alone = tmp_path_factory.mktemp("alone")
    watch = watched_train(config(tiny_directory, alone, "none"))
    torch.save(watch.gradient, alone / "full.gradient")
    found = {1: (alone, [watch.found()])}
    for size in (2, 4):
        out = tmp_path_factory.mktemp(f"world-{size}")
        ranks = run_world(
            size, "train_and_tell", out=out, configs={"full": config(tiny_directory, out, "ddp")}
        )
        found[size] = (out, [each["full"] for each in ranks])
    return found


def distance(one, other):
    """Relative L2 over all numbers."""
    squares = sum((one[name].double() - other[name].double()).square().sum() for name in one)
    return float((squares / sum(tensor.double().square().sum() for tensor in one.values())).sqrt())


def weights(directory, kind):
    return load_file(directory / "runs" / kind / "final" / "model.safetensors")


@pytest.mark.parametrize("size", [2, 4])
def test_weights_losses_and_gradients_are_those_of_one_process(runs, size):
    (alone, [one]), (out, ranks) = runs[1], runs[size]
    assert distance(weights(alone, "none"), weights(out, "ddp")) < 1e-6
    gradients = [{"g": torch.load(path / "full.gradient")} for path in (alone, out)]
    assert distance(*gradients) < 1e-6
    for each in ranks:
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert each["norms"] == pytest.approx(one["norms"], rel=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_identical_weights_after_each_step(runs, size):
    hashes = [each["hashes"] for each in runs[size][1]]
    assert len(hashes[0]) == STEPS
    assert len(set(hashes[0])) == STEPS  # they do change
    assert all(each == hashes[0] for each in hashes)


@pytest.mark.parametrize("size", [2, 4])
def test_shares_are_disjoint_exhaustive_and_those_of_the_same_steps(runs, size):
    [one], ranks = runs[1][1], runs[size][1]
    for step in range(STEPS):
        shares = [batch for each in ranks for batch in each["records"][step]]
        assert sorted(shares) == sorted(one["records"][step])
    assert any(
        len({len(each["records"][step]) for each in ranks}) > 1 for step in range(STEPS)
    )  # uneven ones


@pytest.mark.parametrize("size", [2, 4])
def test_evaluations_are_those_of_one_process_on_every_rank(runs, size):
    [one], ranks = runs[1][1], runs[size][1]
    assert len(one["evaluations"]) == 3
    for each in ranks:
        for mine, alone in zip(each["evaluations"], one["evaluations"], strict=True):
            assert mine == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_one_rank_writes_one_run(runs, size):
    run = runs[size][0] / "runs" / "ddp"
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in row and '"summary"' not in row for row in rows) == STEPS
    assert sum('"summary"' in row for row in rows) == 1
    assert not list(run.parent.glob(".*"))
    assert (run / "log.txt").read_text().count("ddp on") == 1
