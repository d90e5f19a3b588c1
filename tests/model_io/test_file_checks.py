"""Weights and settings that cannot be valid are rejected by name when a model is loaded."""

import json
import math
import re
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
)

import whet
from model_io.test_gguf_reader import gguf_metadata, gguf_tensors, tiny_model, write_gguf
from tiny import run_config, write_tiny_model
from tiny_adapters import load, shake
from whet.errors import ModelError
from whet.model_io.gguf.reader import convert_gguf

WEIGHTS = "model.safetensors"
NAMES = {
    "llama": "model.layers.1.mlp.up_proj.weight",
    "gpt_neox": "gpt_neox.layers.1.mlp.dense_h_to_4h.weight",
}
INVALID = {
    "nan": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 7, math.nan, t),
    "inf": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 7, -math.inf, t),
    "all-nan": lambda t: torch.full_like(t, math.nan),
    "int32": lambda t: (100 * t).to(torch.int32),
    "bool": lambda t: t > 0,
}


def write_model(directory, kind):
    """Write a llama, which is native, or a GPT-NeoX, which is loaded through transformers."""
    if kind == "llama":
        write_tiny_model(directory)
    else:
        torch.manual_seed(0)
        sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = GPTNeoXConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
        GPTNeoXForCausalLM(config).save_pretrained(directory)
    return directory


def change(path, name, edit):
    tensors = load_file(path)
    tensors[name] = edit(tensors[name]).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def set_key(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def load_error(path, **options):
    with pytest.raises(ModelError) as caught:
        whet.load(path, device="cpu", **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("defect", INVALID)
def test_invalid_weights_are_rejected(tmp_path, kind, defect):
    directory = write_model(tmp_path / "model", kind)
    change(directory / WEIGHTS, NAMES[kind], INVALID[defect])
    message = load_error(directory)
    assert f"{WEIGHTS}: tensor {NAMES[kind]}" in message
    assert ("NaN or infinite" if defect in ("nan", "inf", "all-nan") else f"stored as {defect}") in message


@pytest.mark.parametrize("kind", NAMES)
def test_weights_that_overflow_in_the_dtype_are_rejected(tmp_path, kind):
    directory = write_model(tmp_path / "model", kind)
    change(directory / WEIGHTS, NAMES[kind], lambda t: t + 1e6)
    assert "overflows in" in load_error(directory, dtype=torch.float16)


@pytest.mark.parametrize("value", [math.nan, -1e-5, math.inf])
@pytest.mark.parametrize(("kind", "key"), [("llama", "rms_norm_eps"), ("gpt_neox", "layer_norm_eps")])
def test_invalid_epsilon_is_rejected(tmp_path, kind, key, value):
    directory = write_model(tmp_path / "model", kind)
    set_key(directory / "config.json", **{key: value})
    assert re.search(rf"config\.json: {key} is ", load_error(directory))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": math.nan, "rope_parameters": None},
        {"rope_theta": -1.0, "rope_parameters": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
        {"hidden_size": 10**30, "head_dim": 8},
        {"max_position_embeddings": math.inf},
    ],
    ids=str,
)
def test_other_invalid_config_values_are_rejected(tmp_path, keys):
    directory = write_model(tmp_path / "model", "llama")
    set_key(directory / "config.json", **keys)
    assert load_error(directory)


def test_buffers_may_be_integers_and_infinite(tmp_path):
    """Old GPT-NeoX files contain attention masks, which transformers ignores."""
    directory = write_model(tmp_path / "model", "gpt_neox")
    tensors = load_file(directory / WEIGHTS)
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-math.inf)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    assert whet.load(directory, device="cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base") / "model", "llama")


@pytest.mark.parametrize("layout", ["peft", "mlx"])
@pytest.mark.parametrize("defect", ["nan", "inf", "int32"])
def test_invalid_adapter_weights_are_rejected(tmp_path, base, layout, defect):
    directory = tmp_path / "adapter"
    whet.save_adapter(shake(whet.attach_lora(load(base), rank=2)), directory, layout)
    [file] = directory.glob("*.safetensors")
    name = sorted(load_file(file))[3]
    change(file, name, INVALID[defect])
    assert f"{file.name}: tensor {name}" in load_error(directory)


@pytest.mark.parametrize("value", [math.nan, math.inf, "x", [1]])
@pytest.mark.parametrize("layout", ["peft", "mlx"])
def test_invalid_alpha_is_rejected(tmp_path, base, layout, value):
    directory = tmp_path / "adapter"
    whet.save_adapter(shake(whet.attach_lora(load(base), rank=2)), directory, layout)
    config = directory / "adapter_config.json"
    keys = {"lora_alpha": value} if layout == "peft" else {"lora_parameters": {"rank": 2, "scale": value}}
    set_key(config, **keys)
    assert "adapter_config.json is invalid" in load_error(directory)


def test_checkpoint_of_a_diverged_run_is_rejected(tmp_path, base):
    """The manifest is valid, because the run itself wrote the weights."""
    from whet.storage import MANIFEST, file_sha256

    run = whet.train(run_config(base, tmp_path)).directory
    checkpoint = run / "checkpoints" / "step-000004"
    file = checkpoint / "weights.safetensors"
    name = min(load_file(file))
    change(file, name, INVALID["all-nan"])
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    assert f"tensor {name} has NaN or infinite values" in load_error(checkpoint)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_invalid_gguf_weights_are_rejected(tmp_path, kind, value):
    import gguf

    name, model = "blk.1.ffn_up.weight", tiny_model()
    tensors, tensor_type = gguf_tensors(model), gguf.GGMLQuantizationType[kind]
    values = tensors[name].copy()
    if kind == "Q8_0":  # the scale of a block is its first two bytes
        blocks = gguf.quants.quantize(values, tensor_type)
        blocks[0, :2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        kinds = {name: tensor_type}
        source = write_gguf(
            tmp_path / "x.gguf", gguf_metadata(model.config), tensors | {name: blocks}, kinds=kinds
        )
    else:
        values = values.astype(np.float32 if kind == "F32" else np.float16)
        values[1, 3] = value
        source = write_gguf(tmp_path / "x.gguf", gguf_metadata(model.config), tensors | {name: values})
    with pytest.raises(ModelError, match=rf"x.gguf: tensor {name} has NaN or infinite values"):
        convert_gguf(source, tmp_path / "model")


@pytest.mark.parametrize(("offset", "problem"), [(0, "overlap"), (33, "is not a multiple of 32")])
def test_overlapping_or_misaligned_gguf_tensors_are_rejected(tmp_path, offset, problem):
    model = tiny_model()
    source = write_gguf(tmp_path / "x.gguf", gguf_metadata(model.config), gguf_tensors(model))
    data = bytearray(source.read_bytes())
    name = b"blk.1.ffn_up.weight"
    position = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    dimensions = struct.unpack_from("<I", data, position)[0]
    struct.pack_into("<Q", data, position + 4 + 8 * dimensions + 4, offset)
    source.write_bytes(data)
    with pytest.raises(ModelError, match=problem):
        convert_gguf(source, tmp_path / "model")


@pytest.mark.parametrize("family", ["gpt_oss", "jamba"])
def test_experts_with_a_width_that_the_grouped_kernel_rejects(tmp_path, family):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 36, "intermediate_size": 18, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if family == "gpt_oss":
        config = GptOssConfig(**sizes, **heads, num_hidden_layers=2, head_dim=18, num_local_experts=4)
        GptOssForCausalLM(config).save_pretrained(tmp_path)
    else:
        periods = {
            f"{part}_layer_{key}": n
            for part in ("attn", "expert")
            for key, n in (("offset", 1), ("period", 2))
        }
        config = JambaConfig(
            **sizes, **heads, **periods, num_hidden_layers=4, num_experts=4, mamba_d_state=4, mamba_dt_rank=4
        )
        JambaForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = torch.randint(64, (2, 9))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(model.hidden(tokens)), theirs(tokens).logits, rtol=1e-5, atol=1e-5
        )
