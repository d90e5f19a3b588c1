"""generation_config.json: saved models end completions in transformers where they end in whet."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

import whet
from tiny import run_config
from whet.models.stop_tokens import stop_tokens


def eos_ids(directory):
    eos = GenerationConfig.from_pretrained(directory).eos_token_id
    return set(eos) if isinstance(eos, list) else {eos}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (None, {7, 256}),
        ({"eos_token_id": 7, "temperature": 0.6}, {7, 256}),
        ({"eos_token_id": [7, 9]}, {7, 9, 256}),
        ({"temperature": 0.6}, {7, 256}),
        ("not JSON", {7, 256}),
    ],
    ids=["none", "one", "several", "no EOS", "damaged"],
)
def test_eos_ids_of_config_and_tokenizer_are_added(tiny_directory, tmp_path, stored, expected):
    """The tokenizer ends turns with 256; config.json only has 7."""
    base = tmp_path / "base"
    shutil.copytree(tiny_directory, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    path = base / "generation_config.json"
    path.unlink()
    if stored is not None:
        path.write_text(stored if isinstance(stored, str) else json.dumps(stored))
    model, tokenizer = whet.load(base, device="cpu")
    whet.save(model, tokenizer, tmp_path / "saved")
    whet.save_adapter(whet.attach_lora(model, rank=2), tmp_path / "adapter", tokenizer=tokenizer)
    for directory in (tmp_path / "saved", tmp_path / "adapter"):
        assert eos_ids(directory) == expected
        if isinstance(stored, dict) and "temperature" in stored:
            assert GenerationConfig.from_pretrained(directory).temperature == 0.6
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert set(loaded.generation_config.eos_token_id) == expected
    if not isinstance(stored, str):
        assert stop_tokens(model, tokenizer) == expected


def test_model_from_scratch_has_one(tmp_path):
    config = {
        "model": {
            "preset": "nano",
            "tokenizer": "bpe:300",
            "layers": 1,
            "d_model": 16,
            "width": 16,
            "heads": 2,
        },
        "method": {"kind": "full"},
        "data": {"train": "synth:sums:8", "max_length": 64},
        "run": {"name": "new", "dir": str(tmp_path), "steps": 1, "batch_size": 2, "device": "cpu"},
    }
    result = whet.train(config, verbose=0)
    model, tokenizer = whet.load(result.directory)
    assert eos_ids(result.directory / "final") == stop_tokens(model, tokenizer) == {tokenizer.eos_token_id}


def test_exports_have_one(tiny_directory, tmp_path):
    run = whet.train(run_config(tiny_directory, tmp_path), verbose=0)
    for to in ("hf", "peft", "mlx"):
        assert eos_ids(whet.export(run.directory, to=to)) == {256}
