"""Adapters on transformers classes with unusual layers match PEFT and transformers."""

import logging

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

import whet
from tiny import write_tokenizer
from tiny_adapters import load, load_theirs, shake, tokens, write_base
from whet.adapters.adapter import named_adapters
from whet.adapters.qlora import quantize_base
from whet.errors import ConfigError
from whet.model_io.save import save_base

COMMON = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
FEW = {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False}


def write(directory, kind, config):
    torch.manual_seed(0)
    model = kind(config)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def falcon(directory):
    config = FalconConfig(**COMMON, multi_query=False, new_decoder_architecture=False)
    return write(directory, FalconForCausalLM, config)


def llama4(directory):
    config = Llama4TextConfig(
        **COMMON, **FEW, intermediate_size=16, intermediate_size_mlp=64, head_dim=8, num_local_experts=4,
        num_experts_per_tok=1, attention_chunk_size=64,
    )  # fmt: skip
    return write(directory, Llama4ForCausalLM, config)


def phimoe(directory):
    config = PhimoeConfig(**COMMON, **FEW, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
    return write(directory, PhimoeForCausalLM, config)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", [falcon, llama4, phimoe])
def test_classes_with_in_place_outputs_or_linear_routers_can_be_trained(tmp_path, family, quantized, dropout):
    model = load(family(tmp_path))
    if quantized:
        quantize_base(model, device=torch.device("cpu"), dtype=torch.float32)
    whet.attach_lora(model, rank=2, dropout=dropout).train()
    model(tokens()).square().sum().backward()
    assert not [name for name, _ in named_adapters(model) if name.endswith(("router", "gate"))]
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


def test_model_with_in_place_addition_matches_peft(tmp_path):
    model = shake(whet.attach_lora(load(falcon(tmp_path / "base")), rank=2))
    whet.save_adapter(model, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(
        load_theirs(tmp_path / "base"), tmp_path / "adapter", is_trainable=True
    )
    ours, expected = model(tokens()), theirs(input_ids=tokens()).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    ours.square().mean().backward()
    expected.square().mean().backward()
    grads = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    assert len(grads) == len([p for p in model.parameters() if p.requires_grad])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path = model.hf_name(name.rpartition(".lora_")[0])
            letter = name[-1]
            torch.testing.assert_close(
                parameter.grad, grads[f"base_model.model.{path}.lora_{letter}.default.weight"], rtol=1e-3, atol=1e-5
            )  # fmt: skip


def test_buffers_of_a_module_are_saved(tmp_path):
    config = Glm4MoeConfig(
        **COMMON | {"num_hidden_layers": 3}, **FEW, intermediate_size=64, moe_intermediate_size=16, head_dim=8,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
        topk_group=1,
    )  # fmt: skip
    base = write(tmp_path / "base", Glm4MoeForCausalLM, config)
    model = whet.attach_lora(load(base), rank=2, targets="attention", modules_to_save=["gate"])
    with torch.no_grad():
        expected = load_theirs(base)(tokens()).logits
        for name, write_to in (("whole", whet.save), ("kept", save_base)):
            write_to(model, None, tmp_path / name)
            loaded_logits = load_theirs(tmp_path / name)(tokens()).logits
            torch.testing.assert_close(loaded_logits, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(load(tmp_path / name)(tokens()), expected, rtol=1e-4, atol=1e-4)


def test_layers_in_lists_are_named_by_their_full_paths(tmp_path):
    """PEFT would also apply the target "0" to the first layer."""
    config = Zamba2Config(
        **COMMON, num_key_value_heads=4, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_ngroups=1,
        n_mamba_heads=4, chunk_size=8, intermediate_size=64, layers_block_type=["mamba", "hybrid"],
        num_mem_blocks=1, use_mem_rope=True, adapter_rank=4, use_shared_attention_adapter=True,
        use_shared_mlp_adapter=True,
    )  # fmt: skip
    base = write(tmp_path / "base", Zamba2ForCausalLM, config)
    model = load(base)
    lists = [
        name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name[-1].isdigit()
    ]
    assert lists
    whet.save_adapter(shake(whet.attach_lora(model, rank=2, targets=lists)), tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(load_theirs(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(tokens()), theirs(input_ids=tokens()).logits, rtol=1e-3, atol=1e-3
        )


def test_adapters_that_peft_would_apply_to_experts_cause_a_warning(tmp_path, caplog):
    config = Qwen3MoeConfig(
        **COMMON, **FEW, intermediate_size=64, moe_intermediate_size=16, head_dim=8, num_experts=4,
        num_experts_per_tok=2, mlp_only_layers=[0],
    )  # fmt: skip
    base = write(tmp_path / "base", Qwen3MoeForCausalLM, config)
    with caplog.at_level(logging.WARNING, "whet"):
        whet.save_adapter(whet.attach_lora(load(base), rank=2, targets="attention"), tmp_path / "attention")
        assert not caplog.messages
        model = shake(whet.attach_lora(load(base), rank=2))
        whet.save_adapter(model, tmp_path / "adapter")
    [message] = caplog.messages
    assert "PEFT mistakes the adapters of model.layers.0.mlp.down_proj" in message
    theirs = PeftModel.from_pretrained(load_theirs(base), tmp_path / "adapter").eval()
    with torch.no_grad():  # if they ever agree, the warning can be removed
        assert (model(tokens()) - theirs(input_ids=tokens()).logits).abs().max() > 0.1
        whet.save(model, None, tmp_path / "whole")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
        torch.testing.assert_close(merged(tokens()).logits, model(tokens()), rtol=1e-4, atol=1e-4)


def test_dropout_on_the_head_is_rejected_except_in_a_trained_adapter(tmp_path):
    base = write_base(tmp_path / "base", "llama")
    with pytest.raises(ConfigError, match="lm_head: the head cannot have dropout"):
        whet.attach_lora(load(base), targets=["q_proj", "lm_head"], dropout=0.1)
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.1, init_lora_weights=False)
    theirs = get_peft_model(load_theirs(base), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = whet.load_adapter(load(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), theirs(input_ids=tokens()).logits, rtol=1e-4, atol=1e-4)
