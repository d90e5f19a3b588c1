"""run.fp8: training in fp8 learns like training in bf16, and is rejected where it is not supported."""

import pytest

import whet
from tiny import run_config
from whet.config.load_config import validate_config
from whet.errors import ConfigError
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.recipes.model_setup import use_fp8


def config(tmp_path, name, **run):
    return {
        "model": {
            "preset": "nano",
            "layers": 2,
            "d_model": 64,
            "heads": 2,
            "width": 128,
            "tokenizer": "bytes",
        },
        "method": {"kind": "full"},
        "data": {"train": "synth:python-topics", "max_length": 64, "pack": True},
        "optim": {"lr": 3e-3, "warmup": 2},
        "run": {"name": name, "dir": str(tmp_path), "steps": 25, "batch_tokens": 512, "device": "cpu", **run},
    }


def losses(found):
    return [row["loss"] for row in found.history if "loss" in row]


def test_fp8_loss_follows_plain_training(tmp_path):
    """The losses differ by less than a twentieth of the improvement, and are not identical."""
    plain = losses(whet.train(validate_config(config(tmp_path, "plain"))))
    eight = losses(whet.train(validate_config(config(tmp_path, "eight", fp8=True))))
    learned = plain[0] - plain[-1]
    assert learned > 1.0
    assert max(abs(a - b) for a, b in zip(plain, eight, strict=True)) < learned / 20
    assert eight != plain
    model, _ = whet.load(tmp_path / "eight" / "final")
    assert not any(getattr(module, "fp8", False) for module in model.modules())


def test_only_block_layers_with_suitable_shapes_use_fp8():
    model = new_decoder(preset_spec("nano", layers=1, d_model=64, heads=2, width=40, vocab_size=96), seed=0)
    assert "4 of 7 linear layers" in use_fp8(model, "full")
    assert model.layers[0].self_attn.q_proj.fp8
    assert not model.layers[0].mlp.up_proj.fp8


def test_unsupported_settings_are_rejected(tmp_path, tiny_directory):
    given = run_config(tiny_directory, tmp_path, run={"fp8": True, "steps": 1, "batch_size": 2})
    with pytest.raises(ConfigError, match="run.fp8 trains all weights"):
        whet.train(validate_config({**given, "data": {"train": "synth:house:8"}}))
    model = new_decoder(preset_spec("nano", layers=1, d_model=40, heads=1, width=40, vocab_size=96), seed=0)
    with pytest.raises(ConfigError, match="multiples of 16"):
        use_fp8(model, "full")
