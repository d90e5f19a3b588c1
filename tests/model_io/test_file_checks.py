"""Weights and settings that can only give wrong numbers are refused when a model is opened, with their names."""

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
UNUSABLE = {
    "nan": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 7, math.nan, t),
    "inf": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 7, -math.inf, t),
    "all-nan": lambda t: torch.full_like(t, math.nan),
    "int32": lambda t: (100 * t).to(torch.int32),
    "bool": lambda t: t > 0,
}


def write_model(directory, kind):
    """A llama, which is whet's own, or a GPT-NeoX, which goes through transformers."""
    if kind == "llama":
        write_tiny_model(directory)
    else:
        torch.manual_seed(0)
        sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = GPTNeoXConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
        GPTNeoXForCausalLM(config).save_pretrained(directory)
    return directory


def change(path, name, made):
    tensors = load_file(path)
    tensors[name] = made(tensors[name]).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def set_key(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def refusal(path, **options):
    with pytest.raises(ModelError) as caught:
        whet.load(path, device="cpu", **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("how", UNUSABLE)
def test_unusable_weights(tmp_path, kind, how):
    directory = write_model(tmp_path / "model", kind)
    change(directory / WEIGHTS, NAMES[kind], UNUSABLE[how])
    said = refusal(directory)
    assert f"{WEIGHTS}: tensor {NAMES[kind]}" in said
    assert ("NaN or infinite" if how in ("nan", "inf", "all-nan") else f"stored as {how}") in said


@pytest.mark.parametrize("kind", NAMES)
def test_weights_that_overflow_in_the_precision_asked_for(tmp_path, kind):
    directory = write_model(tmp_path / "model", kind)
    change(directory / WEIGHTS, NAMES[kind], lambda t: t + 1e6)
    assert "overflows in" in refusal(directory, dtype=torch.float16)


@pytest.mark.parametrize("value", [math.nan, -1e-5, math.inf])
@pytest.mark.parametrize(("kind", "key"), [("llama", "rms_norm_eps"), ("gpt_neox", "layer_norm_eps")])
def test_an_unusable_epsilon(tmp_path, kind, key, value):
    directory = write_model(tmp_path / "model", kind)
    set_key(directory / "config.json", **{key: value})
    assert re.search(rf"config\.json: {key} is ", refusal(directory))


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
def test_other_unusable_numbers_of_a_config(tmp_path, keys):
    directory = write_model(tmp_path / "model", "llama")
    set_key(directory / "config.json", **keys)
    assert refusal(directory)


def test_buffers_may_be_integers_and_infinite(tmp_path):
    """Old GPT-NeoX files hold attention masks, which transformers ignores."""
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
@pytest.mark.parametrize("how", ["nan", "inf", "int32"])
def test_unusable_weights_of_an_adapter(tmp_path, base, layout, how):
    directory = tmp_path / "adapter"
    whet.save_adapter(shake(whet.attach_lora(load(base), rank=2)), directory, layout)
    [file] = directory.glob("*.safetensors")
    name = sorted(load_file(file))[3]
    change(file, name, UNUSABLE[how])
    assert f"{file.name}: tensor {name}" in refusal(directory)


@pytest.mark.parametrize("value", [math.nan, math.inf, "x", [1]])
@pytest.mark.parametrize("layout", ["peft", "mlx"])
def test_an_unusable_alpha(tmp_path, base, layout, value):
    directory = tmp_path / "adapter"
    whet.save_adapter(shake(whet.attach_lora(load(base), rank=2)), directory, layout)
    config = directory / "adapter_config.json"
    keys = {"lora_alpha": value} if layout == "peft" else {"lora_parameters": {"rank": 2, "scale": value}}
    set_key(config, **keys)
    assert "adapter_config.json cannot be understood" in refusal(directory)


def test_a_checkpoint_of_a_diverged_run(tmp_path, base):
    """Its manifest agrees: the run itself wrote what it had."""
    from whet.storage import MANIFEST, sha256_of

    run = whet.train(run_config(base, tmp_path)).directory
    checkpoint = run / "checkpoints" / "step-000004"
    file = checkpoint / "weights.safetensors"
    name = min(load_file(file))
    change(file, name, UNUSABLE["all-nan"])
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    assert f"tensor {name} has values that are NaN" in refusal(checkpoint)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_unusable_weights_of_a_gguf_file(tmp_path, kind, value):
    import gguf

    name, model = "blk.1.ffn_up.weight", tiny_model()
    tensors, quantised = gguf_tensors(model), gguf.GGMLQuantizationType[kind]
    values = tensors[name].copy()
    if kind == "Q8_0":  # the scale of a block is its first two bytes
        blocks = gguf.quants.quantize(values, quantised)
        blocks[0, :2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        kinds = {name: quantised}
        source = write_gguf(
            tmp_path / "x.gguf", gguf_metadata(model.config), tensors | {name: blocks}, kinds=kinds
        )
    else:
        values = values.astype(np.float32 if kind == "F32" else np.float16)
        values[1, 3] = value
        source = write_gguf(tmp_path / "x.gguf", gguf_metadata(model.config), tensors | {name: values})
    with pytest.raises(ModelError, match=rf"x.gguf: tensor {name} has values that are NaN or infinite"):
        convert_gguf(source, tmp_path / "model")


@pytest.mark.parametrize(("offset", "problem"), [(0, "overlap"), (33, "is not a multiple of 32")])
def test_gguf_tensors_that_overlap_or_are_not_aligned(tmp_path, offset, problem):
    model = tiny_model()
    source = write_gguf(tmp_path / "x.gguf", gguf_metadata(model.config), gguf_tensors(model))
    data = bytearray(source.read_bytes())
    name = b"blk.1.ffn_up.weight"
    place = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    dimensions = struct.unpack_from("<I", data, place)[0]
    struct.pack_into("<Q", data, place + 4 + 8 * dimensions + 4, offset)
    source.write_bytes(data)
    with pytest.raises(ModelError, match=problem):
        convert_gguf(source, tmp_path / "model")


@pytest.mark.parametrize("family", ["gpt_oss", "jamba"])
def test_experts_of_a_width_that_the_grouped_kernel_does_not_take(tmp_path, family):
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
