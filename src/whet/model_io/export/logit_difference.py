"""Measure how much logits change when an adapter is merged into its base model."""

from dataclasses import dataclass
from typing import Any

import torch

from whet.adapters.adapter import named_adapters
from whet.adapters.merge import merge
from whet.errors import ModelError
from whet.models.language_model import LanguageModel

# Prose, a chat, code, numbers and other scripts, to exercise most of a model's weights.
SAMPLE = (
    "The knife was dull, so three stones and two oils were brought; by noon it cut paper.\n"
    "Question: What is the capital of France? Answer: The capital of France is Paris.\n"
    "def area(width, height):\n    return width * height  # 12 * 3.5 = 42.0\n"
    'Naïve café, 東京 and Москва: {"room": "kitchen", "lights": [1, 2, 3], "on": true}'
)

# Largest logit difference that rounding to each dtype explains, on logits of about 10 to 30.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 1.0}


@dataclass(frozen=True)
class LogitDifference:
    """The difference between two models' logits on the same tokens."""

    largest: float
    same_argmax: float  # fraction of positions with the same most likely token

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.largest:.2g}, "
            f"same most likely token at {self.same_argmax:.1%} of positions"
        )


def compare_logits(first: torch.Tensor, second: torch.Tensor) -> LogitDifference:
    """Compare two tensors of logits [B, T, V] for the same tokens."""
    same = (first.argmax(-1) == second.argmax(-1)).float().mean()
    return LogitDifference((first - second).abs().max().item(), same.item())


def sample_tokens(model: LanguageModel, tokenizer: Any) -> torch.Tensor:  # Any: a transformers tokenizer
    """Return the sample text as tokens [1, T], or tokens spread over the vocabulary without a tokenizer."""
    if tokenizer is None:
        tokens = torch.arange(64) * 7919 % model.vocab_size
    else:
        tokens = torch.tensor(tokenizer(SAMPLE)["input_ids"])
    return tokens[None, : model.max_positions].to(model.device)


def merge_measured(model: LanguageModel, tokens: torch.Tensor, *, dtype: torch.dtype) -> LogitDifference:
    """Merge the adapter of a float32 model, round the weights to `dtype`, and return the logit difference.

    The model computes in float32 before and after, so the difference is due to the weights alone.
    """
    if not any(True for _ in named_adapters(model)):
        raise ModelError("there is no adapter to merge", hint="it is already a full model: whet export")
    with torch.no_grad():
        before = model(tokens)
        merge(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        return compare_logits(before, model(tokens))
