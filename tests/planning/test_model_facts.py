"""The facts of a model before its weights are read match the loaded model."""

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import whet
from tiny import write_tiny_model, write_tokenizer
from whet.config.preset import Preset
from whet.errors import ConfigError, ModelError
from whet.model_io.tokenizer import new_tokenizer
from whet.models.from_scratch.new_model import new_model
from whet.models.stop_tokens import stop_tokens
from whet.planning.model_facts import model_facts


def adapter(tmp_path):
    write_tiny_model(tmp_path / "base", vocab_size=270, eos_token_id=[256, 259])
    model, _ = whet.load(tmp_path / "base", device="cpu")
    whet.attach_lora(model, rank=2)
    whet.save_adapter(model, tmp_path / "adapter")
    return tmp_path / "adapter"


def native(tmp_path):
    write_tiny_model(tmp_path / "model", max_position_embeddings=100)
    return tmp_path / "model"


def bridged(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = GPTNeoXConfig(vocab_size=300, max_position_embeddings=77, eos_token_id=5, **sizes)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    write_tokenizer(tmp_path / "neox")
    return tmp_path / "neox"


@pytest.mark.parametrize("make", [native, adapter, bridged])
def test_facts_match_the_loaded_model(tmp_path, make):
    directory = make(tmp_path)
    model, tokenizer = whet.load(directory, device="cpu")
    facts = model_facts(str(directory), tokens=len(tokenizer))
    assert (facts.vocab_size, facts.max_positions) == (model.vocab_size, model.max_positions)
    assert facts.stop_tokens | {tokenizer.eos_token_id} == stop_tokens(model, tokenizer)
    if make is native:
        assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_facts_of_a_preset_match_the_new_model():
    preset = Preset(preset="nano", layers=2, tokenizer="bytes")
    tokenizer = new_tokenizer(preset, [])
    model = new_model(preset, tokenizer, seed=0)
    facts = model_facts(preset, tokens=len(tokenizer))
    assert (facts.vocab_size, facts.max_positions) == (model.vocab_size, model.max_positions)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ConfigError, match=r"smaller than the tokenizer's vocabulary \(256\)"):
        model_facts(Preset(preset="nano", vocab_size=100), tokens=256)


def test_invalid_config_json_is_reported(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": "many"}')
    with pytest.raises(ModelError, match=r"config.json"):
        model_facts(str(tmp_path), tokens=1)
