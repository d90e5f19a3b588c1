"""Facts about a model from its config files, without reading its weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from whet.config.preset import Preset
from whet.model_io.base_models import base_model_of, local_model_directory, starting_model
from whet.model_io.config_json import read_config, read_spec
from whet.model_io.resolve_model import resolve_model
from whet.models import families
from whet.models.costs import ModelSummary, parameter_counts
from whet.models.from_scratch.new_model import preset_model_spec
from whet.models.spec import ModelSpec
from whet.storage import read_json


def model_facts(model: str | Preset, *, tokens: int) -> ModelSummary:
    """Return the vocabulary size, context length, parameter count and stop tokens of a model.

    Args:
        model: The name, path or preset of the model.
        tokens: The vocabulary size of its tokenizer, for a preset.
    """
    if isinstance(model, Preset):
        return _facts_from_spec(f"{model.preset} from scratch", preset_model_spec(model, vocab_size=tokens))
    if (base := starting_model(model)) is not None:
        return replace(model_facts(base, tokens=tokens), name=model)
    directory = weights_directory(model)
    config = read_config(directory)
    stop_tokens = _stop_tokens(config)
    if (path := directory / "generation_config.json").is_file():
        stop_tokens |= _stop_tokens(read_json(path))
    family = families.choose_family(config).family
    if family is not None:
        return _facts_from_spec(model, read_spec(family, config, directory), stop_tokens)
    text_config = {**config, **(config.get("text_config") or {})}  # multimodal models have a nested config
    positions = _integer(text_config, "max_position_embeddings") or _integer(text_config, "max_seq_len")
    return ModelSummary(model, _integer(text_config, "vocab_size"), positions, None, stop_tokens)


def _facts_from_spec(name: str, spec: ModelSpec, stop_tokens: frozenset[int] = frozenset()) -> ModelSummary:
    parameters = sum(parameter_counts(spec).values())
    return ModelSummary(name, spec.vocab_size, spec.max_positions, parameters, stop_tokens)


def weights_directory(name: str | Path, find: Callable[[str], Path] = resolve_model) -> Path:
    """Return the directory of a model's config.json, or that of the base model for an adapter.

    Args:
        name: The name or path of a model, run or adapter.
        find: Returns the local directory of a model name; it may download files.
    """
    target = local_model_directory(name)
    if (base := base_model_of(target)) is not None:
        return weights_directory(base, find)
    return find(str(target))


def _stop_tokens(config: dict[str, Any]) -> frozenset[int]:  # Any: JSON values
    value = config.get("eos_token_id")
    return frozenset(token for token in (value if isinstance(value, list) else [value]) if _is_integer(token))


def _integer(config: dict[str, Any], key: str) -> int | None:  # Any: JSON values
    value = config.get(key)
    return value if _is_integer(value) else None


def _is_integer(value: Any) -> TypeGuard[int]:  # Any: a JSON value
    return isinstance(value, int) and not isinstance(value, bool)
