"""Read and validate config.json, convert it to the spec of a native family; write generation_config.json."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.file_checks import check_links
from whet.models.spec import ModelSpec
from whet.storage import read_json, write_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
QUANTIZATION = "quantization_config"  # the key that describes quantized weights
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MAX_LAYERS = 10_000  # more layers would take very long to build before a missing weight is reported


def read_config(directory: Path) -> dict[str, Any]:  # Any: JSON values
    """Read a config.json and check its numbers.

    Raises:
        ModelError: If a value is NaN, an epsilon is negative or infinite, or there are too many layers.
    """
    check_links(directory)
    config = read_json(directory / CONFIG)
    _check_numbers(config, path=directory / CONFIG, key="")
    return config


def _check_numbers(value: Any, *, path: Path, key: str) -> None:  # Any: a JSON value
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, path=path, key=f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_numbers(inner, path=path, key=f"{key}.{index}")
    elif isinstance(value, int) and key.endswith(_LAYER_KEYS) and value > _MAX_LAYERS:
        raise ModelError(f"{path}: {key} is {value}, but at most {_MAX_LAYERS} layers are supported")
    elif isinstance(value, float) and math.isnan(value):
        raise ModelError(f"{path}: {key} is NaN")
    elif isinstance(value, int | float) and key.endswith(("eps", "epsilon")) and not 0 <= value < math.inf:
        raise ModelError(f"{path}: {key} is {value}, but must be finite and not negative")


def read_spec(
    family: ModuleType, config: Mapping[str, Any], directory: Path
) -> ModelSpec:  # Any: JSON values
    """Convert a config.json to the model spec of a native family."""
    try:
        with invalid_input_errors(f"{directory / CONFIG} is invalid"):
            spec: ModelSpec = family.from_config(config)
    except ModelError as error:
        if CONFIG in error.message:
            raise
        raise ModelError(f"{directory / CONFIG}: {error.message}", hint=error.hint) from error
    return spec


def write_generation_config(
    directory: Path,
    config: Mapping[str, Any],  # Any: JSON values
    *,
    source: Path | None,
    tokenizer: Any,  # Any: a transformers tokenizer or None
) -> None:
    """Write generation_config.json, so that other programs end completions at the same tokens as whet.

    It is that of the source model, with the EOS tokens of config.json and of the tokenizer added.

    Args:
        directory: The directory to write it to.
        config: The model's config.json.
        source: The directory of the model that was loaded, if any.
        tokenizer: The tokenizer that is saved with the model.
    """
    stored: dict[str, Any] = {}
    if source is not None and (source / GENERATION_CONFIG).is_file():
        with contextlib.suppress(ModelError):  # a damaged file must not prevent saving a trained model
            stored = read_json(source / GENERATION_CONFIG)
    known = _token_ids(stored.get("eos_token_id"))
    added = [*_token_ids(config.get("eos_token_id")), *_token_ids(getattr(tokenizer, "eos_token_id", None))]
    missing = [token for token in dict.fromkeys(added) if token not in known]
    if missing:
        ids = [*known, *missing]
        # _from_model_config: transformers would otherwise replace the ids by those of config.json
        stored = {name: value for name, value in stored.items() if name != "_from_model_config"}
        stored["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    for name in ("bos_token_id", "pad_token_id"):
        if isinstance(token := config.get(name), int):
            stored.setdefault(name, token)
    if stored:
        write_json(directory / GENERATION_CONFIG, stored)


def _token_ids(value: object) -> list[int]:
    return [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)]
