"""The Python API: whet.train, resume, evaluate and export, and the public names."""

import io
import json
import logging
import math
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import whet
from tiny import run_config
from whet.errors import ConfigError, DataError, RunError
from whet.model_io.export.export_check import Check
from whet.run_directory import LOG_FILE

LOG = logging.getLogger("whet")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def reset_logging(monkeypatch):
    """A function that resets Python's logging to its initial state, without the handlers of pytest."""
    level = LOG.level

    def reset():
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(LOG, "handlers", [])
        monkeypatch.setattr(LOG, "propagate", True)
        LOG.setLevel(logging.NOTSET)
        logging.getLogger("whet.progress").setLevel(logging.NOTSET)

    yield reset
    LOG.setLevel(level)


@pytest.fixture(scope="module")
def run(tiny_directory, tmp_path_factory):
    return whet.train(run_config(tiny_directory, tmp_path_factory.mktemp("api")), verbose=0)


# --- train and resume


def test_training_logs_to_standard_error(tiny_directory, tmp_path, reset_logging, capsys):
    reset_logging()
    config = run_config(tiny_directory, tmp_path, run={"name": "x" * 200})  # long lines must not be wrapped
    result = whet.train(config)
    out, err = capsys.readouterr()
    assert out == ""
    assert "\x1b" not in err
    lines = err.splitlines()
    assert [line.split()[1] for line in lines if re.match(r"step \d/4  loss \d", line)] == [
        "1/4", "2/4", "3/4", "4/4",
    ]  # fmt: skip
    assert sum("eval loss" in line for line in lines) == 2
    assert any(line.startswith("steps: 4, each of") for line in lines)
    assert (LOG.handlers, LOG.level) == ([], logging.NOTSET), "logging is restored"
    log_text = (result.directory / LOG_FILE).read_text()
    assert "steps: 4, each of" in log_text
    assert "step 1/4" not in log_text, "metrics.jsonl has these"


def test_verbose_0_is_silent(tiny_directory, tmp_path, reset_logging, capsys):
    reset_logging()
    whet.train(run_config(tiny_directory, tmp_path), verbose=0)
    assert capsys.readouterr() == ("", "")


def test_resume_logs_the_remaining_steps(tiny_directory, tmp_path, reset_logging, capsys):
    reset_logging()

    class Stop(whet.Callback):
        def on_step_end(self, step, metrics):
            return whet.StopRun("enough", unfinished=True) if step == 2 else None

    config = run_config(tiny_directory, tmp_path, checkpoint={"every": 1})
    stopped = whet.train(config, [Stop()], verbose=0)
    assert stopped.unfinished
    resumed = whet.resume(stopped.directory)
    err = capsys.readouterr().err
    assert (resumed.steps, resumed.unfinished) == (4, False)
    assert "resuming after step 2" in err
    assert "step 4/4  loss" in err
    assert "step 2/4  loss" not in err


@pytest.mark.parametrize(("level", "lines"), [(logging.INFO, 4), (logging.WARNING, 0)])
@pytest.mark.parametrize("name", ["whet", None], ids=["whet", "root"])
def test_existing_logging_handlers_are_used(
    tiny_directory, tmp_path, reset_logging, capsys, name, level, lines
):
    """Log lines only go to the user's handlers, filtered by the user's level."""
    reset_logging()
    stream = io.StringIO()
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(logging.StreamHandler(stream))
    logger.setLevel(level)
    try:
        result = whet.train(run_config(tiny_directory, tmp_path))
    finally:
        logger.setLevel(before)
    assert capsys.readouterr() == ("", "")
    assert len(re.findall(r"^step \d/4  loss", stream.getvalue(), re.M)) == lines
    assert stream.getvalue().count("steps: 4, each of") == (1 if lines else 0)
    assert "steps: 4, each of" in (result.directory / LOG_FILE).read_text(), "log.txt has them anyway"


def test_logger_level_applies_without_a_handler(tiny_directory, tmp_path, reset_logging, capsys):
    reset_logging()
    LOG.setLevel(logging.ERROR)
    whet.train(run_config(tiny_directory, tmp_path))
    assert capsys.readouterr() == ("", "")
    assert LOG.level == logging.ERROR


def test_terminal_shows_a_progress_bar(tiny_directory, tmp_path, reset_logging, monkeypatch):
    reset_logging()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    whet.train(run_config(tiny_directory, tmp_path))
    output = terminal.getvalue()
    assert "4/4" in output
    assert "step 4/4  loss" not in output
    assert output.count("steps: 4, each of") == 1
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") > 0, "the cursor is shown again"


def test_logging_is_restored_after_an_error(tiny_directory, tmp_path, reset_logging, capsys):
    reset_logging()

    class Fail(whet.Callback):
        def on_step_end(self, step, metrics):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        whet.train(run_config(tiny_directory, tmp_path), [Fail()])
    with pytest.raises(ConfigError, match="optim"):
        whet.train({"model": str(tiny_directory), "optim": {"lr": "much"}})
    assert (LOG.handlers, LOG.filters, LOG.level) == ([], [], logging.NOTSET)
    assert "step 1/4  loss" in capsys.readouterr().err


def test_only_rank_0_shows_progress(monkeypatch, reset_logging):
    reset_logging()
    from whet.api.train import _progress_output

    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, callbacks in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with _progress_output(1) as progress:
            assert (len(progress), len(LOG.handlers)) == (callbacks, callbacks)


# --- evaluate


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": "The lamp is on."}, {"text": "Dim it, then lock the door behind you."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, [row["text"] for row in rows]


def test_loss_matches_transformers(tiny_directory, texts):
    path, rows = texts
    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([[*tokenizer(row)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(ids).logits
        total += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    metrics = whet.evaluate(whet.load(tiny_directory, dtype=torch.float32, device="cpu"), path)
    assert metrics["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert not any(name.startswith("exact_match") for name in metrics)


def test_run_directory_and_loaded_model_give_the_same_loss(run, texts):
    path, _ = texts
    model, tokenizer = whet.load(run.directory)
    expected = whet.evaluate(run.directory, path)
    results = [
        whet.evaluate(str(run.directory / "final"), str(path)),
        whet.evaluate((model, tokenizer), path),
        whet.evaluate(model, path, tokenizer=tokenizer),
    ]
    assert [result["eval_loss"] for result in results] == [expected["eval_loss"]] * 3


def test_generate_reports_exact_match_and_samples(run, caplog):
    calls = []
    with caplog.at_level(logging.INFO, "whet"):
        metrics = whet.evaluate(
            run.directory,
            "synth:house-test:4",
            generate=True,
            samples=2,
            max_tokens=4,
            progress=lambda *counts: calls.append(counts),
        )
    assert 0 <= metrics["exact_match"] <= 1
    assert (calls[0], calls[-1]) == ((0, 4), (4, 4))
    assert caplog.text.count("expected  ") == 2


def test_evaluating_a_classifier_returns_its_report(tiny_directory, tmp_path):
    classifier = whet.Classifier.load(tiny_directory, classes=["no", "yes"], device="cpu", precision="fp32")
    rows = [{"input": "wet", "label": "yes"}, {"input": "dry", "label": "no"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    classifier.save(tmp_path / "saved")
    expected = classifier.evaluate(rows)
    for model in (classifier, tmp_path / "saved", str(tmp_path / "saved")):
        report = whet.evaluate(model, tmp_path / "rows.jsonl")
        assert (report["accuracy"], report["f1_macro"]) == (expected["accuracy"], expected["f1_macro"])


def test_evaluate_rejects_invalid_arguments(tiny, texts):
    path, _ = texts
    with pytest.raises(DataError, match="the model has no tokenizer") as error:
        whet.evaluate(tiny[0], path)
    assert "tokenizer=" in error.value.hint
    with pytest.raises(DataError, match="nowhere"):
        whet.evaluate("no-such-model", "nowhere.jsonl")
    for invalid in ({"max_length": 1}, {"max_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(invalid))):
            whet.evaluate(tiny, path, **invalid)


# --- export


def test_exported_model_matches_in_transformers(run, tmp_path):
    path = whet.export(run.directory, output=tmp_path / "hf", check=True)
    assert path == tmp_path / "hf"
    model, tokenizer = whet.load(run.directory, dtype=torch.float32, device="cpu")
    tokens = torch.tensor([tokenizer("Dim the lamp")["input_ids"]])
    exported = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, model(tokens), atol=2e-4, rtol=1e-3)


def test_exports_go_to_the_run_directory_by_default(run, tmp_path):
    assert whet.export(run.directory, to="peft") == run.directory / "export" / "peft"
    path = whet.export(run.directory, to="gguf", gguf_type="q8_0", output=tmp_path / "model.gguf")
    assert path.read_bytes()[:4] == b"GGUF"
    half = whet.export(run.directory, output=tmp_path / "half", dtype=torch.bfloat16, tolerance=10.0)
    assert AutoModelForCausalLM.from_pretrained(half, dtype="auto").dtype == torch.bfloat16


def test_export_rejects_invalid_arguments(run, tmp_path, monkeypatch):
    for message, keys in {
        "unknown format 'onnx'": {"to": "onnx"},
        "--type only applies to --to gguf": {"gguf_type": "f16"},
        "--dtype only applies to --to hf": {"to": "gguf", "dtype": "float16"},
        "cannot be written in int8": {"dtype": torch.int8},
    }.items():
        with pytest.raises(ConfigError, match=message):
            whet.export(run.directory, output=tmp_path / "out", **keys)
    assert not (tmp_path / "out").exists()
    failed = [Check(True, "this is fine"), Check(False, "that differs")]
    monkeypatch.setattr("whet.model_io.export.export_run.check_export", lambda *_, **__: failed)
    with pytest.raises(RunError, match="CHECK FAILED: that differs"):
        whet.export(run.directory, output=tmp_path / "out", check=True)


# --- names


def test_public_names_exist():
    functions = "train resume plan evaluate export load save generate complete attach_lora load_adapter save_adapter merge"
    classes = "RunConfig RunResult Trainer Objective Loss Callback Classifier"
    modules = "callbacks data optim rl ops merging errors"
    names = f"{functions} {classes} {modules}".split()
    assert set(names) <= set(dir(whet))
    assert all(getattr(whet, name) for name in names)
    assert whet.callbacks.Callback is whet.Callback
    assert whet.optim.create_optimizer is whet.create_optimizer
    assert whet.merging.merge_models is whet.merge_models
    with pytest.raises(AttributeError, match=r"module 'whet.rl' has no attribute 'reward'"):
        _ = whet.rl.reward
