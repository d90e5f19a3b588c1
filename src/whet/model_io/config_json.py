"""Read and validate a model's config.json, and convert it to the spec of a native family."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.file_checks import check_links
from whet.models.spec import ModelSpec
from whet.storage import read_json

CONFIG = "config.json"
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
