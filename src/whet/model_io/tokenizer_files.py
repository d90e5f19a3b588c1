"""Save tokenizers in files that transformers 4 and 5 read the same way."""

import json
from pathlib import Path
from typing import Any  # everywhere below: tokenizers of transformers, and JSON values

from whet.storage import write_json

CONFIG = "tokenizer_config.json"
_GENERIC = "TokenizersBackend"  # transformers 5's name of PreTrainedTokenizerFast, which both versions accept


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a tokenizer's files, in a form that both transformers 4 and 5 read."""
    tokenizer.save_pretrained(directory)
    config: dict[str, Any] = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == _GENERIC:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif tokenizer.is_fast and config.get("bos_token") and config.get("eos_token"):
        # without these keys, transformers 4 classes choose their own default for BOS and EOS tokens
        ids = tokenizer("a")["input_ids"]
        config.setdefault("add_bos_token", ids[:1] == [tokenizer.bos_token_id])
        config.setdefault("add_eos_token", ids[-1:] == [tokenizer.eos_token_id])
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    # the generic class of transformers 4 would add token_type_ids, which decoders reject
    config["model_input_names"] = list(tokenizer.model_input_names)
    write_json(directory / CONFIG, dict(sorted(config.items())))
