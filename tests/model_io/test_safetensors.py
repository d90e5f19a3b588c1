"""Loading is strict: mismatches are named, and nothing is read from outside the directory."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import whet
from tiny import write_tiny_model
from whet.errors import ModelError


@pytest.fixture
def directory(tmp_path):
    write_tiny_model(tmp_path)
    return tmp_path


def change(directory, edit):
    """Rewrite the weights of a model directory."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def configure(directory, **keys):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def load_error(directory):
    with pytest.raises(ModelError) as caught:
        whet.load(directory)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_missing_unexpected_and_wrongly_shaped_tensors_are_named(directory):
    def edit(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.1.self_attn.z_proj.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.ones(33)

    change(directory, edit)
    message = load_error(directory)
    assert "missing: model.layers.1.self_attn.k_proj.weight" in message
    assert "unexpected: model.layers.1.self_attn.z_proj.weight" in message
    assert "wrong shape: model.norm.weight is [33], expected [32]" in message


def test_tied_head_must_equal_the_embedding(directory):
    change(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert whet.load(directory)[0].spec.tied_head
    change(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    assert "ties the head to the embedding, but lm_head.weight differs" in load_error(directory)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "none.safetensors"])
def test_index_cannot_point_outside_the_directory(directory, name):
    (directory / "model.safetensors").rename(directory.parent / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is not a file in this directory" in load_error(directory)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04K\x01.", b"\xff" * 100, (2**62).to_bytes(8, "little") + b"{}"]
)
def test_invalid_safetensors_file_is_rejected(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    assert "is not a readable safetensors file" in load_error(directory)


def test_pickled_weights_are_never_loaded(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "pickled weights (.bin, .pt) are never loaded" in load_error(directory)


@pytest.mark.parametrize(
    "keys",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"num_key_value_heads": 3},
        {"max_position_embeddings": None},
        {"rope_parameters": [1]},
        {"rms_norm_eps": "x"},
        {"hidden_size": "wide"},
        {"num_hidden_layers": 300_000},
        {"num_hidden_layers": 0},
        {"vocab_size": -1},
    ],
    ids=str,
)
def test_invalid_config_is_a_model_error(directory, keys):
    configure(directory, **keys)
    assert load_error(directory)


def test_unsupported_rope_type_is_named(directory):
    configure(directory, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    with pytest.raises(
        ModelError,
        match=r"transformers cannot load .*whet's native llama does not support rope type 'spiral'",
    ):
        whet.load(directory)


def test_rope_type_without_native_support_is_loaded_through_transformers(directory, caplog):
    configure(directory, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    caplog.set_level("INFO", logger="whet")
    whet.load(directory)
    assert "through transformers (whet's native llama does not support rope type 'dynamic')" in caplog.text


def test_malformed_config_is_named(directory):
    (directory / "config.json").write_text("{")
    assert "config.json is not valid JSON" in load_error(directory)


MEASURE = """
import sys, threading, time, torch
from whet.model_io.load import load_model
import whet.models.decoder, whet.models.transformers_bridge

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024

before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], dtype=getattr(torch, sys.argv[2]), device="cpu")
done = True
watcher.join()
print((peak - before) / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_checkpoint_is_streamed(dtype, tmp_path):
    """Peak memory while loading stays under 1.3 times the model, converted or not."""
    from whet.model_io.save import save_model
    from whet.models.from_scratch.init_weights import new_decoder
    from whet.models.from_scratch.presets import preset_spec

    spec = preset_spec("nano", d_model=512, layers=16, heads=8, width=1536, vocab_size=2000)
    save_model(new_decoder(spec, seed=0), None, tmp_path / "model", max_shard_bytes=60_000_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(result.stdout) < 1.3, result.stdout
