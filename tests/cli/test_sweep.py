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
    """Pictures take longer than these runs."""
    monkeypatch.setattr("whet.reporting.compare.compare_page.write_comparison", lambda found, path: path)


def settings_of(config, *arguments, **more):
    return [run.setting for run in plan_sweep(config, arguments, **more).runs]


def final_bytes(run):
    return (run / "final" / "adapter_model.safetensors").read_bytes()


def test_a_grid_is_every_combination_with_every_seed(config, tmp_path):
    planned = plan_sweep(
        config, ["optim.lr=1e-4,3e-4", "method.rank=4,8", "run.name=s", "run.steps=7"], seeds=2
    )
    assert planned.directory == tmp_path / "runs" / "s"
    assert [run.name for run in planned.runs[:5]] == [
        *("lr-1e-4-rank-4-seed-0", "lr-1e-4-rank-8-seed-0"),
        *("lr-3e-4-rank-4-seed-0", "lr-3e-4-rank-8-seed-0", "lr-1e-4-rank-4-seed-1"),
    ]
    found = [(plan.optim.lr, plan.method.rank, plan.run.seed, plan.run.steps) for plan in planned.plans]
    assert found == [(lr, rank, seed, 7) for seed in (0, 1) for lr in (1e-4, 3e-4) for rank in (4, 8)]


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("optim.betas=[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ("data.train='a,b.jsonl','../c'", ["'a,b.jsonl'", "'../c'"]),
        ("optim.clip=1.0, null", ["1.0", "null"]),
        ("model=../a,../b", ["../a", "../b"]),
    ],
)
def test_commas_inside_lists_and_quotes_do_not_separate(config, argument, values):
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
        # the same when what no file can be named by is left out: at once, and only with what is added
        (["model=a/b,a:b"], ["model=a:b,a/b,x"], [0, 1]),
        (["model=a/b,x"], ["model=a/b,x,a_b,a:b"], [0]),
        (["model=a_b,x"], ["model=a_b,x,a/b"], []),
        # the same when they are joined
        (["model=a,a-rank", "method.rank=2,4"], ["model=a,a-rank", "method.rank=2,4,8"], [2, 3]),
    ],
)
def test_a_name_does_not_depend_on_the_other_settings(config, few, more, hashed):
    before, after = (
        {tuple(run.setting.items()): run.name for run in plan_sweep(config, axes).runs}
        for axes in (few, more)
    )
    assert before.items() <= after.items()
    assert len(set(after.values())) == len(after)
    assert max(map(len, after.values())) < 150
    found = [bool(re.search("-[0-9a-f]{8}-seed-0$", name)) for name in before.values()]
    assert [place for place, one in enumerate(found) if one] == hashed


def test_values_that_have_a_key_in_them_are_told_apart():
    settings = [{"model": "1-rank", "method.rank": "4"}, {"model": "1", "method.rank": "rank-4"}]
    assert len(set(sweep._names(settings))) == 2
    settings = [{"model": "1-rank-2", "method.rank": "3"}, {"model": "1", "method.rank": "2-rank-3"}]
    assert len(set(sweep._names(settings))) == 2


def test_random_draws_are_log_uniform_the_same_every_time_and_can_be_added_to(config):
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
    ("arguments", "said"),
    [
        (("optim.lrr=1e-4,1e-3",), "unknown key 'optim.lrr', did you mean 'lr'?"),
        (("optim.lr=1e-4,fast",), "optim.lr"),
        (("optim.lr=1e-4,",), "has an empty value"),
        (("optim.lr=1e-4,1e-4",), "has a value twice"),
        (("optim.lr=1e-4,0.0001",), "two settings of the sweep are the same run"),
        (("optim.lr=1e-4,1e-3", "optim.lr=1e-2,1"), "optim.lr is given twice"),
        (("optim.lr=1e-4", "optim.lr=1e-2,1"), "optim.lr is given twice"),
        (("optim.lr=1e-5..1e-3",), "optim.lr has a range, and a grid needs values"),
        (("optim.lr=1e-3..1e-5", "--random", 2), "0 < its low end < its high end"),
        (("optim.lr=0..1", "--random", 2), "0 < its low end < its high end"),
        (("method.rank=4,8", "--random", 3), "there are not so many different settings"),
        (("--random", 3), "--random has nothing to draw"),
        (("run.seed=1,2",), "run.seed cannot be swept"),
        (("run.name=a,b",), "run.name cannot be swept"),
        ((), "there is nothing to sweep"),
        (("optim.lr",), "'optim.lr' is not an override"),
        (("method.rank=1..2000000", "--random", 20000), "too many"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_run(cli, config, tmp_path, arguments, said):
    code, out, err = cli("sweep", config, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("error:") == 1
    assert not (tmp_path / "runs").exists()


def test_a_sweep_is_ordinary_runs_done_once_and_compared(cli, config, tmp_path, monkeypatch):
    command = ("sweep", config, "optim.lr=1e-3,1e-2", "--seeds", 2, "run.name=s")
    code, listed, _ = cli(*command, "--dry-run")
    assert (code, len(listed.splitlines())) == (0, 4)
    assert not (tmp_path / "runs").exists()
    code, out, _ = cli(*command)
    assert code == 0
    place = tmp_path / "runs" / "s"
    assert [str(place / name) for name in ("lr-1e-3-seed-0", "lr-1e-2-seed-1")] == [
        listed.splitlines()[0],
        listed.splitlines()[3],
    ]
    for said in ("eval_loss, lower is better", "lr=0.001", "Hedges g", "best: lr=0.01", "compare.html"):
        assert said in out
    assert "<figure id='chart-eval_loss'" in (place / "compare.html").read_text()
    states = json.loads((place / "sweep.json").read_text())["runs"]
    assert [state["status"] for state in states] == ["finished"] * 4

    # the run itself is what `whet train` makes of the same config, to the bit
    alone = whet.train(load_config(config, ["optim.lr=1e-2", "run.seed=1", "run.name=alone"])).directory
    assert final_bytes(alone) == final_bytes(place / "lr-1e-2-seed-1")

    def refuse(*_):
        raise AssertionError("it has finished")

    monkeypatch.setattr("whet.reporting.compare.compare_page.write_comparison", lambda found, path: path)
    with monkeypatch.context() as patched:
        patched.setattr(sweep, "finish", refuse)
        assert cli(*command)[:2] == (0, out)
    code, more, _ = cli("sweep", config, "optim.lr=1e-3,1e-2,3e-2", "--seeds", 2, "run.name=s")
    assert (code, "lr=0.03" in more) == (0, True)

    code, _, err = cli(*command, "run.steps=2")
    assert (code, "has another run.steps than the runs it belongs to" in err) == (2, True)
    code, _, err = cli(*command, "optim.weight_decay=0.5")
    assert (code, "optim.weight_decay" in err) == (2, True)

    code, out, _ = cli("compare", place, "--json")
    assert len(json.loads(out)["groups"]) == 3
    monkeypatch.undo()
    code, out, _ = cli("compare", place / "lr-1e-3-seed-0", alone, "--html", tmp_path / "c.html")
    assert code == 0
    assert (tmp_path / "c.html").stat().st_size > 10_000
    assert cli("compare", place, "--html", tmp_path / "none" / "c.html")[0] == 2
    assert cli("compare", alone)[0] == 2


class Interrupt(Callback):
    """Ctrl-C right after the first step of one run, so that it ends with the second."""

    def __init__(self, name):
        self.name = name

    def on_train_begin(self, run):
        self.mine = run.directory.name == self.name

    def on_step_end(self, step, metrics):
        if self.mine and step == 1:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_exit_code_3_and_the_same_command_goes_on(cli, config, tmp_path, monkeypatch, no_page):
    command = ("sweep", config, "method.rank=2,4,8", "run.name=s")
    train = sweep.train
    monkeypatch.setattr(
        sweep, "train", lambda plan, callbacks: train(plan, [*callbacks, Interrupt("rank-4-seed-0")])
    )
    code, out, err = cli(*command)
    assert (code, out) == (3, "")
    assert "the same command goes on" in err
    place = tmp_path / "runs" / "s"
    states = {run["name"]: run["status"] for run in json.loads((place / "sweep.json").read_text())["runs"]}
    assert states == {"rank-2-seed-0": "finished", "rank-4-seed-0": "stopped", "rank-8-seed-0": "waiting"}
    monkeypatch.setattr(sweep, "train", train)
    (place / "rank-2-seed-0").rename(place / "aside")  # then only the run that was stopped could tell
    code, _, err = cli(*command, "run.steps=9")
    assert (code, "has another run.steps than the runs it belongs to" in err) == (2, True)
    (place / "aside").rename(place / "rank-2-seed-0")
    code, _, err = cli(*command)
    assert code == 0
    assert "resuming after step 2" in err
    alone = whet.train(load_config(config, ["method.rank=4", "run.name=alone"])).directory
    assert final_bytes(alone) == final_bytes(place / "rank-4-seed-0")


def test_ctrl_c_before_the_first_step_is_exit_code_3_too(cli, config, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "train", interrupted)
    code, _, err = cli("sweep", config, "method.rank=2,4")
    assert code == 3
    assert "the same command goes on" in err


def test_a_run_that_fails_is_recorded_and_the_others_are_done(cli, config, tmp_path, monkeypatch, no_page):
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


def test_a_sweep_does_not_go_into_a_run(config, tmp_path):
    whet.train(load_config(config, ["run.steps=1"]))
    with pytest.raises(ConfigError, match="is a run"):
        plan_sweep(config, ["method.rank=2,4"])
