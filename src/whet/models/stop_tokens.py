"""The token ids that end a completion."""

from typing import Any

from whet.models.language_model import LanguageModel
from whet.storage import read_json


def config_eos_ids(model: LanguageModel) -> set[int]:
    """Return the EOS token ids of config.json and generation_config.json."""
    ids: list[Any] = []  # Any: JSON values
    configs = [model.hf_config()]
    if model.source is not None and (path := model.source / "generation_config.json").is_file():
        configs.append(read_json(path))
    for config in configs:
        eos = config.get("eos_token_id")
        ids += eos if isinstance(eos, list) else [eos]
    return {token for token in ids if isinstance(token, int)}


def stop_tokens(model: LanguageModel, tokenizer: Any) -> set[int]:
    """Return the token ids that end a completion: the tokenizer's EOS and those of the model's configs."""
    tokenizer_eos = tokenizer.eos_token_id
    return config_eos_ids(model) | ({tokenizer_eos} if isinstance(tokenizer_eos, int) else set())
