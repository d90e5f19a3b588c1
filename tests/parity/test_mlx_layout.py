"""whet and mlx-lm read each other's adapters, with equal logits and greedy tokens.

mlx-lm runs in a separate process, with this Python or the one that WHET_MLX_PYTHON names.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import whet
from tiny import write_tiny_model, write_tokenizer
from tiny_adapters import load, shake, write_base
from whet.adapters.adapter import named_adapters
from whet.errors import ModelError

GIVEN = [5, 77, 130, 9, 201, 64]
VARIANTS = {
    "lora": {},
    "rslora": {"variant": "rslora"},
    "dora": {"variant": "dora"},
    "pissa": {"variant": "pissa"},
    "last-layer": {"layers": 1, "targets": "qv"},
    "embedding-and-head": {"targets": ["embed_tokens", "lm_head", "mlp"]},
}
MLX_SETTINGS = {
    "lora": {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 7.0, "dropout": 0.0}},
    "dora": {"fine_tune_type": "dora", "num_layers": 1, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}},
    "keys": {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 2, "scale": 3.0, "dropout": 0.1, "keys": ["self_attn.q_proj", "mlp.up_proj"]},
    },
}  # fmt: skip


@functools.cache
def mlx_python():
    python = os.environ.get("WHET_MLX_PYTHON", sys.executable)
    check = subprocess.run([python, "-c", "import mlx_lm"], capture_output=True, check=False)
    return python if check.returncode == 0 else None


def mlx_side(action, model, adapter, tmp_path, settings=None):
    if mlx_python() is None:
        pytest.skip("mlx_lm cannot be imported")
    script = Path(__file__).with_name("mlx_side.py")
    out = tmp_path / "mlx.json"
    extra = [] if settings is None else [json.dumps(settings)]
    subprocess.run(
        [mlx_python(), str(script), action, str(model), str(adapter), str(out), *extra],
        check=True,
        timeout=120,
    )
    return json.loads(out.read_text())


@pytest.fixture(scope="module", params=["llama", "bridge"])
def base(request, tmp_path_factory):
    directory = write_base(tmp_path_factory.mktemp("base") / request.param, request.param)
    write_tokenizer(directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # as in models on the hub
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@torch.no_grad()
def assert_same(model, result):
    """Compare logits, and 24 greedily decoded tokens."""
    logits = torch.tensor(result["logits"])
    torch.testing.assert_close(model(torch.tensor([GIVEN])), logits, rtol=1e-4, atol=1e-4)
    tokens = list(GIVEN)
    for _ in range(len(result["tokens"])):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokens[len(GIVEN) :] == result["tokens"]
    assert len(result["tokens"]) == 24


@pytest.mark.parametrize("variant", VARIANTS)
def test_mlx_lm_generates_the_same_tokens_from_saved_adapters(base, tmp_path, variant):
    model = shake(whet.attach_lora(load(base), rank=4, alpha=6, **VARIANTS[variant]))
    whet.save_adapter(model, tmp_path / "adapter", layout="mlx")
    assert_same(model, mlx_side("use", base, tmp_path / "adapter", tmp_path))


@pytest.mark.parametrize("variant", MLX_SETTINGS)
def test_whet_loads_mlx_lm_adapters(base, tmp_path, variant):
    settings = MLX_SETTINGS[variant] | {"model": str(base)}
    result = mlx_side("make", base, tmp_path / "adapter", tmp_path, settings)
    model = load(tmp_path / "adapter")
    assert next(named_adapters(model), None) is not None
    assert_same(model, result)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mlx_layout_round_trip(base, tmp_path, variant):
    model = shake(whet.attach_lora(load(base), rank=4, alpha=6, **VARIANTS[variant]))
    whet.save_adapter(model, tmp_path / "adapter", layout="mlx")
    loaded = load(tmp_path / "adapter")
    tokens = torch.tensor([GIVEN])
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["num_layers"] == (1 if variant == "last-layer" else 2)
    assert config["fine_tune_type"] == ("dora" if variant == "dora" else "lora")
    rank = 8 if variant == "pissa" else 4
    assert config["lora_parameters"]["rank"] == rank
    assert config["lora_parameters"]["scale"] == pytest.approx(3.0 if variant == "rslora" else 1.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": [0]}, "the same layers of each of the last N blocks"),
        ({"targets": [r"layers\.0.*q_proj", "v_proj"]}, "the same layers of each of the last N blocks"),
        ({"rank_pattern": {"q_proj": 2}}, "ranks or scales that differ"),
        ({"alpha_pattern": {"q_proj": 2}}, "ranks or scales that differ"),
        ({"modules_to_save": ["lm_head"]}, r"modules trained in full \(lm_head.weight\)"),
    ],
)
def test_unsupported_adapters_raise_errors_and_write_nothing(base, tmp_path, settings, message):
    model = whet.attach_lora(load(base), **settings)
    with pytest.raises(ModelError, match=f"the mlx layout does not support .*{message}"):
        whet.save_adapter(model, tmp_path / "adapter", layout="mlx")
    assert not list(tmp_path.iterdir())


def test_broken_or_mismatched_mlx_adapter_error_names_the_difference(base, tiny_directory, tmp_path):
    model = whet.attach_lora(load(base), rank=4)
    whet.save_adapter(model, tmp_path / "adapter", layout="mlx")
    config = tmp_path / "adapter" / "adapter_config.json"
    good = json.loads(config.read_text())
    write_tiny_model(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ModelError, match=r"q_proj.lora_A is \[4, 32\], expected \[4, 48\].*and 18 more"):
        whet.load_adapter(load(tmp_path / "wide"), tmp_path / "adapter")
    for change, message in (
        ({"fine_tune_type": "full"}, "fine_tune_type 'full' is not an adapter"),
        ({"fine_tune_type": "dora"}, "the adapter of .* is incomplete"),
        ({"lora_parameters": {"rank": 4}}, "no lora_parameters with a rank and a scale"),
        ({"lora_parameters": {"rank": 2, "scale": 1.0}}, r"expected \[2, 32\]"),
    ):
        config.write_text(json.dumps(good | change))
        with pytest.raises(ModelError, match=message):
            whet.load_adapter(load(base), tmp_path / "adapter")
