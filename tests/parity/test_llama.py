"""whet's llama computes what transformers' llama computes: logits, gradients, and back from disk."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import whet
from whet.models.decoder import Decoder
from whet.ops.linear_cross_entropy import linear_cross_entropy

LOGIT_TOLERANCE = 2e-4

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "llama3-rope": {"rope_parameters": LLAMA3},
    "multi-head": {"num_key_value_heads": 4},
    "one-kv-head-wide": {"num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-3},
}


def reference(tmp_path, **overrides):
    """A random transformers llama (biases and norms random too), saved where whet can load it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path)
    return model


def tokens(batch=3, length=70):
    return torch.randint(0, TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def test_reference_llama_variants_have_no_leftover(tmp_path):
    """The random configs really exercise the switch they name (a silent default would test nothing)."""
    assert reference(tmp_path / "a", attention_bias=True).model.layers[0].self_attn.q_proj.bias is not None
    assert reference(tmp_path / "b", rope_parameters=LLAMA3).config.rope_parameters["rope_type"] == "llama3"


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path, variant):
    expected = reference(tmp_path, **VARIANTS[variant])
    model = whet.load(tmp_path, dtype=torch.float32, device="cpu")[0]
    assert isinstance(model, Decoder)
    with torch.no_grad():
        error = (model(tokens()) - expected(tokens()).logits).abs().max().item()
    assert error < LOGIT_TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_transformers(tmp_path, variant):
    expected = reference(tmp_path, **VARIANTS[variant])
    model = whet.load(tmp_path, dtype=torch.float32, device="cpu")[0]
    batch = tokens()
    inputs, targets = batch[:, :-1], batch[:, 1:].reshape(-1)

    logits = expected(inputs).logits
    F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").backward()
    linear_cross_entropy(model.hidden(inputs).flatten(0, 1), model.head(), targets).backward()

    theirs = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            theirs[model.hf_name(name)].grad,
            rtol=1e-4,
            atol=2e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_saved_model_loads_in_transformers_with_equal_logits(tmp_path, variant, shard_bytes):
    reference(tmp_path / "theirs", **VARIANTS[variant])
    model = whet.load(tmp_path / "theirs", dtype=torch.float32, device="cpu")[0]
    whet.models.load.save_model(model, None, tmp_path / "ours", max_shard_bytes=shard_bytes)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), again(tokens()).logits, rtol=0, atol=LOGIT_TOLERANCE)
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["tie_word_embeddings"] == bool(VARIANTS[variant].get("tie_word_embeddings"))


def test_a_tied_model_is_written_once_and_stays_tied(tmp_path):
    reference(tmp_path / "theirs", tie_word_embeddings=True)
    model = whet.load(tmp_path / "theirs", dtype=torch.float32, device="cpu")[0]
    whet.models.load.save_model(model, None, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())
