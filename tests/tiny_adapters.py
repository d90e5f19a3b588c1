"""Small base models, and adapters with non-initial weights."""

import torch
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

import whet
from tiny import write_tiny_model
from whet.model_io.formats.adapter_state import collect_adapter
from whet.model_io.formats.peft import peft_tensors


def tokens():
    return torch.randint(0, 260, (2, 12), generator=torch.Generator().manual_seed(3))


def write_base(directory, kind, width=32):
    """Write an untied model with biases: a llama, or a Granite, which is loaded through transformers."""
    if kind == "llama":
        write_tiny_model(
            directory,
            tie_word_embeddings=False,
            attention_bias=True,
            hidden_size=width,
            intermediate_size=2 * width,
        )
        return directory
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=260, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=2.0, pad_token_id=None, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(directory)
    return directory


def load(directory):
    return whet.load(directory, dtype=torch.float32, device="cpu")[0]


def load_theirs(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def shake(model):
    """Add noise to every trained weight, because a new adapter does not change the model."""
    generator = torch.Generator().manual_seed(4)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator).to(parameter.device) * 0.1
    return model


def adapter_tensors(model):
    """Return the adapter's weights under PEFT's names."""
    return peft_tensors(collect_adapter(model))
