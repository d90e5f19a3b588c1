"""whet classify, eval, export and advise, on a small classification run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

import whet
from tiny import run_config
from whet.config.load_config import load_config, validate_config
from whet.studies.advise import advise

EXAMPLES = Path(__file__).parents[2] / "examples"
SHELL = ["safe", "needs quoting", "non-deterministic", "not idempotent", "unsafe"]


def settings(tiny_directory, directory, **sections):
    objective = {"kind": "classify", "classes": SHELL, "probe": False, **sections.pop("objective", {})}
    data = {"train": "synth:shell-safety:60", "valid": "synth:shell-safety-valid:30", "max_length": 200}
    data |= sections.pop("data", {})
    return run_config(tiny_directory, directory, objective=objective, data=data, **sections)


@pytest.fixture(scope="module")
def run(tiny_directory, tmp_path_factory):
    return whet.train(settings(tiny_directory, tmp_path_factory.mktemp("cli"))).directory


def test_train_prints_the_report_and_writes_plots(cli, tiny_directory, tmp_path):
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(settings(tiny_directory, tmp_path, objective={"probe": True}))
    )
    code, out, err = cli("train", tmp_path / "config.yaml")
    assert code == 0, err
    directory = tmp_path / "runs" / "test"
    for expected in ("f1 macro", "linear probe", "majority", "needs quoting", f"whet classify {directory}"):
        assert expected in out
    assert (directory / "classification.png").read_bytes().startswith(b"\x89PNG")
    assert f"{json.loads((directory / 'classification.json').read_text())['f1_macro']:.3f}" in out


def test_classify_texts(cli, run):
    code, out, _ = cli("classify", run, "rm -rf /", "ls")
    assert code == 0
    first, second = out.splitlines()
    assert first.split("  (")[0] in SHELL
    assert "%" in second
    code, out, _ = cli("classify", run, "ls -l", "--json")
    printed = json.loads(out)
    assert printed["text"] == "ls -l"
    expected = whet.Classifier.load(run).predict_proba(["ls -l"])[0]
    np.testing.assert_allclose([printed["probabilities"][name] for name in SHELL], expected)
    assert printed["label"] == SHELL[int(expected.argmax())]


def test_classify_runs_the_model_once(cli, run, monkeypatch):
    calls = []
    logits = whet.Classifier.logits
    monkeypatch.setattr(
        whet.Classifier, "logits", lambda self, texts: calls.append(texts) or logits(self, texts)
    )
    assert cli("classify", run, "ls", "rm -rf /")[0] == 0
    assert calls == [["ls", "rm -rf /"]]


def test_classify_and_eval_report_on_labeled_records(cli, run):
    kept = json.loads((run / "classification.json").read_text())
    for command in ("classify", "eval"):
        code, out, _ = cli(command, run, "--data", "synth:shell-safety-valid:30", "--json")
        assert code == 0
        assert json.loads(out)["log_loss"] == kept["log_loss"]
        code, out, _ = cli(command, run, "--data", "synth:shell-safety-valid:30")
        assert "precision" in out


def test_invalid_input_prints_one_message(cli, run, tiny_directory):
    for arguments, message in (
        (("classify", run), r"give either TEXTS or --data \(exactly one of the two\)"),
        (("classify", tiny_directory, "x"), r"(?s)is not a classifier.* in Python, Classifier\.load"),
        (("classify", run, ""), "the text has no tokens, so it cannot be classified"),
        (("chat", run), "is a classifier, not a language model"),
        (("eval", run, "--data", "synth:house:3"), "synth:house:3#1: .*needs"),
        (("export", run, "--to", "gguf"), "a classifier cannot be exported to gguf"),
    ):
        code, _, err = cli(*arguments)
        assert code == 2
        assert re.search(message, err), err
        assert "Traceback" not in err


@pytest.mark.parametrize("to", ["peft", "hf"])
def test_exports_load_in_their_libraries(cli, run, tmp_path, to):
    code, out, err = cli("export", run, "--to", to, "--out", tmp_path / to, "--check")
    assert code == 0, err + out
    assert "checked: " in out
    again = whet.Classifier.load(tmp_path / to, device="cpu", precision="fp32")
    expected = whet.Classifier.load(run).predict_proba(["ls -l"])
    np.testing.assert_allclose(again.predict_proba(["ls -l"]), expected, atol=1e-5)


def test_export_rejects_unsupported_classifiers(cli, tiny_directory, tmp_path):
    for name, objective, reason in (
        ("mean", {"pooling": "mean"}, "uses mean pooling"),
        ("bias", {"bias": True}, "has a bias"),
    ):
        result = whet.train(settings(tiny_directory, tmp_path, objective=objective, run={"name": name}))
        code, _, err = cli("export", result.directory, "--to", "hf", "--out", tmp_path / "out")
        assert code == 2
        assert reason in err
        assert "load it with whet.Classifier.load" in err


def test_data_and_dry_run_show_classification_data(cli, tiny_directory, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(tiny_directory, tmp_path)))
    for arguments in (("data",), ("train", "--dry-run")):
        code, out, err = cli(*arguments[:1], tmp_path / "config.yaml", *arguments[1:])
        assert code == 0, out + err
        assert "warning" not in out
        assert "is supervised in 0 of" not in out


@pytest.mark.parametrize("name", ["classify-shell", "classify-shell-faults"])
def test_examples_run(name, tiny_directory, tmp_path):
    """On a tiny model and fewer records, two steps each; everything else as it stands there."""
    config = load_config(EXAMPLES / f"{name}.yaml").model_dump(mode="json", by_alias=True)
    source = config["data"]["train"].rpartition(":")[0]
    config["data"] |= {"train": f"{source}:60", "valid": f"{source}-valid:30", "max_length": 256}
    config["model"] = str(tiny_directory)
    config["method"]["layers"] = 1  # it has two
    config["run"] |= {"dir": str(tmp_path), "steps": 2, "epochs": None, "device": "cpu", "precision": "fp32"}
    result = whet.train(config)
    report = json.loads((result.directory / "classification.json").read_text())
    assert "linear probe" in report["baselines"]
    assert report["examples"] == 30
    assert isinstance(whet.Classifier.load(result.directory).predict(["rm -rf /"])[0], str | list)


def advices(tiny_directory, tmp_path, **sections):
    config = validate_config(settings(tiny_directory, tmp_path, **sections))
    return {advice.key: advice for advice in advise(config)}


def test_advise_accepts_sensible_settings(cli, tiny_directory, tmp_path):
    sections = {
        "method": {"rank": 8, "alpha": 16},
        "optim": {"lr": 1e-3, "warmup": 2},
        "run": {"epochs": 3, "steps": None, "batch_size": 16},
        "data": {"max_length": 256},
    }
    advice_by_key = advices(tiny_directory, tmp_path, **sections)
    assert {advice.severity for advice in advice_by_key.values()} == {"info"}
    assert {
        "optim.lr",
        "run.batch_size",
        "method.alpha",
        "data.max_length",
        "optim.clip",
        "run.epochs",
    } <= advice_by_key.keys()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(tiny_directory, tmp_path, **sections)))
    code, out, _ = cli("advise", tmp_path / "config.yaml", "optim.clip=null")
    assert code == 0
    assert out.startswith("warn   optim.clip: gradients are not clipped")
    assert "1.0" in out.splitlines()[1]


@pytest.mark.parametrize(
    ("sections", "key", "severity", "recommendation"),
    [
        ({"optim": {"lr": 0.5}}, "optim.lr", "error", "0.002"),
        ({"optim": {"lr": 5e-3}}, "optim.lr", "warn", "0.002"),
        ({"optim": {"lr": 1e-6}}, "optim.lr", "warn", "0.0005"),
        ({"method": {"kind": "full"}, "optim": {"lr": 1e-3}}, "optim.lr", "warn", "0.0003"),
        ({"run": {"batch_size": 2}}, "run.batch_size", "warn", "16"),
        ({"run": {"batch_size": 100}}, "run.batch_size", "error", "16"),
        ({"method": {"rank": 8, "alpha": 8}}, "method.alpha", "warn", "method.alpha=16"),
        ({"data": {"max_length": 40}}, "data.max_length", "error", "^use (128|256)$"),
        (
            {"data": {"max_length": 2048, "pack": False}},
            "data.max_length",
            "warn",
            "^use (128|256), for less padding",
        ),
        ({"optim": {"clip": None}}, "optim.clip", "warn", "1.0"),
        ({"optim": {"warmup": 50}}, "optim.warmup", "error", "0"),
        ({"run": {"epochs": 1, "steps": None, "batch_size": 16}}, "run.epochs", "warn", "2 epochs"),
        ({"objective": {"classes": [*SHELL, "other"]}}, "data.train", "error", "remove the class"),
    ],
)
def test_advise_reports_unusual_settings_with_recommendations(
    tiny_directory, tmp_path, sections, key, severity, recommendation
):
    advice = advices(tiny_directory, tmp_path, **sections)[key]
    assert advice.severity == severity
    assert re.search(recommendation, advice.recommendation)


def test_advise_supports_other_objectives(tiny_directory, tmp_path):
    config = validate_config(run_config(tiny_directory, tmp_path))
    keys = {advice.key for advice in advise(config)}
    assert keys == {
        "optim.lr",
        "run.batch_size",
        "method.alpha",
        "data.max_length",
        "optim.clip",
        "optim.warmup",
    }


def test_advise_names_keys_of_mix_parts(cli, tiny_directory, tmp_path):
    parts = [
        {"objective": {"kind": "sft"}, "data": {"train": "synth:house:24", "max_length": 40}},
        {
            "objective": {"kind": "dpo"},
            "data": {"train": "synth:house-pairs:8", "max_length": 256},
            "batch_size": 100,
        },
    ]
    values = run_config(tiny_directory, tmp_path, objective={"kind": "mix", "parts": parts})
    del values["data"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    severities = {advice.key: advice.severity for advice in advise(validate_config(values))}
    assert severities == {
        "optim.lr": "warn",
        "method.alpha": "warn",
        "optim.clip": "info",
        "optim.warmup": "warn",
        "objective.parts.0.batch_size": "warn",
        "objective.parts.0.data.max_length": "error",
        "objective.parts.1.batch_size": "error",
        "objective.parts.1.data.max_length": "info",
    }
    followed = [
        "objective.parts.0.batch_size=16",
        "objective.parts.0.data.max_length=256",
        "objective.parts.1.batch_size=8",
    ]
    code, out, _ = cli("advise", tmp_path / "config.yaml", *followed)
    assert (code, "objective.parts" in out) == (0, True)
    assert not re.search("(error|warn) +objective", out)


def test_advise_on_grpo_skips_example_checks(tiny_directory, tmp_path):
    rewarded = {"kind": "grpo", "rewards": ["exact_match"]}
    run = {"steps": None, "epochs": 2}
    for sections in ({}, {"run": run}):
        values = run_config(tiny_directory, tmp_path, objective=rewarded, **sections)
        keys = {advice.key for advice in advise(validate_config(values))}
        assert {"optim.lr", "method.alpha", "optim.clip"} <= keys
        assert keys.isdisjoint({"run.batch_size", "data.max_length"})


@pytest.mark.parametrize("oversample", [False, True])
def test_planned_steps_match_the_run(cli, tiny_directory, tmp_path, oversample):
    lines = [{"input": f"text {i}", "label": "cat" if i % 4 else "dog"} for i in range(40)]
    (tmp_path / "marked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = settings(tiny_directory, tmp_path)
    values["objective"] |= {"classes": ["cat", "dog"], "oversample": oversample, "probe": False}
    values["data"] = {"train": f"{tmp_path}/marked.jsonl", "max_length": 64}
    values["run"] |= {"epochs": 1, "steps": None, "batch_size": 4}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    code, out, err = cli("train", tmp_path / "config.yaml", "--dry-run")
    assert code == 0, out + err
    assert "held out" in out
    result = whet.train(values)
    assert re.search(rf"steps +{result.steps} of at most 4 examples: 1 epoch", out), out
    code, out, _ = cli("plan", tmp_path / "config.yaml", "--json")
    assert json.loads(out)["steps"] == result.steps
