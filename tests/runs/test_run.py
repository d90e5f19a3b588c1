"""Runs from a config: their files, how they resume, and errors."""

import json
import os
import shutil
import signal
from datetime import date

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import whet
from tiny import run_config, write_tiny_model
from whet.errors import CheckpointError, ConfigError, DataError
from whet.run_directory import is_finished, read_summary
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
        return StopRun("stopped by the test", unfinished=True) if step == self.step else None


@pytest.fixture(scope="module")
def finished(tiny_directory, tmp_path_factory):
    """One finished LoRA run that several tests inspect."""
    tmp_path = tmp_path_factory.mktemp("finished")
    sections = {"eval": {"generate": True, "max_new_tokens": 8}, "data": {"test": "synth:house-test:5"}}
    return whet.train(run_config(tiny_directory, tmp_path, **sections))


def test_run_writes_all_files(finished, tiny_directory):
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
    log_text = (directory / "log.txt").read_text()
    assert "whet's native llama" in log_text
    assert "train: synth:house:24: 24 examples" in log_text
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


def test_metrics_file_covers_all_steps_evaluations_and_the_summary(finished):
    metrics_rows = rows(finished.directory)
    assert [row["step"] for row in metrics_rows if "loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in metrics_rows if "eval_loss" in row] == [0, 4]
    assert all("exact_match" in row for row in metrics_rows if "eval_loss" in row)
    summary = metrics_rows[-1]["summary"]
    assert summary["steps"] == 4
    assert summary["tokens"] == sum(row["tokens"] for row in metrics_rows if "loss" in row)
    assert summary["test"].keys() >= {"loss", "perplexity", "exact_match", "exact_match_known"}
    assert summary["fingerprint"] == finished.summary["fingerprint"]


def test_peft_loads_the_adapter_of_a_lora_run(finished, tiny_directory):
    model, tokenizer = whet.load(finished.directory, device="cpu", dtype=torch.float32)
    assert tokenizer.chat_template
    base = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(base, finished.directory / "final")
    tokens = torch.randint(0, 260, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), peft_model(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
        with peft_model.disable_adapter():
            assert not torch.allclose(model(tokens), peft_model(input_ids=tokens).logits, atol=1e-3)


def test_transformers_loads_the_model_of_a_full_run(tiny_directory, tmp_path):
    result = whet.train(run_config(tiny_directory, tmp_path, **METHODS["full"]))
    model, _ = whet.load(result.directory, device="cpu", dtype=torch.float32)
    hf_model = AutoModelForCausalLM.from_pretrained(result.directory / "final")
    base, _ = whet.load(tiny_directory, device="cpu", dtype=torch.float32)
    tokens = torch.randint(0, 260, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), hf_model(tokens).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(tokens), base(tokens), atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pack", [True, False])
def test_resumed_run_is_bit_identical_to_uninterrupted_run(tiny_directory, tmp_path, method, pack):
    sections = {
        **METHODS[method],
        "data": {"pack": pack, "train": "synth:house:10"},
        "run": {"steps": 8, "micro_batch_tokens": 300},  # into the third epoch, several micro-batches a step
        "eval": {"every": 3},
    }
    uninterrupted = whet.train(run_config(tiny_directory, tmp_path / "whole", **sections))
    config = run_config(tiny_directory, tmp_path / "parts", **sections)
    first = whet.train(config, [StopAt(3)])  # where an evaluation is due
    assert first.unfinished
    assert not (first.directory / "final").exists()
    second = whet.resume(first.directory, [StopAt(5)])
    assert (second.steps, second.unfinished) == (5, True)
    third = whet.resume(first.directory)
    assert third.steps == 8

    name = "adapter_model.safetensors" if method == "lora" else "model.safetensors"
    expected, actual = (
        load_file(uninterrupted.directory / "final" / name),
        load_file(third.directory / "final" / name),
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)
    for a, b in zip(rows(uninterrupted.directory), rows(third.directory), strict=True):
        for key in ("step", "loss", "lr", "grad_norm", "tokens_total", "eval_loss"):
            assert a.get(key) == b.get(key)


def test_rows_after_the_checkpoint_are_moved_aside(tiny_directory, tmp_path):
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


@pytest.mark.parametrize("stop", [None, 3, 4, 7])
def test_last_step_has_a_row(tiny_directory, tmp_path, stop):
    sections = {"log": {"every": 3}, "run": {"steps": 7}}
    stops = [] if stop is None else [StopAt(stop)]
    result = whet.train(run_config(tiny_directory, tmp_path, **sections), stops)
    if result.unfinished:
        result = whet.resume(result.directory)
    assert [row["step"] for row in rows(result.directory) if "loss" in row] == [3, 6, 7]
    assert "summary" in rows(result.directory)[-1]


def test_last_step_of_a_run_that_stops_early_has_a_row(tiny_directory, tmp_path):
    class Enough(whet.Callback):
        def on_step_end(self, step, metrics):
            return whet.StopRun("enough") if step == 5 else None

    sections = {"log": {"every": 3}, "run": {"steps": 7}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections), [Enough()])
    assert [row["step"] for row in rows(result.directory) if "loss" in row] == [3, 5]
    metrics = result.directory / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-30])
    whet.resume(result.directory)
    assert [row["step"] for row in rows(result.directory) if "loss" in row] == [3, 5]


def test_sample_rows_with_unicode_line_separators_stay_intact(tiny_directory, tmp_path):
    prompts = ["a\u2028b", "c\u2029d"]
    log = {"samples": {"prompts": prompts, "every": 2, "max_tokens": 2}}
    first = whet.train(run_config(tiny_directory, tmp_path, log=log), [StopAt(3)])
    whet.resume(first.directory)
    written = (first.directory / "samples.jsonl").read_text().removesuffix("\n").split("\n")
    actual = [(row["step"], row["prompt"]) for row in map(json.loads, written)]
    assert actual == [(step, prompt) for step in (0, 2, 4) for prompt in prompts]
    assert not (first.directory / "samples.superseded.jsonl").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:-30], lambda data: data[:-30] + b"\xff\xfe"])
@pytest.mark.parametrize("steps", [4, 6])
def test_finished_run_with_a_damaged_summary_resumes_to_the_same_result(
    tiny_directory, tmp_path, damage, steps
):
    sections = {"eval": {"every": 2}, "data": {"test": "synth:house-test:5"}}
    uninterrupted = whet.train(
        run_config(tiny_directory, tmp_path / "whole", **sections, run={"steps": steps})
    )
    torn = whet.train(run_config(tiny_directory, tmp_path / "torn", **sections)).directory
    metrics, config = torn / "metrics.jsonl", torn / "config.yaml"
    metrics.write_bytes(damage(metrics.read_bytes()))
    config.write_text(config.read_text().replace("steps: 4\n", f"steps: {steps}\n"))
    assert not is_finished(torn)
    assert whet.resume(torn).steps == steps
    assert is_finished(torn)
    assert [row.get("step") for row in rows(torn)] == [
        row.get("step") for row in rows(uninterrupted.directory)
    ]
    resumed_summary, expected_summary = read_summary(torn), read_summary(uninterrupted.directory)
    assert (resumed_summary["steps"], resumed_summary["tokens"], resumed_summary["test"].keys()) == (
        steps,
        expected_summary["tokens"],
        expected_summary["test"].keys(),
    )
    assert '{"summary"' in (torn / "metrics.superseded.jsonl").read_text()
    final = load_file(torn / "final" / "adapter_model.safetensors")
    newest = load_file(torn / "checkpoints" / f"step-{steps:06d}" / "weights.safetensors")
    trained = {f"base_model.model.model.{key}.weight": value for key, value in newest.items()}
    assert all(torch.equal(final[key], trained[key]) for key in final)


def test_row_without_a_newline_is_not_joined_with_the_next(tiny_directory, tmp_path):
    first = whet.train(run_config(tiny_directory, tmp_path, data={"valid": None}), [StopAt(2)])
    metrics = first.directory / "metrics.jsonl"
    step_rows = [row for row in rows(first.directory) if "summary" not in row]
    metrics.write_text("\n".join(map(json.dumps, step_rows)))
    whet.resume(first.directory)
    assert [row.get("step") for row in rows(first.directory)] == [1, 2, 3, 4, None]


def test_run_without_checkpoints_restarts_and_logs_where_its_rows_go(tiny_directory, tmp_path, caplog):
    first = whet.train(run_config(tiny_directory, tmp_path), [StopAt(2)])
    shutil.rmtree(first.directory / "checkpoints")
    caplog.set_level("INFO", logger="whet")
    whet.resume(first.directory)
    message = f"no checkpoint in {first.directory / 'checkpoints'}: restarting from step 1, moving the metrics rows of 2 steps to"
    assert message in caplog.text
    assert [row["step"] for row in rows(first.directory) if "loss" in row] == [1, 2, 3, 4]
    assert '"step": 2' in (first.directory / "metrics.superseded.jsonl").read_text()


def test_damaged_checkpoint_is_skipped_with_a_reason(tiny_directory, tmp_path, caplog):
    first = whet.train(run_config(tiny_directory, tmp_path, checkpoint={"every": 1, "keep": 5}), [StopAt(3)])
    weights = first.directory / "checkpoints" / "step-000003" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    caplog.set_level("INFO", logger="whet")
    result = whet.resume(first.directory)
    assert result.steps == 4
    assert "skipping damaged checkpoint step-000003" in caplog.text
    assert "skipping damaged checkpoint step-000003" in (first.directory / "log.txt").read_text()
    assert "does not match the SHA-256 in its manifest" in caplog.text
    assert "resuming after step 2" in caplog.text


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_largest_and_smallest_seeds_work(tiny_directory, tmp_path, seed):
    first = whet.train(run_config(tiny_directory, tmp_path, run={"seed": seed}), [StopAt(2)])
    assert whet.resume(first.directory).steps == 4


@pytest.mark.parametrize(
    "optim",
    [
        {"schedule": [{"kind": "constant", "steps": 10}, {"kind": "cosine"}]},
        {"groups": {"zzz": {"lr_scale": 2}}},
    ],
)
def test_rejected_config_creates_no_run_directory(tiny_directory, tmp_path, optim):
    config = run_config(tiny_directory, tmp_path, run={"steps": 4}, optim=optim)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"optim\.(schedule|groups)"):
            whet.train(config)
    assert not (tmp_path / "runs").exists()


def test_resume_rejects_missing_finished_and_damaged_runs(finished, tmp_path, tiny_directory):
    with pytest.raises(CheckpointError, match="does not exist"):
        whet.resume(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has already finished"):
        whet.resume(finished.directory)
    first = whet.train(run_config(tiny_directory, tmp_path), [StopAt(1)])
    for path in (first.directory / "checkpoints").rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints is valid"):
        whet.resume(first.directory)


def test_existing_run_is_never_overwritten(finished, tiny_directory):
    before = sorted((finished.directory).rglob("*"))
    config = run_config(tiny_directory, "unused", run={"dir": str(finished.directory.parent)})
    with pytest.raises(ConfigError, match="never overwrites a run") as caught:
        whet.train(config)
    assert "whet resume" not in caught.value.hint, "it has finished"
    assert sorted((finished.directory).rglob("*")) == before


def test_restarted_process_only_resumes_its_own_run(tiny_directory, tmp_path, monkeypatch):
    class Stop(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("enough", unfinished=True) if step == 2 else None

    config = run_config(tiny_directory, tmp_path)
    directory = whet.train(config, [Stop()]).directory
    before = (directory / "metrics.jsonl").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ConfigError, match="already exists, and whet never overwrites a run"):
        whet.train(run_config(tiny_directory, tmp_path, optim={"lr": 0.5}))
    assert (directory / "metrics.jsonl").read_bytes() == before
    assert whet.train(config).steps == 4
    assert [row["step"] for row in rows(directory) if "loss" in row] == [1, 2, 3, 4]


def test_early_stopping_saves_the_best_weights_in_final(tiny_directory, tmp_path, monkeypatch):
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


def test_best_checkpoint_is_never_pruned_even_at_step_0(tiny_directory, tmp_path, monkeypatch):
    losses = iter([1.0] + [5.0] * 9)
    monkeypatch.setattr("whet.training.trainer.Trainer.evaluate", lambda *_: {"eval_loss": next(losses)})
    sections = {"eval": {"every": 1, "early_stop": {"patience": 4}}, "checkpoint": {"every": 1, "keep": 2}}
    result = whet.train(run_config(tiny_directory, tmp_path, run={"steps": 40}, **sections))
    assert (result.steps, result.best["step"]) == (4, 0)
    assert (result.directory / "final").is_dir()


def test_run_stopped_before_its_first_step_resumes_and_evaluates_once(tiny_directory, tmp_path):
    class StopAtOnce(Callback):
        def on_eval_end(self, step, metrics):
            return StopRun("test", unfinished=True)

    sections = {"eval": {"early_stop": {"patience": 1}}}
    first = whet.train(run_config(tiny_directory, tmp_path, **sections), [StopAtOnce()])
    assert (first.steps, first.unfinished) == (0, True)
    result = whet.resume(first.directory)
    assert result.steps == 4
    assert [row["step"] for row in rows(result.directory) if "eval_loss" in row] == [0, 4]


def test_early_stop_is_restored_if_writing_final_failed(tiny_directory, tmp_path, monkeypatch):
    losses = iter([5.0, 4.0, 4.5, 4.5, 4.5])
    monkeypatch.setattr("whet.training.trainer.Trainer.evaluate", lambda *_: {"eval_loss": next(losses)})
    sections = {"run": {"steps": 40}, "eval": {"every": 1, "early_stop": {"patience": 2}}}
    with monkeypatch.context() as broken:
        broken.setattr(
            "whet.recipes.model_setup.save_adapter",
            lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")),
        )
        with pytest.raises(OSError, match="disk full"):
            whet.train(run_config(tiny_directory, tmp_path, **sections))
    result = whet.resume(tmp_path / "runs" / "test")
    assert (result.steps, result.best["step"]) == (3, 1)
    assert "has not improved" in result.stopped_because
    assert (result.directory / "final").is_dir()


def test_run_resumed_with_fewer_steps_than_done_ends_at_once(tiny_directory, tmp_path):
    class StopAt(whet.Callback):
        def on_step_end(self, step, metrics):
            return whet.StopRun("enough", unfinished=True) if step == 5 else None

    config = run_config(tiny_directory, tmp_path, run={"steps": 8})
    directory = whet.train(config, [StopAt()]).directory
    path = directory / "config.yaml"
    path.write_text(path.read_text().replace("steps: 8", "steps: 3"))
    result = whet.resume(directory)
    assert (result.steps, result.unfinished) == (5, False)
    assert (directory / "final").is_dir()


def test_failing_test_evaluation_keeps_final(tiny_directory, tmp_path, monkeypatch):
    sections = {"data": {"test": "synth:house-test:5"}, "eval": {"generate": True, "max_new_tokens": 4}}
    original, calls = whet.evaluation.exact_match.exact_match, []

    def failing(model, tokenizer, questions, **settings):
        calls.append(len(questions))
        if len(questions) == 5:
            raise RuntimeError("no memory")
        return original(model, tokenizer, questions, **settings)

    monkeypatch.setattr("whet.evaluation.answer_metrics.exact_match", failing)
    with pytest.raises(RuntimeError):
        whet.train(run_config(tiny_directory, tmp_path, **sections))
    assert calls[-1] == 5
    assert (tmp_path / "runs" / "test" / "final" / "adapter_model.safetensors").is_file()


def test_prompts_that_fill_the_context_are_counted_but_not_generated(tiny_directory, tmp_path, caplog):
    data = tmp_path / "test.jsonl"
    data.write_text(
        json.dumps({"prompt": "x" * 600, "completion": "y"})
        + "\n"
        + json.dumps({"prompt": "a", "completion": "b"})
    )
    sections = {
        "data": {"valid": str(data), "max_length": 300, "too_long": "drop"},
        "eval": {"generate": True, "max_new_tokens": 3},
    }
    caplog.set_level("INFO", logger="whet")
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    assert "valid: skipping 1 prompts that fill the model's context" in caplog.text
    assert "exact_match" in result.metrics


def test_generation_without_reference_answers_warns(tiny_directory, tmp_path, caplog):
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "hello world"}) + "\n")
    sections = {"data": {"valid": str(data)}, "eval": {"generate": True, "max_new_tokens": 3}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    assert "eval.generate: no record of data.valid has a reference answer" in caplog.text
    assert "exact_match" not in result.metrics


def test_generation_during_a_run_does_not_change_the_run(tiny_directory, tmp_path):
    actual = []
    for name, evaluation in (("quiet", {}), ("asking", {"every": 1, "generate": True, "max_new_tokens": 3})):
        sections = {"eval": evaluation, "method": {"kind": "lora", "rank": 4, "dropout": 0.3}}
        result = whet.train(run_config(tiny_directory, tmp_path / name, **sections))
        actual.append(load_file(result.directory / "final" / "adapter_model.safetensors"))
    assert all(torch.equal(actual[0][key], actual[1][key]) for key in actual[0])


def add_date_to_template(directory, template):
    path = directory / "chat_template.jinja"
    path.write_text("{{ strftime_now('" + template + "') }}" + path.read_text())


def set_today(day, monkeypatch):
    class Day(date):
        @classmethod
        def today(cls):
            return date.fromisoformat(day)

    monkeypatch.setattr("whet.run_directory.date", Day)


def test_template_with_a_date_keeps_the_start_date(tiny_directory, tmp_path, monkeypatch):
    model = shutil.copytree(tiny_directory, tmp_path / "model")
    add_date_to_template(model, "%d")
    set_today("2024-02-28", monkeypatch)
    uninterrupted = whet.train(run_config(model, tmp_path, run={"name": "whole"}))
    part = whet.train(run_config(model, tmp_path, run={"name": "part"}), [StopAt(2)])
    set_today("2024-02-29", monkeypatch)
    monkeypatch.setenv("WHET_TOKENS", str(tmp_path / "elsewhere"))  # on another machine, say
    rest = whet.resume(part.directory)
    losses = [row["loss"] for row in uninterrupted.history if "loss" in row]
    assert [row["loss"] for row in (*part.history, *rest.history) if "loss" in row] == losses
    later = whet.train(run_config(model, tmp_path, run={"name": "later"}))
    assert [row["loss"] for row in later.history if "loss" in row] != losses


def test_resume_rejects_other_tokens_of_the_same_records(tiny_directory, tmp_path):
    model = shutil.copytree(tiny_directory, tmp_path / "model")
    first = whet.train(run_config(model, tmp_path), [StopAt(2)])
    path = model / "chat_template.jinja"
    path.write_text(path.read_text().replace("m['content']", "m['content'] | upper"))
    with pytest.raises(
        CheckpointError, match=r"data.train, data.valid: the tokens are not the ones that .* was trained on"
    ):
        whet.resume(first.directory)


def change_config(directory, **sections):
    path = directory / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for name, keys in sections.items():
        config[name] = {**config[name], **keys} if isinstance(keys, dict) else keys
    path.write_text(yaml.safe_dump(config))


def test_resume_rejects_a_changed_config_and_lists_every_difference(tiny_directory, tmp_path):
    first = whet.train(run_config(tiny_directory, tmp_path), [StopAt(2)])
    original = (first.directory / "config.yaml").read_text()
    changes = {
        "model": "another",
        "run": {"batch_size": 3, "seed": 1, "steps": 9},
        "data": {"max_length": 200, "supervise": "all"},
        "optim": {"name": "lion", "betas": [0.9, 0.99]},
        "checkpoint": {"every": 7},
    }
    change_config(first.directory, **changes)
    with pytest.raises(CheckpointError) as caught:
        whet.resume(first.directory)
    named = dict(line.strip().split(": ", 1) for line in caught.value.message.splitlines()[1:])
    assert named == {
        "model": f'"{tiny_directory}" became "another"',
        "data.max_length": "256 became 200",
        "data.supervise": '"assistant" became "all"',
        "optim.name": '"adamw" became "lion"',
        "optim.betas": "[0.9, 0.999] became [0.9, 0.99]",
        "run.batch_size": "4 became 3",
        "run.seed": "0 became 1",
    }
    (first.directory / "config.yaml").write_text(original)
    change_config(first.directory, run={"steps": 5}, checkpoint={"every": 1}, log={"every": 2})
    assert whet.resume(first.directory).steps == 5


def test_resumed_run_may_change_durations_intervals_and_locations():
    from whet.runs.resume_checks import CHANGEABLE_KEYS

    assert {key for key in CHANGEABLE_KEYS if not key.startswith("objective.parts.")} == {
        *("checkpoint", "parallel", "log", "eval.every", "eval.batches", "eval.max_new_tokens"),
        *("eval.tasks.every",),
        *("run.name", "run.dir", "run.steps", "run.epochs", "run.max_time", "run.max_memory", "run.budget"),
        *("run.on_nonfinite", "run.nonfinite_limit", "run.micro_batch_tokens", "run.grad_checkpoint"),
        *("run.compile", "run.device", "objective.reward_timeout", "objective.reward_memory"),
        *("objective.reward_workers", "objective.samples_every"),
    }


def test_config_of_an_older_version_with_fewer_keys_is_unchanged(tiny_directory, tmp_path):
    from whet.config.load_config import to_dict, validate_config
    from whet.runs.resume_checks import check_config_unchanged

    config = validate_config(run_config(tiny_directory, tmp_path))
    began = to_dict(config)
    for key in ("freeze_pad_row", "decay_embeddings"):
        del began["optim"][key]
    check_config_unchanged(began, config, tmp_path)
    began["optim"]["lr"] = 0.5
    with pytest.raises(CheckpointError, match=r"a resumed run cannot change:\n  optim.lr: 0.5 became 0.01\n"):
        check_config_unchanged(began, config, tmp_path)


def test_resume_rejects_another_architecture_and_other_base_weights(tiny_directory, tmp_path):
    model = shutil.copytree(tiny_directory, tmp_path / "model")
    first = whet.train(run_config(model, tmp_path), [StopAt(2)])
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-6  # a single number, barely
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="the weights of .* are not the ones that .* started with"):
        whet.resume(first.directory)
    write_tiny_model(model, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="the architecture of .* is not the one that .* started with"):
        whet.resume(first.directory)
    write_tiny_model(model)
    assert whet.resume(first.directory).steps == 4


def test_run_that_failed_before_its_first_checkpoint_restarts(tiny_directory, tmp_path):
    class Die(Callback):
        def on_step_end(self, step, metrics):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        whet.train(run_config(tiny_directory, tmp_path), [Die()])
    result = whet.resume(tmp_path / "runs" / "test")
    assert result.steps == 4
    assert [row["step"] for row in rows(result.directory) if "step" in row] == [0, 1, 2, 3, 4, 4]


def test_examples_longer_than_the_context_are_rejected(tmp_path):
    write_tiny_model(tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(DataError, match=r"synth:house:24#\d+: \d+ tokens exceed the 64 positions of "):
        whet.train(run_config(tmp_path / "short", tmp_path))


def test_memory_limit_is_checked_after_each_step(tiny_directory, tmp_path, monkeypatch):
    used = iter([1.0, 1.0, 9.0])
    monkeypatch.setattr("whet.training.limits.used_gib", lambda device: next(used))
    result = whet.train(run_config(tiny_directory, tmp_path, run={"max_memory": 5}))
    assert (result.steps, result.unfinished) == (2, True)


def test_memory_limit_stops_with_a_checkpoint(tiny_directory, tmp_path):
    result = whet.train(run_config(tiny_directory, tmp_path, run={"max_memory": 0.01}))
    assert result.unfinished
    assert "run.max_memory is 0.01 GiB" in result.stopped_because
    assert list((result.directory / "checkpoints").iterdir())


def test_time_limit_restarts_with_each_resume(tiny_directory, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 20))  # twenty seconds between any two looks at it
    monkeypatch.setattr("whet.training.limits.time.monotonic", lambda: float(next(clock)))
    result = whet.train(run_config(tiny_directory, tmp_path, run={"max_time": 0.5, "steps": 4}))
    assert (result.steps, result.unfinished) == (2, True)
    assert "run.max_time of 0.5 minutes is reached" in result.stopped_because
    result = whet.resume(result.directory)
    assert (result.steps, result.unfinished) == (4, False), (
        "a resumed run has its own time, and its last step ends it"
    )


def test_resume_rejects_other_data(tiny_directory, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}", "completion": "x"}) + "\n" for n in range(9)))
    first = whet.train(run_config(tiny_directory, tmp_path, data={"train": str(data)}), [StopAt(2)])
    original = data.read_text()
    data.write_text(original.replace('"3"', '"4"'))
    with pytest.raises(
        CheckpointError, match=r"data.train: the records are not the ones that .* was trained on"
    ):
        whet.resume(first.directory)
    data.write_text(original)
    assert whet.resume(first.directory).steps == 4


def test_damaged_checkpoint_is_rewritten_when_the_run_reaches_its_step(tiny_directory, tmp_path):
    first = whet.train(run_config(tiny_directory, tmp_path, checkpoint={"every": 1, "keep": 9}), [StopAt(3)])
    torn = first.directory / "checkpoints" / "step-000003"
    (torn / "weights.safetensors").write_bytes(b"")
    whet.resume(first.directory)
    from whet.storage import check_manifest

    check_manifest(torn)


def test_finished_run_can_be_trained_further(finished, tmp_path):
    sections = {"model": str(finished.directory), "method": {"kind": "lora", "rank": 2}}
    second = whet.train(run_config(None, tmp_path, **sections))
    base, _ = whet.load(finished.directory, device="cpu", dtype=torch.float32)
    model, _ = whet.load(second.directory, device="cpu", dtype=torch.float32)
    tokens = torch.randint(0, 260, (2, 20))
    with torch.no_grad():
        with whet.adapters_off(model):
            torch.testing.assert_close(model(tokens), base(tokens), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(tokens), base(tokens), atol=1e-3)


def test_early_stopping_restores_the_untrained_weights_if_nothing_improves(
    tiny_directory, tmp_path, monkeypatch
):
    losses = iter([1.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr("whet.training.trainer.Trainer.evaluate", lambda *_: {"eval_loss": next(losses)})
    sections = {"run": {"steps": 40}, "eval": {"every": 1, "early_stop": {"patience": 2}}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    final = load_file(result.directory / "final" / "adapter_model.safetensors")
    assert all(value.abs().max() == 0 for key, value in final.items() if "lora_B" in key)


def test_test_metrics_are_those_of_the_weights_in_final(tiny_directory, tmp_path):
    sections = {
        "data": {"test": "synth:house-test:5"},
        "run": {"steps": 30},
        "optim": {"lr": 0.3, "schedule": "constant"},
        "eval": {"every": 2, "early_stop": {"patience": 1}},
    }
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    from whet.data.sources.source import open_source
    from whet.evaluation.evaluate_model import ModelEvaluation

    model, tokenizer = whet.load(result.directory, device="cpu", dtype=torch.float32)
    actual = ModelEvaluation(model, tokenizer, open_source("synth:house-test:5"), max_length=256).loss()
    assert result.best["step"] < result.steps
    assert result.summary["test"]["loss"] == pytest.approx(actual["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_finishes_the_step_and_saves(tiny_directory, tmp_path, number):
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


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("method", METHODS)
def test_bf16_learns_and_stores_weights_in_the_documented_dtype(tiny_directory, tmp_path, method, precision):
    sections = {**METHODS[method], "run": {"precision": precision, "steps": 6, "grad_checkpoint": True}}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    losses = [row["eval_loss"] for row in result.history if "eval_loss" in row]
    assert losses[-1] < losses[0]
    weights = load_file(result.directory / "checkpoints" / "step-000006" / "weights.safetensors")
    expected = torch.float32 if precision == "bf16" else torch.bfloat16
    assert {tensor.dtype for tensor in weights.values()} == {expected}


@pytest.mark.slow
def test_compiled_layers_train_like_eager_ones(tiny_directory, tmp_path):
    """The results agree within rounding, because a compiler may fuse operations that eager mode rounds."""
    finals = []
    for compiled in (False, True):
        keys = {
            "run": {"compile": compiled, "steps": 3},
            "eval": {"generate": True, "every": 1, "max_new_tokens": 3},
            "optim": {"name": "sgd", "lr": 1.0},  # adamw makes whole steps of gradients that are rounding
        }
        result = whet.train(run_config(tiny_directory, tmp_path / str(compiled), **keys))
        finals.append(load_file(result.directory / "final" / "adapter_model.safetensors"))
    for key in finals[0]:
        torch.testing.assert_close(finals[0][key], finals[1][key], rtol=1e-3, atol=1e-4)


def test_compile_falls_back_with_a_reason(tiny_directory, tmp_path, caplog, monkeypatch):
    from torch import nn

    caplog.set_level("INFO", logger="whet")
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", run={"steps": 2}))
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: (_ for _ in ()).throw(RuntimeError("no compiler"))
    )
    result = whet.train(run_config(tiny_directory, tmp_path / "fallback", run={"steps": 2, "compile": True}))
    assert "compile: off: no compiler" in caplog.text
    name = "final/adapter_model.safetensors"
    expected, actual = load_file(plain.directory / name), load_file(result.directory / name)
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


def test_directory_source_gives_each_key_its_split_and_skips_bad_records(tiny_directory, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "valid"):
        good = [json.dumps({"prompt": f"{split} {n}", "completion": "x"}) for n in range(9)]
        bad = ["{", json.dumps({"messages": [{"role": "user", "content": "unanswered"}]}), '{"text": 3}']
        (data / f"{split}.jsonl").write_text("\n".join([*good, *bad]))
    sections = {"train": str(data), "on_bad_record": "skip"}
    config = run_config(tiny_directory, tmp_path, data=sections, eval={"generate": True, "max_new_tokens": 2})
    config["data"]["valid"] = str(data)
    log_text = (whet.train(config).directory / "log.txt").read_text()
    assert f"train: 3 bad records skipped ({data}/train.jsonl:10: not valid JSON" in log_text
    assert f"{data}/train.jsonl:11: no token of this example is supervised" in log_text
    assert f"valid: 3 bad records skipped ({data}/valid.jsonl:10" in log_text
    assert "no validation data" not in log_text
    with pytest.raises(DataError, match=r"train.jsonl:10: not valid JSON"):
        whet.train(
            {
                **config,
                "data": {**config["data"], "on_bad_record": "error"},
                "run": {**config["run"], "name": "b"},
            }
        )


def test_unused_valid_split_is_logged_and_mixtures_and_formats_are_kept(tiny_directory, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "m"}]
    record = json.dumps({"messages": messages, "text": "words"}) + "\n"
    for split in ("train", "validation"):
        (data / f"{split}.jsonl").write_text(record * 8)
    config = run_config(tiny_directory, tmp_path, data={"train": str(data), "format": "text"})
    config["data"].pop("valid", None)
    config["data"].pop("test", None)
    result = whet.train(config)
    log_text = (result.directory / "log.txt").read_text()
    assert f"no validation data: set data.valid to {data}, which has a valid split" in log_text
    assert "8 examples, 48 tokens (40 supervised)" in log_text  # five letters and the end, without a template
    mixed = [{"source": str(data), "weight": 1}, {"source": "synth:house:8", "weight": 3}]
    config = run_config(tiny_directory, tmp_path, data={"train": mixed}, run={"name": "mixed"})
    result = whet.train(config)
    assert (
        f"train: 0.25 {data} + 0.75 synth:house:8: 30 examples" in (result.directory / "log.txt").read_text()
    )
    assert yaml.safe_load((result.directory / "config.yaml").read_text())["data"]["train"] == [
        {**source, "epochs": None, "columns": {}} for source in mixed
    ]
