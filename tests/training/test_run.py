"""Whole runs from a config: what they leave on disk, how they resume, and what they refuse."""

import json
import os
import signal

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import whet
from tiny import run_config
from whet.errors import CheckpointError, ConfigError
from whet.training.callbacks import Callback, StopRun

METHODS = {
    "lora": {"method": {"kind": "lora", "rank": 4, "dropout": 0.1}},
    "full": {"method": {"kind": "full"}, "optim": {"lr": 1e-3}},
}


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("the test says so", unfinished=True) if step == self.step else None


@pytest.fixture(scope="module")
def finished(tiny_directory, tmp_path_factory):
    """One finished LoRA run, looked at by several tests."""
    tmp_path = tmp_path_factory.mktemp("finished")
    sections = {"eval": {"generate": True, "max_new_tokens": 8}, "data": {"test": "synth:house-test:5"}}
    return whet.train(run_config(tiny_directory, tmp_path, **sections))


def test_a_run_leaves_what_the_design_says(finished, tiny_directory):
    directory = finished.directory
    names = {path.name for path in directory.iterdir()}
    assert {
        "config.yaml",
        "arch.json",
        "provenance.json",
        "metrics.jsonl",
        "log.txt",
        "checkpoints",
        "final",
    } <= names
    said = (directory / "log.txt").read_text()
    assert "whet's own llama" in said
    assert "train: synth:house:24: 24 examples" in said
    config = yaml.safe_load((directory / "config.yaml").read_text())
    assert config["optim"]["betas"] == [0.9, 0.999], "defaults are written out"
    arch = json.loads((directory / "arch.json").read_text())
    assert arch["fingerprint"] == whet.load(tiny_directory, device="cpu", dtype=torch.float32)[0].fingerprint
    provenance = json.loads((directory / "provenance.json").read_text())
    assert torch.__version__.startswith(provenance["versions"]["torch"].split("+")[0])
    assert provenance["data_sha256"].keys() == {"train", "valid", "test"}
    assert {p.name for p in (directory / "checkpoints" / "step-000004").iterdir()} == {
        "weights.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json",
    }  # fmt: skip


def test_the_metrics_of_a_run_tell_its_story(finished):
    found = rows(finished.directory)
    assert [row["step"] for row in found if "loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in found if "eval_loss" in row] == [0, 4]
    assert all("exact_match" in row for row in found if "eval_loss" in row)
    summary = found[-1]["summary"]
    assert summary["steps"] == 4
    assert summary["tokens"] == sum(row["tokens"] for row in found if "loss" in row)
    assert summary["test"].keys() >= {"loss", "perplexity", "exact_match", "exact_match_known"}
    assert summary["fingerprint"] == finished.summary["fingerprint"]


def test_a_lora_run_ends_in_an_adapter_that_peft_loads(finished, tiny_directory):
    model, tokenizer = whet.load(finished.directory, device="cpu", dtype=torch.float32)
    assert tokenizer.chat_template
    base = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, finished.directory / "final")
    tokens = torch.randint(0, 260, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
        with theirs.disable_adapter():
            assert not torch.allclose(model(tokens), theirs(input_ids=tokens).logits, atol=1e-3)


def test_a_full_run_ends_in_a_model_that_transformers_loads(tiny_directory, tmp_path):
    result = whet.train(run_config(tiny_directory, tmp_path, **METHODS["full"]))
    model, _ = whet.load(result.directory, device="cpu", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(result.directory / "final")
    base, _ = whet.load(tiny_directory, device="cpu", dtype=torch.float32)
    tokens = torch.randint(0, 260, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(tokens), base(tokens), atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pack", [True, False])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tiny_directory, tmp_path, method, pack):
    sections = {
        **METHODS[method],
        "data": {"pack": pack, "train": "synth:house:10"},
        "run": {"steps": 8, "micro_batch_tokens": 300},  # into the third epoch, several micro-batches a step
        "eval": {"every": 3},
    }
    whole = whet.train(run_config(tiny_directory, tmp_path / "whole", **sections))
    config = run_config(tiny_directory, tmp_path / "parts", **sections)
    first = whet.train(config, [StopAt(2)])
    assert first.unfinished
    assert not (first.directory / "final").exists()
    second = whet.resume(first.directory, [StopAt(5)])
    assert (second.steps, second.unfinished) == (5, True)
    third = whet.resume(first.directory)
    assert third.steps == 8

    name = "adapter_model.safetensors" if method == "lora" else "model.safetensors"
    expected, found = load_file(whole.directory / "final" / name), load_file(third.directory / "final" / name)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    for a, b in zip(rows(whole.directory), rows(third.directory), strict=True):
        for key in ("step", "loss", "lr", "grad_norm", "tokens_total", "eval_loss"):
            assert a.get(key) == b.get(key)


def test_rows_after_the_checkpoint_are_set_aside_not_lost(tiny_directory, tmp_path):
    first = whet.train(run_config(tiny_directory, tmp_path), [StopAt(2)])
    metrics = first.directory / "metrics.jsonl"
    # a crash after step 3, whose row was written and whose checkpoint was not
    metrics.write_text(
        "".join(json.dumps(row) + "\n" for row in rows(first.directory) if "summary" not in row)
    )
    with metrics.open("a") as file:
        file.write('{"step": 3, "loss": 123.0}\n{"step": 4, "lo')
    whet.resume(first.directory)
    steps = [row["step"] for row in rows(first.directory) if "loss" in row]
    assert steps == [1, 2, 3, 4]
    assert "123.0" in (first.directory / "metrics.superseded.jsonl").read_text()


def test_a_broken_checkpoint_is_skipped_with_a_reason(tiny_directory, tmp_path, caplog):
    first = whet.train(run_config(tiny_directory, tmp_path, checkpoint={"every": 1, "keep": 5}), [StopAt(3)])
    weights = first.directory / "checkpoints" / "step-000003" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    caplog.set_level("INFO", logger="whet")
    result = whet.resume(first.directory)
    assert result.steps == 4
    assert "skipped checkpoint step-000003" in caplog.text
    assert "does not match its sha256" in caplog.text
    assert "resuming after step 2" in caplog.text


def test_what_cannot_be_resumed_is_refused(finished, tmp_path, tiny_directory):
    with pytest.raises(CheckpointError, match="is not a run"):
        whet.resume(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has finished"):
        whet.resume(finished.directory)
    first = whet.train(run_config(tiny_directory, tmp_path), [StopAt(1)])
    for path in (first.directory / "checkpoints").rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="1 found, none of them whole"):
        whet.resume(first.directory)


def test_an_existing_run_is_never_overwritten(finished, tiny_directory):
    before = sorted((finished.directory).rglob("*"))
    config = run_config(tiny_directory, "unused", run={"dir": str(finished.directory.parent)})
    with pytest.raises(ConfigError, match="overwrites no run") as caught:
        whet.train(config)
    assert "whet resume" not in caught.value.hint, "it has finished"
    assert sorted((finished.directory).rglob("*")) == before


def test_early_stopping_leaves_the_best_weights_in_final(tiny_directory, tmp_path, monkeypatch):
    losses = iter([5.0, 4.0, 3.0, 3.5, 3.5, 3.5])
    monkeypatch.setattr("whet.training.trainer.Trainer.evaluate", lambda *_: {"eval_loss": next(losses)})
    sections = {"run": {"steps": 40}, "eval": {"every": 1, "early_stop": {"patience": 2}}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    assert (result.steps, result.best["step"]) == (4, 2)
    final = load_file(result.directory / "final" / "adapter_model.safetensors")
    for step, same in ((2, True), (4, False)):
        weights = load_file(result.directory / "checkpoints" / f"step-{step:06d}" / "weights.safetensors")
        ours = {f"base_model.model.model.{key}.weight": value for key, value in weights.items()}
        assert all(torch.equal(final[key], ours[key]) for key in final) == same


def test_a_memory_limit_stops_with_a_checkpoint(tiny_directory, tmp_path):
    result = whet.train(run_config(tiny_directory, tmp_path, run={"max_memory": 0.01}))
    assert result.unfinished
    assert "run.max_memory is 0.01 GiB" in result.stopped_because
    assert list((result.directory / "checkpoints").iterdir())


def test_a_time_limit_counts_from_the_start_of_each_part(tiny_directory, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 20))  # twenty seconds between any two looks at it
    monkeypatch.setattr("whet.training.callbacks.time.monotonic", lambda: float(next(clock)))
    result = whet.train(run_config(tiny_directory, tmp_path, run={"max_time": 0.5, "steps": 4}))
    assert (result.steps, result.unfinished) == (2, True)
    assert "run.max_time of 0.5 minutes is over" in result.stopped_because
    result = whet.resume(result.directory)
    assert (result.steps, result.unfinished) == (4, True), "a resumed run has its own time"


def test_resume_refuses_other_data(tiny_directory, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}", "completion": "x"}) + "\n" for n in range(9)))
    first = whet.train(run_config(tiny_directory, tmp_path, data={"train": str(data)}), [StopAt(2)])
    original = data.read_text()
    data.write_text(original.replace('"3"', '"4"'))
    with pytest.raises(CheckpointError, match=r"data.train is no longer what .* was trained on"):
        whet.resume(first.directory)
    data.write_text(original)
    assert whet.resume(first.directory).steps == 4


def test_a_torn_checkpoint_is_written_again_when_the_run_passes_it(tiny_directory, tmp_path):
    first = whet.train(run_config(tiny_directory, tmp_path, checkpoint={"every": 1, "keep": 9}), [StopAt(3)])
    torn = first.directory / "checkpoints" / "step-000003"
    (torn / "weights.safetensors").write_bytes(b"")
    whet.resume(first.directory)
    from whet.storage import check_manifest

    check_manifest(torn)


def test_a_finished_run_can_be_trained_further(finished, tmp_path):
    sections = {"model": str(finished.directory), "method": {"kind": "lora", "rank": 2}}
    second = whet.train(run_config(None, tmp_path, **sections))
    base, _ = whet.load(finished.directory, device="cpu", dtype=torch.float32)
    model, _ = whet.load(second.directory, device="cpu", dtype=torch.float32)
    tokens = torch.randint(0, 260, (2, 20))
    with torch.no_grad():
        with whet.adapters_off(model):
            torch.testing.assert_close(model(tokens), base(tokens), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(tokens), base(tokens), atol=1e-3)


def test_when_nothing_improves_early_stopping_gives_the_untouched_weights_back(
    tiny_directory, tmp_path, monkeypatch
):
    losses = iter([1.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr("whet.training.trainer.Trainer.evaluate", lambda *_: {"eval_loss": next(losses)})
    sections = {"run": {"steps": 40}, "eval": {"every": 1, "early_stop": {"patience": 2}}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    final = load_file(result.directory / "final" / "adapter_model.safetensors")
    assert all(value.abs().max() == 0 for key, value in final.items() if "lora_B" in key)


def test_the_test_figures_are_those_of_the_weights_in_final(tiny_directory, tmp_path):
    sections = {
        "data": {"test": "synth:house-test:5"},
        "run": {"steps": 30},
        "optim": {"lr": 0.3, "schedule": "constant"},
        "eval": {"every": 2, "early_stop": {"patience": 1}},
    }
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    from whet.data.sources import read_records
    from whet.training.evaluation import ModelEvaluation

    model, tokenizer = whet.load(result.directory, device="cpu", dtype=torch.float32)
    found = ModelEvaluation(model, tokenizer, read_records("synth:house-test:5"), max_length=256).loss()
    assert result.best["step"] < result.steps
    assert result.summary["test"]["loss"] == pytest.approx(found["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tiny_directory, tmp_path, number):
    class Send(Callback):
        def on_step_end(self, step, metrics):
            if step == 2:
                os.kill(os.getpid(), number)

    result = whet.train(run_config(tiny_directory, tmp_path, run={"steps": 50}), [Send()])
    assert result.unfinished
    assert result.steps in (2, 3)
    assert number.name in result.stopped_because
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert whet.resume(result.directory, [StopAt(result.steps + 1)]).steps == result.steps + 1


def test_epochs_count_passes_over_the_data(tiny_directory, tmp_path):
    config = run_config(
        tiny_directory, tmp_path, data={"train": "synth:house:10"}, run={"steps": None, "epochs": 2}
    )
    assert whet.train(config).steps == 6  # ten examples in steps of four: 4, 4, 2


def test_compile_works_or_falls_back_with_a_reason(tiny_directory, tmp_path, caplog, monkeypatch):
    from torch import nn

    caplog.set_level("INFO", logger="whet")
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", run={"steps": 2}))
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: (_ for _ in ()).throw(RuntimeError("no compiler"))
    )
    result = whet.train(run_config(tiny_directory, tmp_path / "fallback", run={"steps": 2, "compile": True}))
    assert "compile: off: no compiler" in caplog.text
    name = "final/adapter_model.safetensors"
    expected, found = load_file(plain.directory / name), load_file(result.directory / name)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
