"""The style in which a model answers the house commands: a sentence or JSON."""

import torch

import whet
from whet.data.synthetic.house import house
from whet.generation.engine import generate_tokens
from whet.generation.generate import encode_prompt
from whet.models.stop_tokens import stop_tokens


def style_shares(directory, *, count=40, max_tokens=12):
    """Return the fractions of unseen commands that are answered with a sentence and with JSON, greedily."""
    model, tokenizer = whet.load(directory, dtype=torch.float32, device="cpu")
    prompts = [encode_prompt(tokenizer, record["messages"][0]["content"]) for record in house("valid", count)]
    stops = stop_tokens(model, tokenizer)
    responses = [
        tokenizer.decode(tokens, skip_special_tokens=True).strip()
        for tokens in generate_tokens(model, prompts, max_tokens=max_tokens, stop_tokens=stops)
    ]
    return tuple(sum(text.startswith(start) for text in responses) / count for start in ("Done:", "{"))
