"""Offline teachers: stored log-probabilities train like the online teacher, and stale ones are rejected."""

import json
import shutil

import numpy as np
import pytest
import torch

import whet
from tiny import run_config, write_tiny_model
from whet.config.load_config import validate_config
from whet.errors import ConfigError, DataError, ModelError
from whet.recipes import frozen_models, teachers
from whet.runs.teach import store_teacher_logprobs


@pytest.fixture
def teacher(tmp_path, monkeypatch):
    """A teacher of another size, and an empty token store."""
    monkeypatch.setenv("WHET_TOKENS", str(tmp_path / "tokens"))
    write_tiny_model(tmp_path / "teacher", hidden_size=48, intermediate_size=80)
    return tmp_path / "teacher"


def config(tiny_directory, tmp_path, teacher, *, offline, name="run", **sections):
    objective = {
        "kind": "distill",
        "teacher": str(teacher),
        "temperature": 2.0,
        **sections.pop("objective", {}),
    }
    if offline:
        objective["offline"] = {"top_k": offline}
    data = {"train": "synth:house:12", "valid": "synth:house-valid:4", **sections.pop("data", {})}
    run = {"name": name, "steps": 4, "batch_size": 6, **sections.pop("run", {})}
    return run_config(tiny_directory, tmp_path, objective=objective, data=data, run=run, **sections)


def losses(result):
    return [row["loss"] for row in result.history if "loss" in row]


@pytest.mark.parametrize("how", [{"pack": True}, {"pack": False}, {"max_length": 60, "too_long": "split"}])
def test_storing_all_tokens_equals_the_online_teacher(tiny_directory, tmp_path, teacher, how, monkeypatch):
    online = whet.train(config(tiny_directory, tmp_path, teacher, offline=None, name="online", data=how))
    settings = config(tiny_directory, tmp_path, teacher, offline=1000, name="offline", data=how)
    store_teacher_logprobs(validate_config(settings))

    def refuse(*_, **__):
        raise AssertionError("an offline teacher was loaded")

    monkeypatch.setattr(frozen_models, "load", refuse)
    offline = whet.train(settings)
    assert losses(offline) == pytest.approx(losses(online), rel=1e-5)
    assert offline.metrics["eval_loss"] == pytest.approx(online.metrics["eval_loss"], rel=1e-5)
    assert "using stored log-probabilities of" in (offline.directory / "log.txt").read_text()


def test_top_k_loss_is_a_lower_bound_and_the_student_learns(tiny_directory, tmp_path, teacher):
    how = {"objective": {"temperature": 1.0, "alpha": 1.0}, "method": {"kind": "full"}}
    actual = {}
    for top_k in (4, 64, None):
        settings = config(tiny_directory, tmp_path, teacher, offline=top_k, name=f"k-{top_k}", **how)
        if top_k:
            store_teacher_logprobs(validate_config(settings))
        actual[top_k] = whet.train(settings)
    first = {top_k: run.history[0]["eval_loss"] for top_k, run in actual.items()}
    assert first[4] < first[64] < first[None]
    assert actual[64].metrics["eval_loss"] < 0.9 * first[64]


def test_several_teachers_are_weighted(tiny_directory, tmp_path, teacher):
    named = [{"model": str(teacher), "weight": 3}, {"model": str(tiny_directory), "weight": 1}]
    runs = []
    for offline in (None, 260):
        settings = config(tiny_directory, tmp_path, teacher, offline=offline, name=f"run-{offline}",
                          objective={"teacher": named})  # fmt: skip
        if offline:
            store_teacher_logprobs(validate_config(settings))
        runs.append(losses(whet.train(settings)))
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


def test_stored_logprobs_match_the_teacher_and_sum_to_one(tiny_directory, tmp_path, teacher):
    from whet.data.run_data import Needs, RunData

    settings = validate_config(config(tiny_directory, tmp_path, teacher, offline=8, data={"max_length": 80}))
    store_teacher_logprobs(settings)
    model, tokenizer = whet.load(teacher, dtype=torch.float32, device="cpu")
    data = RunData(settings, Needs())
    data.prepare(tokenizer)
    [actual] = teachers.open_teacher_logprobs(
        {"train": data.examples["train"]}, settings.objective, student="it", vocab_size=260
    )["train"]
    for index in (0, 5, 11):
        example = data.examples["train"][index]
        logs = model(torch.tensor(np.asarray(example.tokens[:-1]))[None])[0].double().log_softmax(-1)
        logs = logs[torch.tensor(np.asarray(example.supervised[1:]))]
        best = logs.topk(8)
        assert actual[index].ids.tolist() == best.indices.tolist()
        assert actual[index].logprobs[:, :-1] == pytest.approx(best.values.detach().numpy(), rel=1e-4)
        assert np.exp(actual[index].logprobs).sum(-1) == pytest.approx(1, abs=1e-5)


def test_offline_run_resumes_exactly_and_works_in_a_mix(tiny_directory, tmp_path, teacher):
    from whet.training.callbacks import Callback, StopRun

    class StopAt(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("enough", unfinished=True) if step == 2 else None

    def mixed(name):
        settings = config(tiny_directory, tmp_path, teacher, offline=16, name=name)
        part = {"objective": settings.pop("objective"), "data": settings.pop("data")}
        other = {"objective": {"kind": "sft"}, "data": {"train": "synth:house:8", "max_length": 256}}
        return {**settings, "objective": {"kind": "mix", "parts": [part, other]}}

    store_teacher_logprobs(validate_config(mixed("whole")))
    uninterrupted = whet.train(mixed("whole"))
    part = whet.train(mixed("part"), [StopAt()])
    assert losses(part) + losses(whet.resume(part.directory)) == losses(uninterrupted)


def test_missing_or_outdated_logprobs_are_rejected(tiny_directory, tmp_path, teacher):
    settings = config(tiny_directory, tmp_path, teacher, offline=8)
    with pytest.raises(DataError, match="no stored log-probabilities of .* for the train records") as caught:
        whet.train(settings)
    assert caught.value.hint == "compute them with: whet teach CONFIG"
    store_teacher_logprobs(validate_config(settings))
    with pytest.raises(DataError, match="no stored log-probabilities of"):
        whet.train(config(tiny_directory, tmp_path, teacher, offline=9))
    with pytest.raises(DataError, match="no stored log-probabilities of"):
        whet.train(config(tiny_directory, tmp_path, teacher, offline=8, data={"max_length": 100}))
    for path in (tmp_path / "tokens").rglob("teacher-*.bin"):
        content = path.read_bytes()
        path.write_bytes(content[:-4])
    with pytest.raises(DataError, match="no stored log-probabilities of"):
        whet.train(settings)
    store_teacher_logprobs(validate_config(settings))
    torch.manual_seed(3)
    write_tiny_model(tmp_path / "new", hidden_size=48, intermediate_size=80, initializer_range=0.1)
    shutil.copy(tmp_path / "new" / "model.safetensors", teacher / "model.safetensors")
    with pytest.raises(DataError, match="the weights of .* changed after its log-probabilities of") as caught:
        whet.train(settings)
    assert "whet teach" in caught.value.hint
    shutil.rmtree(teacher)  # it is not needed at all
    assert whet.train(settings).steps == 4


def test_teachers_with_another_vocabulary_are_rejected_first(tiny_directory, tmp_path, teacher):
    write_tiny_model(tmp_path / "wider", vocab_size=300)
    with pytest.raises(ModelError, match="has a vocabulary of 300, but .* of 260"):
        store_teacher_logprobs(
            validate_config(config(tiny_directory, tmp_path, tmp_path / "wider", offline=8))
        )
    assert not list((tmp_path / "tokens").rglob("teacher-*"))
    with pytest.raises(ConfigError, match="this config has no offline teacher"):
        store_teacher_logprobs(validate_config(config(tiny_directory, tmp_path, teacher, offline=None)))
    with pytest.raises(ConfigError, match="objective.offline.top_k: Input should be greater than 0"):
        validate_config(
            config(tiny_directory, tmp_path, teacher, offline=None, objective={"offline": {"top_k": 0}})
        )


def test_changed_config_of_the_same_weights_is_another_teacher(tiny_directory, tmp_path, teacher):
    settings = config(tiny_directory, tmp_path, teacher, offline=8)
    store_teacher_logprobs(validate_config(settings))
    changed = json.loads((teacher / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (teacher / "config.json").write_text(json.dumps(changed))
    with pytest.raises(DataError, match="the config of .* changed after its log-probabilities of"):
        whet.train(settings)
