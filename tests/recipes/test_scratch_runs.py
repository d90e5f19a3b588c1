"""Training from scratch: presets in a config, tokenizers trained for a run, and errors."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import whet
from whet.config.load_config import validate_config
from whet.config.preset import Preset
from whet.errors import ConfigError
from whet.models.from_scratch import presets


def write_texts(path, count=30):
    lines = [{"text": f"Line {n}: the cat number {n % 7} sits on mat {n % 5}."} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def scratch_config(tmp_path, model, **sections):
    config = {
        "model": {"preset": "nano", "d_model": 32, "layers": 2, "heads": 4, "width": 48, **model},
        "method": {"kind": "full"},
        "data": {"train": write_texts(tmp_path / "train.jsonl"), "max_length": 128},
        "optim": {"lr": 1e-2},
        "run": {
            "dir": str(tmp_path / "runs"),
            "steps": 3,
            "batch_size": 8,
            "device": "cpu",
            "precision": "fp32",
        },
    }
    for name, keys in sections.items():
        config[name] = {**config[name], **keys}
    return config


def test_config_and_registries_have_the_same_names():
    fields = Preset.model_fields

    def names(key):
        kind = fields[key].annotation
        return {
            n
            for part in (kind, *getattr(kind, "__args__", ()))
            for n in getattr(part, "__args__", ())
            if isinstance(n, str)
        } | {n for n in getattr(kind, "__args__", ()) if isinstance(n, str)}

    assert names("preset") == presets.PRESETS.keys()
    assert names("attention") == presets.ATTENTIONS.keys()
    assert names("feedforward") == presets.FEEDFORWARDS.keys()
    assert names("positions") == set(presets.POSITIONS)
    shape = {field.name for field in presets.dataclasses.fields(presets.Shape)}
    assert fields.keys() - {"preset", "tokenizer"} <= shape
    for letter in presets.LETTERS:
        assert letter in fields["pattern"].description


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe:300"])
def test_run_from_scratch_learns_and_transformers_loads_its_result(tmp_path, tokenizer):
    result = whet.train(scratch_config(tmp_path, {"tokenizer": tokenizer}, run={"steps": 12}))
    losses = [row["loss"] for row in result.history if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    final = result.directory / "final"
    tokens = torch.tensor([AutoTokenizer.from_pretrained(final)("the cat").input_ids])
    hf_logits = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)(tokens).logits
    model, _ = whet.load(result.directory, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(model(tokens), hf_logits, rtol=0, atol=2e-4)


def test_seed_determines_initial_weights_and_resume_keeps_the_tokenizer(tmp_path):
    from whet.training.callbacks import Callback, StopRun

    class StopAtTwo(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("enough", unfinished=True) if step == 2 else None

    model = {"tokenizer": "bpe:300", "pattern": "wl", "window": 16}
    directories = {"uninterrupted": f"{tmp_path}/runs", "stopped": f"{tmp_path}/stopped"}
    configs = {
        name: scratch_config(tmp_path, model, run={"name": "run", "dir": directory})
        for name, directory in directories.items()
    }
    uninterrupted = whet.train(configs["uninterrupted"])
    stopped = whet.train(configs["stopped"], [StopAtTwo()])
    assert (stopped.directory / "tokenizer" / "tokenizer.json").is_file()
    resumed = whet.resume(stopped.directory)
    for path in (uninterrupted.directory / "final").iterdir():
        assert path.read_bytes() == (resumed.directory / "final" / path.name).read_bytes(), path.name
    other = whet.train(scratch_config(tmp_path, model, run={"name": "other", "seed": 1}))
    assert other.history[0]["loss"] != uninterrupted.history[0]["loss"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"preset": "nano", "vocab_size": 100}}, "model.vocab_size=100 is smaller than the tokenizer's vocabulary (256)"),
        ({"model": {"preset": "nano", "tokenizer": "bpe:12"}}, "a byte-level BPE cannot have only 12 tokens"),
        ({"model": {"preset": "nano", "heads": 5}}, "model: d_model=128 is not a multiple of heads=5"),
        ({"model": {"preset": "nano", "pattern": "gq"}}, "model: unknown pattern letter 'q'"),
        ({"model": {"preset": "pico"}}, "model.preset: Input should be 'nano'"),
        ({"model": {"preset": "nano", "width_": 3}}, "unknown key 'model.width_', did you mean 'width'?"),
        ({"model": {"preset": "nano"}, "method": {"kind": "lora"}}, "model.preset starts from random weights"),
    ],
)  # fmt: skip
def test_invalid_from_scratch_configs_are_rejected(tmp_path, changes, message):
    config = {**scratch_config(tmp_path, {}), **changes}
    with pytest.raises(ConfigError) as caught:
        whet.train(config)
    assert message in str(caught.value)


def test_numeric_run_names_and_path_objects_are_accepted(tmp_path):
    config = validate_config(
        {
            "model": tmp_path,
            "data": {"train": tmp_path / "a.jsonl"},
            "run": {"name": 2024, "steps": 1, "batch_size": 1},
        }
    )
    assert (config.run.name, config.model, config.data.train) == (
        "2024",
        str(tmp_path),
        f"{tmp_path}/a.jsonl",
    )
