"""What is known of a model before any of its weights is read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from whet.config.preset import Preset
from whet.model_io.config_json import read_config, read_spec
from whet.model_io.hub import resolve
from whet.model_io.resolve import base_of, below_checkpoint, usable_directory
from whet.models import families
from whet.models.costs import ModelFacts, parameter_counts
from whet.models.from_scratch.new_model import new_spec
from whet.models.spec import ModelSpec
from whet.storage import read_json


def model_facts(model: str | Preset, *, tokens: int) -> ModelFacts:
    """Facts of the model that a config names; `tokens` is how many its tokenizer has."""
    if isinstance(model, Preset):
        return _of_spec(f"{model.preset} from scratch", new_spec(model, tokens=tokens))
    if (below := below_checkpoint(model)) is not None:
        return replace(model_facts(below, tokens=tokens), name=model)
    directory = weights_directory(model)
    config = read_config(directory)
    stops = _stop_tokens(config)
    if (path := directory / "generation_config.json").is_file():
        stops |= _stop_tokens(read_json(path))
    family = families.choose(config).family
    if family is not None:
        return _of_spec(model, read_spec(family, config, directory), stops)
    text = {**config, **(config.get("text_config") or {})}  # models of several kinds of input nest it
    positions = _number(text, "max_position_embeddings") or _number(text, "max_seq_len")
    return ModelFacts(model, _number(text, "vocab_size"), positions, None, stops)


def _of_spec(name: str, spec: ModelSpec, stops: frozenset[int] = frozenset()) -> ModelFacts:
    return ModelFacts(name, spec.vocab_size, spec.max_positions, sum(parameter_counts(spec).values()), stops)


def weights_directory(name: str | Path, find: Callable[[str], Path] = resolve) -> Path:
    """Where the config.json is: of the base, if the name is that of an adapter."""
    target = usable_directory(name)
    if (base := base_of(target)) is not None:
        return weights_directory(base, find)
    return find(str(target))


def _stop_tokens(config: dict[str, Any]) -> frozenset[int]:  # Any: JSON values
    listed = config.get("eos_token_id")
    return frozenset(each for each in (listed if isinstance(listed, list) else [listed]) if _is_number(each))


def _number(config: dict[str, Any], key: str) -> int | None:  # Any: JSON values
    value = config.get(key)
    return value if _is_number(value) else None


def _is_number(value: Any) -> TypeGuard[int]:  # Any: a JSON value
    return isinstance(value, int) and not isinstance(value, bool)
