"""`whet sweep` and `whet compare`, on real runs of the tiny model."""

import json
import math
import re
import signal

import pytest
import yaml

import whet
from tiny import run_config
from whet.config.load_config import load_config
from whet.errors import ConfigError
from whet.studies import sweep
from whet.studies.sweep import plan_sweep
from whet.training.callbacks import Callback


@pytest.fixture
def config(tiny_directory, tmp_path):
    path = tmp_path / "config.yaml"
    checkpoint = {"every": 1, "async": False}
    path.write_text(
        yaml.safe_dump(run_config(tiny_directory, tmp_path, run={"steps": 3}, checkpoint=checkpoint))
    )
    return path


@pytest.fixture
def no_page(monkeypatch):
    """Skip the comparison page, because drawing it takes longer than the runs."""
    monkeypatch.setattr("whet.reporting.compare.compare_page.write_comparison", lambda comparison, path: path)


def settings_of(config, *arguments, **more):
    return [run.setting for run in plan_sweep(config, arguments, **more).runs]


def final_bytes(run):
    return (run / "final" / "adapter_model.safetensors").read_bytes()


def test_grid_has_every_combination_and_seed(config, tmp_path):
    planned = plan_sweep(
        config, ["optim.lr=1e-4,3e-4", "method.rank=4,8", "run.name=s", "run.steps=7"], seeds=2
    )
    assert planned.directory == tmp_path / "runs" / "s"
    assert [run.name for run in planned.runs[:5]] == [
        *("lr-1e-4-rank-4-seed-0", "lr-1e-4-rank-8-seed-0"),
        *("lr-3e-4-rank-4-seed-0", "lr-3e-4-rank-8-seed-0", "lr-1e-4-rank-4-seed-1"),
    ]
    planned_settings = [
        (plan.optim.lr, plan.method.rank, plan.run.seed, plan.run.steps) for plan in planned.plans
    ]
    assert planned_settings == [
        (lr, rank, seed, 7) for seed in (0, 1) for lr in (1e-4, 3e-4) for rank in (4, 8)
    ]


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("optim.betas=[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ("data.train='a,b.jsonl','../c'", ["'a,b.jsonl'", "'../c'"]),
        ("optim.clip=1.0, null", ["1.0", "null"]),
        ("model=../a,../b", ["../a", "../b"]),
    ],
)
def test_commas_inside_lists_and_quotes_do_not_split(config, argument, values):
    key = argument.partition("=")[0]
    assert settings_of(config, argument) == [{key: value} for value in values]
    names = [run.name for run in plan_sweep(config, [argument]).runs]
    assert len(set(names)) == 2
    assert not any("/" in name or name.startswith(".") for name in names)


LONG = "a" * 200


@pytest.mark.parametrize(
    ("few", "more", "hashed"),
    [
        (["optim.lr=1e-4,3e-4"], ["optim.lr=1e-4,3e-4,1e-3"], []),
        (["method.rank=2,4"], [f"method.rank={','.join(map(str, range(2, 20)))}"], []),
        # too long
        ([f"model={LONG}b,{LONG}c"], [f"model={LONG}b,x,{LONG}c,{LONG}d"], [0, 1]),
        # equal after removing characters that file names cannot have: immediately, or only with the added value
        (["model=a/b,a:b"], ["model=a:b,a/b,x"], [0, 1]),
        (["model=a/b,x"], ["model=a/b,x,a_b,a:b"], [0]),
        (["model=a_b,x"], ["model=a_b,x,a/b"], []),
        # the same when they are joined
        (["model=a,a-rank", "method.rank=2,4"], ["model=a,a-rank", "method.rank=2,4,8"], [2, 3]),
    ],
)
def test_run_name_does_not_depend_on_other_settings(config, few, more, hashed):
    before, after = (
        {tuple(run.setting.items()): run.name for run in plan_sweep(config, axes).runs}
        for axes in (few, more)
    )
    assert before.items() <= after.items()
    assert len(set(after.values())) == len(after)
    assert max(map(len, after.values())) < 150
    has_hash = [bool(re.search("-[0-9a-f]{8}-seed-0$", name)) for name in before.values()]
    assert [index for index, one in enumerate(has_hash) if one] == hashed


def test_values_containing_keys_get_distinct_names():
    settings = [{"model": "1-rank", "method.rank": "4"}, {"model": "1", "method.rank": "rank-4"}]
    assert len(set(sweep._names(settings))) == 2
    settings = [{"model": "1-rank-2", "method.rank": "3"}, {"model": "1", "method.rank": "2-rank-3"}]
    assert len(set(sweep._names(settings))) == 2


def test_random_draws_are_log_uniform_deterministic_and_extensible(config):
    axes = ("optim.lr=1e-5..1e-1", "method.rank=2..64", "optim.schedule=cosine,constant")
    few, many = settings_of(config, *axes, draws=20), settings_of(config, *axes, draws=200)
    assert many[:20] == few
    rates = [float(setting["optim.lr"]) for setting in many]
    assert all(1e-5 <= rate <= 1e-1 for rate in rates)
    for power in range(-5, -1):  # a quarter in each decade; 3 standard deviations are 18
        assert abs(sum(power <= math.log10(rate) < power + 1 for rate in rates) - 50) < 20
    ranks = {int(setting["method.rank"]) for setting in many}
    assert (min(ranks), max(ranks)) >= (2, 32)
    assert max(ranks) <= 64
    assert {setting["optim.schedule"] for setting in many} == {"cosine", "constant"}
    assert settings_of(config, *axes, "run.seed=1", draws=20) != few


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("optim.lrr=1e-4,1e-3",), "unknown key 'optim.lrr', did you mean 'lr'?"),
        (("optim.lr=1e-4,fast",), "optim.lr"),
        (("optim.lr=1e-4,",), "has an empty value"),
        (("optim.lr=1e-4,1e-4",), "has a value twice"),
        (("optim.lr=1e-4,0.0001",), "two settings of the sweep are identical"),
        (("optim.lr=1e-4,1e-3", "optim.lr=1e-2,1"), "optim.lr is given twice"),
        (("optim.lr=1e-4", "optim.lr=1e-2,1"), "optim.lr is given twice"),
        (("optim.lr=1e-5..1e-3",), "optim.lr has a range, but a grid needs values"),
        (("optim.lr=1e-3..1e-5", "--random", 2), "so they need 0 < low < high"),
        (("optim.lr=0..1", "--random", 2), "so they need 0 < low < high"),
        (("method.rank=4,8", "--random", 3), "there are fewer different settings"),
        (("--random", 3), "--random needs a swept key"),
        (("run.seed=1,2",), "run.seed cannot be swept"),
        (("run.name=a,b",), "run.name cannot be swept"),
        ((), "nothing to sweep"),
        (("optim.lr",), "'optim.lr' is not an override"),
        (
            ("method.rank=1..2000000", "--random", 20000),
            "the sweep has 20,000 runs, more than the limit of 10,000",
        ),
    ],
)
def test_sweep_errors_are_raised_before_the_first_run(cli, config, tmp_path, arguments, message):
    code, out, err = cli("sweep", config, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("error:") == 1
    assert not (tmp_path / "runs").exists()


def test_sweep_trains_each_run_once_and_compares(cli, config, tmp_path, monkeypatch):
    command = ("sweep", config, "optim.lr=1e-3,1e-2", "--seeds", 2, "run.name=s")
    code, listed, _ = cli(*command, "--dry-run")
    assert (code, len(listed.splitlines())) == (0, 4)
    assert not (tmp_path / "runs").exists()
    code, out, _ = cli(*command)
    assert code == 0
    directory = tmp_path / "runs" / "s"
    assert [str(directory / name) for name in ("lr-1e-3-seed-0", "lr-1e-2-seed-1")] == [
        listed.splitlines()[0],
        listed.splitlines()[3],
    ]
    for expected in ("eval_loss, lower is better", "lr=0.001", "Hedges g", "best: lr=0.01", "compare.html"):
        assert expected in out
    assert "<figure id='chart-eval_loss'" in (directory / "compare.html").read_text()
    states = json.loads((directory / "sweep.json").read_text())["runs"]
    assert [state["status"] for state in states] == ["finished"] * 4
    code, table, _ = cli("runs", tmp_path / "runs")
    assert code == 0
    assert set(re.findall(r"^(\S+) +finished", table, re.MULTILINE)) == {f"s/{s['name']}" for s in states}

    # bit-identical to `whet train` with the same config
    alone = whet.train(load_config(config, ["optim.lr=1e-2", "run.seed=1", "run.name=alone"])).directory
    assert final_bytes(alone) == final_bytes(directory / "lr-1e-2-seed-1")

    def fail(*_):
        raise AssertionError("the run has already finished")

    monkeypatch.setattr("whet.reporting.compare.compare_page.write_comparison", lambda comparison, path: path)
    with monkeypatch.context() as patched:
        patched.setattr(sweep, "train_or_resume", fail)
        assert cli(*command)[:2] == (0, out)
    code, more, _ = cli("sweep", config, "optim.lr=1e-3,1e-2,3e-2", "--seeds", 2, "run.name=s")
    assert (code, "lr=0.03" in more) == (0, True)

    code, _, err = cli(*command, "run.steps=2")
    assert (code, "was started with a different run.steps than the other runs" in err) == (2, True)
    code, _, err = cli(*command, "optim.weight_decay=0.5")
    assert (code, "optim.weight_decay" in err) == (2, True)

    code, out, _ = cli("compare", directory, "--json")
    assert len(json.loads(out)["groups"]) == 3
    monkeypatch.undo()
    code, out, _ = cli("compare", directory / "lr-1e-3-seed-0", alone, "--html", tmp_path / "c.html")
    assert code == 0
    assert (tmp_path / "c.html").stat().st_size > 10_000
    assert cli("compare", directory, "--html", tmp_path / "none" / "c.html")[0] == 2
    assert cli("compare", alone)[0] == 2


class Interrupt(Callback):
    """Raises SIGINT after the first step of one run, which then stops after the second."""

    def __init__(self, name):
        self.name = name

    def on_train_begin(self, run):
        self.is_target = run.directory.name == self.name

    def on_step_end(self, step, metrics):
        if self.is_target and step == 1:
            signal.raise_signal(signal.SIGINT)


def test_interrupted_sweep_exits_3_and_resumes(cli, config, tmp_path, monkeypatch, no_page):
    command = ("sweep", config, "method.rank=2,4,8", "run.name=s")
    train = sweep.train
    monkeypatch.setattr(
        sweep, "train", lambda plan, callbacks: train(plan, [*callbacks, Interrupt("rank-4-seed-0")])
    )
    code, out, err = cli(*command)
    assert (code, out) == (3, "")
    assert "rerun the same command to resume" in err
    directory = tmp_path / "runs" / "s"
    states = {
        run["name"]: run["status"] for run in json.loads((directory / "sweep.json").read_text())["runs"]
    }
    assert states == {"rank-2-seed-0": "finished", "rank-4-seed-0": "stopped", "rank-8-seed-0": "waiting"}
    monkeypatch.setattr(sweep, "train", train)
    (directory / "rank-2-seed-0").rename(
        directory / "aside"
    )  # then only the stopped run shows the difference
    code, _, err = cli(*command, "run.steps=9")
    assert (code, "was started with a different run.steps than the other runs" in err) == (2, True)
    (directory / "aside").rename(directory / "rank-2-seed-0")
    code, _, err = cli(*command)
    assert code == 0
    assert "resuming after step 2" in err
    alone = whet.train(load_config(config, ["method.rank=4", "run.name=alone"])).directory
    assert final_bytes(alone) == final_bytes(directory / "rank-4-seed-0")


def test_ctrl_c_before_first_step_of_sweep_exits_3(cli, config, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "train", interrupted)
    code, _, err = cli("sweep", config, "method.rank=2,4")
    assert code == 3
    assert "interrupted; rerun the same command to resume" in err


def test_sweep_continues_after_a_failed_run(cli, config, tmp_path, monkeypatch, no_page):
    command = ("sweep", config, "method.rank=2,4,8", "run.name=s")
    train = sweep.train

    def failing(plan, callbacks):
        if plan.method.rank == 2:
            raise RuntimeError("out of memory")
        return train(plan, callbacks)

    monkeypatch.setattr(sweep, "train", failing)
    code, out, err = cli(*command)
    assert code == 1
    assert "rank=4" in out
    assert "rank-2-seed-0: RuntimeError: out of memory" in err
    [failed, *others] = json.loads((tmp_path / "runs" / "s" / "sweep.json").read_text())["runs"]
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: out of memory")
    assert [run["status"] for run in others] == ["finished", "finished"]
    code, out, err = cli(*command, "--metric", "eval_nothing")
    assert (code, out) == (2, "")
    assert "rank-2-seed-0: RuntimeError: out of memory" in err
    monkeypatch.setattr(sweep, "train", train)
    code, out, _ = cli(*command)
    assert (code, "rank=2" in out) == (0, True)


def test_sweep_rejects_the_directory_of_a_run(config, tmp_path):
    whet.train(load_config(config, ["run.steps=1"]))
    with pytest.raises(ConfigError, match="is a run, not a sweep"):
        plan_sweep(config, ["method.rank=2,4"])
