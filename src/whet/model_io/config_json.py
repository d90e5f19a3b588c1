"""A model's config.json: read, checked, and understood by one of whet's own families."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.error_boundary import wrong_input
from whet.errors import ModelError
from whet.model_io.file_checks import check_links
from whet.models.spec import ModelSpec
from whet.storage import read_json

CONFIG = "config.json"
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MOST_LAYERS = 10_000  # more would be built one by one before anybody looks for their weights


def read_config(directory: Path) -> dict[str, Any]:  # Any: JSON values
    """Read a config.json whose numbers are usable: no NaN anywhere, and every epsilon finite, from 0."""
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
    elif isinstance(value, int) and key.endswith(_LAYERS) and value > _MOST_LAYERS:
        raise ModelError(f"{path}: {key} is {value}: a model of so many layers cannot be built")
    elif isinstance(value, float) and math.isnan(value):
        raise ModelError(f"{path}: {key} is NaN, not a number")
    elif isinstance(value, int | float) and key.endswith(("eps", "epsilon")) and not 0 <= value < math.inf:
        raise ModelError(f"{path}: {key} is {value}, and must be a number from 0")


def read_spec(
    family: ModuleType, config: Mapping[str, Any], directory: Path
) -> ModelSpec:  # Any: JSON values
    """Return what a native family makes of a config.json."""
    try:
        with wrong_input(f"{directory / CONFIG} cannot be understood"):
            spec: ModelSpec = family.from_config(config)
    except ModelError as error:
        if CONFIG in error.message:
            raise
        raise ModelError(f"{directory / CONFIG}: {error.message}", hint=error.hint) from error
    return spec
