"""eval.tasks: a run with benchmark tasks trains exactly as without, and stores their results."""

import json
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

import whet
from evaluation.test_harness import write_group, write_tasks
from tiny import run_config
from whet.callbacks import Callback, StopRun
from whet.config.eval import Evaluation
from whet.errors import ConfigError
from whet.evaluation import benchmarks
from whet.evaluation.task_evaluator import metric_name
from whet.evaluation.task_result import read_results

slow = pytest.mark.slow  # make test-slow installs lm-eval


@pytest.mark.parametrize(
    ("value", "names", "every"),
    [
        (["a", "b.yaml"], ["a", "b.yaml"], None),
        ("a", ["a"], None),
        ({"names": ["a"], "every": 20}, ["a"], 20),
    ],
)
def test_names_are_a_short_form(value, names, every):
    section = Evaluation(every=10, tasks=value)
    assert (section.tasks.names, section.tasks.every) == (names, every)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"every": 20, "tasks": {"names": ["a"], "every": 30}}, "multiple of eval.every"),
        ({"tasks": []}, "tasks.names"),
        ({"tasks": {"names": ["a"], "shots": -1}}, "tasks.shots"),
        ({"tasks": {"names": ["a"], "limit": 0}}, "tasks.limit"),
    ],
)
def test_invalid_tasks_are_rejected(keys, message):
    with pytest.raises(ConfigError, match=message):
        Evaluation(**keys)


@pytest.mark.parametrize(
    ("every", "task_every", "steps"),
    [(2, None, [0, 2, 4, 6]), (2, 4, [0, 4]), (None, 3, [0, 3, 6]), (None, None, [0])],
)
def test_intervals(every, task_every, steps):
    section = Evaluation(every=every, tasks={"names": ["a"], "every": task_every})
    evaluated = [
        step for step in range(7) if step == 0 or (section.interval and step % section.interval == 0)
    ]
    assert [step for step in evaluated if section.evaluates_tasks_at(step)] == steps


def test_metric_names_have_no_special_characters():
    assert metric_name("group::my task", "exact_match,strict-match") == (
        "eval_group_my_task_exact_match_strict-match"
    )


def test_a_missing_extra_is_reported_before_training(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"eval\.tasks.*lm-evaluation-harness") as info:
        whet.train(run_config(tiny_directory, tmp_path, eval={"tasks": ["arc_easy"]}), verbose=0)
    assert "whet[evals]" in info.value.hint
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("objective", [{"kind": "classify", "classes": ["a", "b"]}])
def test_tasks_need_a_language_model(tiny_directory, tmp_path, objective):
    with pytest.raises(ConfigError, match=r"eval\.tasks cannot be combined"):
        whet.train(
            run_config(tiny_directory, tmp_path, objective=objective, eval={"tasks": ["a"]}), verbose=0
        )


def rows_of(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "summary" not in row]


def series(directory, name):
    return {row["step"]: row[name] for row in rows_of(directory) if name in row}


def weights_of(directory):
    tensors = {}
    for path in sorted((directory / "final").glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def check_same_run(first, second):
    """Assert that two runs have the same losses and final weights, bit for bit."""
    for name in ("loss", "eval_loss", "grad_norm"):
        assert series(first, name) == series(second, name), name
    ours, theirs = weights_of(first), weights_of(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("test", unfinished=True) if step == self.step else None


@pytest.fixture
def tasks(tmp_path):
    pytest.importorskip("lm_eval")
    directory = tmp_path / "tasks"
    directory.mkdir()
    paths = write_tasks(directory, items=5)
    answer = directory / "answer.yaml"
    answer.write_text(
        answer.read_text().replace("max_gen_toks: 12", "max_gen_toks: 4, do_sample: true, temperature: 0.9")
    )
    return [paths["choice"], paths["answer"], paths["text"]]


NAMES = ("eval_local_choice_acc", "eval_local_answer_exact_match", "eval_local_text_bits_per_byte")


@slow
@pytest.mark.parametrize("method", [{"kind": "lora", "rank": 4, "dropout": 0.1}, {"kind": "full"}])
def test_training_is_the_same_as_without_tasks(tiny_directory, tmp_path, tasks, method):
    def train(name, section, *callbacks):
        config = run_config(
            tiny_directory, tmp_path, method=method, run={"name": name}, eval={"every": 2, **section}
        )
        return whet.train(config, callbacks, verbose=0).directory

    section = {"tasks": {"names": tasks, "limit": 4}}
    plain, evaluated = train("plain", {}), train("evaluated", section)
    check_same_run(plain, evaluated)
    assert all(series(evaluated, name).keys() == {0, 2, 4} for name in NAMES)
    results = read_results(evaluated)
    assert [(result.task, result.step) for result in results] == [
        (task, step) for step in (0, 2, 4) for task in ("local_choice", "local_answer", "local_text")
    ]
    assert all(len(result.item_ids) == 4 for result in results)
    # the last result is that of the finished model
    final = {
        result.task: result
        for result in whet.benchmark(whet.load(evaluated, dtype=torch.float32), tasks, limit=4)
    }
    for result in results[-3:]:
        for name, score in result.scores.items():
            assert final[result.task].scores[name].value == pytest.approx(score.value, rel=1e-4)
            assert series(evaluated, metric_name(result.task, name))[4] == score.value

    stopped = train("stopped", section, StopAt(3))
    whet.resume(stopped, verbose=0)
    check_same_run(evaluated, stopped)
    assert {name: series(stopped, name) for name in NAMES} == {
        name: series(evaluated, name) for name in NAMES
    }
    assert [result.key for result in read_results(stopped)] == [result.key for result in results]


@slow
def test_stored_results_are_not_computed_again(tiny_directory, tmp_path, tasks, monkeypatch):
    """A run that is killed after an evaluation trains the same weights again, and uses the stored results."""
    config = run_config(
        tiny_directory,
        tmp_path,
        run={"steps": 3},
        eval={"every": 1, "tasks": {"names": tasks[:1], "limit": 2}},
        checkpoint={"every": 1},
    )

    class Kill(Callback):
        def on_eval_end(self, step, metrics):
            if step == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        whet.train(config, [Kill()], verbose=0)
    directory = tmp_path / "runs" / "test"
    before = read_results(directory)
    assert [result.step for result in before] == [0, 1, 2]
    calls = []
    original = benchmarks._run_task
    monkeypatch.setattr(benchmarks, "_run_task", lambda *a, **k: calls.append(a[1]) or original(*a, **k))
    whet.resume(directory, verbose=0)
    assert calls == ["local_choice"]  # of step 3
    assert [result.step for result in read_results(directory)] == [0, 1, 2, 3]
    assert series(directory, NAMES[0]).keys() == {0, 1, 2, 3}


@slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_the_same_and_do_not_hang(tiny_directory, tmp_path, tasks, kind):
    def train(name, section):
        config = run_config(
            tiny_directory,
            tmp_path,
            run={"name": name},
            eval={"every": 2, **section},
            parallel={"kind": kind},
        )
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "whet", "train", str(path), "--nproc", "2", "--quiet"]
        subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
        return tmp_path / "runs" / name

    plain, evaluated = train("plain", {}), train("evaluated", {"tasks": {"names": tasks, "limit": 3}})
    check_same_run(plain, evaluated)
    results = read_results(evaluated)
    assert [result.step for result in results] == [0] * 3 + [2] * 3 + [4] * 3
    final = {
        result.task: result
        for result in whet.benchmark(whet.load(evaluated, dtype=torch.float32), tasks, limit=3)
    }
    for result in results[-3:]:
        for name, score in result.scores.items():
            assert final[result.task].scores[name].value == pytest.approx(score.value, rel=1e-3)


@slow
def test_early_stopping_and_the_report_use_task_metrics(tiny_directory, tmp_path, tasks):
    config = run_config(
        tiny_directory,
        tmp_path,
        data={"train": "synth:house:24", "valid": None, "max_length": 256},
        run={"steps": 8},
        optim={"lr": 0.5, "warmup": 0},
        eval={
            "every": 1,
            "tasks": {"names": [tasks[2]], "limit": 3},
            "early_stop": {"metric": "eval_local_text_bits_per_byte", "patience": 2},
        },
    )
    result = whet.train(config, verbose=0)
    values = series(result.directory, "eval_local_text_bits_per_byte")
    best = min(values, key=values.__getitem__)
    assert result.steps < 8
    assert result.summary["best"]["step"] == best
    # the latest result is that of final/, whose weights are the best ones
    latest = read_results(result.directory)[-1]
    assert (latest.step, latest.scores["bits_per_byte"].value) == (best, values[best])
    from whet.reporting.run.report_page import write_report

    page = write_report(result.directory).read_text()
    assert "chart-eval_local_text_bits_per_byte" in page
    assert "local_text" in page


@slow
def test_early_stopping_in_the_wrong_direction_is_rejected(tiny_directory, tmp_path, tasks):
    path = tmp_path / "tasks" / "choice.yaml"
    path.write_text(path.read_text().replace("{metric: acc_norm}", "{metric: brier_score}"))
    metric = "eval_local_choice_brier_score"
    section = {"tasks": [str(path)], "early_stop": {"metric": metric}}
    with pytest.raises(ConfigError, match="lower is better for eval_local_choice_brier_score"):
        whet.train(run_config(tiny_directory, tmp_path, eval=section), verbose=0)


@slow
def test_groups_are_logged(tiny_directory, tmp_path, tasks):
    path = write_group(tmp_path / "tasks", weighted=True)
    config = run_config(tiny_directory, tmp_path, run={"steps": 1}, eval={"tasks": [path]})
    directory = whet.train(config, verbose=0).directory
    assert series(directory, "eval_local_group_acc").keys() == {0, 1}


@slow
def test_unknown_tasks_are_reported_before_training_and_in_the_dry_run(tiny_directory, tmp_path):
    pytest.importorskip("lm_eval")
    config = run_config(tiny_directory, tmp_path, eval={"tasks": ["helaswag"]})
    with pytest.raises(ConfigError, match=r"eval\.tasks: unknown task 'helaswag'"):
        whet.train(config, verbose=0)
    assert not (tmp_path / "runs").exists()
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "whet", "train", str(path), "--dry-run"]
    process = subprocess.run(command, check=False, timeout=240, capture_output=True, text=True)
    assert process.returncode != 0
    assert "unknown task 'helaswag'" in process.stdout + process.stderr
