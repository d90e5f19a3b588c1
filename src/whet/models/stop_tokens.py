"""The token ids that end an answer."""

from typing import Any

from whet.models.language_model import LanguageModel
from whet.storage import read_json


def end_tokens(model: LanguageModel) -> set[int]:
    """Ids that end an answer, as the model's two configs list them."""
    found: list[Any] = []  # Any: JSON values
    configs = [model.hf_config()]
    if model.source is not None and (path := model.source / "generation_config.json").is_file():
        configs.append(read_json(path))
    for config in configs:
        listed = config.get("eos_token_id")
        found += listed if isinstance(listed, list) else [listed]
    return {token for token in found if isinstance(token, int)}


def stop_tokens(model: LanguageModel, tokenizer: Any) -> set[int]:
    """Ids that end an answer: the tokenizer's EOS, and those of the model's two configs."""
    own = tokenizer.eos_token_id
    return end_tokens(model) | ({own} if isinstance(own, int) else set())
