"""Quantized exports: transformers opens them, and its logits are those of weights dequantized by a plain formula."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import whet
from tiny import write_tiny_model, write_tokenizer
from whet.errors import ModelError
from whet.evaluation.quantization_loss import quantized_activations
from whet.model_io.export.export_model import load_for_export
from whet.model_io.export.quantize_model import quantize_model
from whet.model_io.export.quantized_check import load_dequantized

pytest.importorskip("compressed_tensors")
pytest.importorskip("bitsandbytes")

TOKENS = torch.arange(24).reshape(2, 12)
KINDS = ["fp8", "fp8-tensor", "int8", "int4", "nf4"]
SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "eos_token_id": 256,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GROUPED)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),  # through the bridge
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=260, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the directory of a random model by name, written on first use."""
    root = tmp_path_factory.mktemp("bases")

    def write(name):
        if not (root / name).exists():
            if name == "llama":  # tied
                write_tiny_model(root / name, hidden_size=64, intermediate_size=128)
            else:
                torch.manual_seed(0)
                MODELS[name]().save_pretrained(root / name)
                write_tokenizer(root / name)
        return root / name

    return write


def write_quantized(source, directory, kind, dtype=torch.float32):
    name, _, scales = kind.partition("-")
    quantize_model(load_for_export(source), name, dtype=dtype, scales=scales or None).write(directory)
    return directory


def logits_of(model, dtype=torch.float32):
    with torch.no_grad():
        output = model(TOKENS)
    return getattr(output, "logits", output).to(dtype)


def codes_of(stored, bits):
    """Unpack the words of a matrix one by one."""
    count = 32 // bits
    offset = 2 ** (bits - 1)
    return torch.tensor(
        [
            [
                ((word & 0xFFFFFFFF) >> (bits * index)) % 2**bits - offset
                for word in row
                for index in range(count)
            ]
            for row in stored.tolist()
        ],
        dtype=torch.float64,
    )


def nf4_weight(tensors, name):
    """Dequantize NF4 with double quantization, from the maps in the file."""
    state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    packed, double = tensors[name].flatten().long(), torch.float64
    codes = torch.stack([packed // 16, packed % 16], 1).flatten()
    scales = tensors[f"{name}.nested_quant_map"].to(double)[tensors[f"{name}.absmax"].long()]
    blocks = torch.arange(len(scales)) // state["nested_blocksize"]
    scales = scales * tensors[f"{name}.nested_absmax"].to(double)[blocks] + state["nested_offset"]
    values = tensors[f"{name}.quant_map"].to(double)[codes].view(-1, state["blocksize"]) * scales[:, None]
    return values.view(state["shape"])


def dequantized_by_formula(directory):
    """Return the float64 weights of a quantized directory by name."""
    tensors = load_file(directory / "model.safetensors")
    quantization = json.loads((directory / "config.json").read_text())["quantization_config"]
    weights = {}
    for name in tensors:
        if name.endswith(".quant_state.bitsandbytes__nf4"):
            weight = name.removesuffix(".quant_state.bitsandbytes__nf4")
            weights[weight] = nf4_weight(tensors, weight)
        elif name.endswith(".weight_scale"):
            module, scale = name.removesuffix("_scale"), tensors[name].double()
            if f"{module}_packed" in tensors:
                bits = quantization["config_groups"]["group_0"]["weights"]["num_bits"]
                codes = codes_of(tensors[f"{module}_packed"], bits)
                assert list(codes.shape) == tensors[f"{module}_shape"].tolist()
            else:
                codes = tensors[module].double()
            per_scale = codes.shape[1] // scale.shape[-1] if scale.dim() == 2 else 1
            weights[module] = codes * (scale.repeat_interleave(per_scale, 1) if scale.dim() == 2 else scale)
    return weights


def reference_logits(source, directory):
    """Return the float64 logits of the float model with its weights replaced by the dequantized ones."""
    tensors = {name: tensor.double() for name, tensor in load_file(source / "model.safetensors").items()}
    quantized = dequantized_by_formula(directory)
    assert quantized.keys() <= tensors.keys()
    before = AutoModelForCausalLM.from_pretrained(source)
    model = type(before).from_pretrained(
        None, config=before.config, state_dict={**tensors, **quantized}, dtype=torch.float64
    )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the other one does not support float64
    return logits_of(model.eval(), torch.float64)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama", kind) for kind in KINDS), ("mixtral", "fp8"), ("mixtral", "int4"), ("qwen3_moe", "int8"),
     ("qwen3_moe", "int4"), ("phi3", "int4"), ("phi3", "nf4"), ("gpt_neox", "int8"), ("gpt_neox", "nf4")],
)  # fmt: skip
def test_transformers_and_whet_compute_with_the_dequantized_weights(base, tmp_path, name, kind):
    directory = write_quantized(base(name), tmp_path / "out", kind)
    expected = reference_logits(base(name), directory)
    before = logits_of(whet.load(base(name), dtype=torch.float32, device="cpu")[0])
    assert (before - expected).abs().max() > 1e-2  # quantization changes something
    torch.testing.assert_close(
        logits_of(load_dequantized(directory), torch.float64), expected, rtol=1e-4, atol=1e-4
    )
    model, tokenizer = whet.load(directory, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(logits_of(model, torch.float64), expected, rtol=1e-4, atol=1e-4)
    assert tokenizer is not None
    assert "quantization_config" not in model.hf_config()


@pytest.mark.parametrize("kind", KINDS)
def test_only_linear_layers_are_quantized(base, tmp_path, kind):
    directory = write_quantized(base("llama"), tmp_path / "out", kind, torch.bfloat16)
    quantized = dequantized_by_formula(directory)
    assert len(quantized) == 14
    assert all("proj" in name for name in quantized)
    tensors = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied
    assert tensors["model.embed_tokens.weight"].dtype == tensors["model.norm.weight"].dtype == torch.bfloat16
    model = load_dequantized(directory)
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    ours = whet.load(directory, dtype=torch.float32, device="cpu")[0]
    torch.testing.assert_close(logits_of(model), logits_of(ours), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_routers_are_listed_as_unquantized(base, tmp_path, kind):
    directory = write_quantized(base("mixtral"), tmp_path / "out", kind)
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
    assert config["ignore"] == ["lm_head", *routers]
    tensors = load_file(directory / "model.safetensors")
    assert all(tensors[f"{name}.weight"].dtype == torch.float32 for name in config["ignore"])
    part = "weight" if kind == "fp8" else "weight_packed"
    assert f"model.layers.1.block_sparse_moe.experts.3.w2.{part}" in tensors


def test_fp8_is_measured_with_the_activations_that_transformers_quantizes(base, tmp_path):
    directory = write_quantized(base("llama"), tmp_path / "out", "fp8")
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    model = whet.load(directory, dtype=torch.float32, device="cpu")[0]
    plain = logits_of(model)
    with quantized_activations(model, dequantized_by_formula(directory)):
        ours = logits_of(model)
    torch.testing.assert_close(logits_of(model), plain)  # the hooks are gone
    # values next to the middle of two codes may be rounded to the other one
    assert (ours - theirs).norm() < 0.2 * (plain - theirs).norm()


def test_nf4_files_are_those_that_transformers_saves(base, tmp_path):
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base("llama"), dtype=torch.float32, quantization_config=config, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "theirs")
    write_quantized(base("llama"), tmp_path / "ours", "nf4")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        if name.endswith("bitsandbytes__nf4"):
            state, expected = (json.loads(bytes(each.tolist())) for each in (ours[name], tensor))
            assert state == {**expected, "nested_offset": pytest.approx(expected["nested_offset"])}
        elif name.endswith("absmax"):  # its CPU kernel does not always select the nearest code of a scale
            assert ours[name].shape == tensor.shape
        else:
            torch.testing.assert_close(ours[name], tensor)
    configs = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for name in ("ours", "theirs")
    ]
    assert configs[0] == {**configs[1], "llm_int8_skip_modules": ["lm_head"]}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("gpt2", "int8", "Conv1D"),
        ("mixtral", "nf4", "bitsandbytes leaves experts unquantized"),
        ("narrow", "int4", "has 40 columns, which is not a multiple of 32"),
        ("narrow", "nf4", "has 40 columns, which is not a multiple of 64"),
    ],
)
def test_models_that_do_not_fit_are_refused(base, tmp_path, name, kind, message):
    if name == "narrow":
        write_tiny_model(tmp_path / name, hidden_size=64, intermediate_size=40)
    source = tmp_path / name if name == "narrow" else base(name)
    with pytest.raises(ModelError, match=message):
        write_quantized(source, tmp_path / "out", kind)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("columns", "size"), [(128, 128), (192, 64), (96, 32)])
def test_group_size_of_int4_divides_all_rows(tmp_path, columns, size):
    write_tiny_model(tmp_path / "base", hidden_size=128, intermediate_size=columns)
    directory = write_quantized(tmp_path / "base", tmp_path / "out", "int4")
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == size
    scale = load_file(directory / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale"]
    assert tuple(scale.shape) == (128, columns // size)


def edit_config(directory: Path, edit):
    config = json.loads((directory / "config.json").read_text())
    edit(config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("int8", lambda config: config.update(quant_method="awq"), "quantized by awq are not supported"),
        ("int8", lambda config: config.update(config_groups={"a": 3}), "quantization_config is invalid"),
        ("nf4", lambda config: config.update(bnb_4bit_quant_type="fp4"), "fp4 weights of bitsandbytes"),
        ("nf4", lambda config: config.update(load_in_4bit=False), "int8 weights of bitsandbytes"),
    ],
)
def test_other_quantized_models_are_refused(base, tmp_path, kind, edit, message):
    directory = write_quantized(base("llama"), tmp_path / "out", kind)
    edit_config(directory, edit)
    with pytest.raises(ModelError, match=message) as caught:
        whet.load(directory)
    assert "whet reads fp8, int8 and int4" in str(caught.value) or "invalid" in str(caught.value)


def test_lost_scales_are_named(base, tmp_path):
    from safetensors.torch import save_file

    directory = write_quantized(base("llama"), tmp_path / "out", "int8")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_shape"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj lacks .*weight_shape"):
        whet.load(directory)


def test_quantized_models_are_merged_dequantized(base, tmp_path):
    directory = write_quantized(base("llama"), tmp_path / "int8", "int8")
    whet.merge_models([directory, directory], tmp_path / "merged", method="average")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    models = [
        whet.load(each, dtype=torch.float32, device="cpu")[0] for each in (directory, tmp_path / "merged")
    ]
    torch.testing.assert_close(*map(logits_of, models))
