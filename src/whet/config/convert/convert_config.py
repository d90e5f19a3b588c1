"""Translate the config file of another tool into whet's."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from whet.config.checks.other_tools import OTHER_TOOLS
from whet.config.convert.translation import Translation
from whet.config.load_config import parse_yaml
from whet.errors import ConfigError
from whet.lazy_import import load_object

# tool -> its module and its name in print; a file is recognised by the first that fits
TOOLS = {
    "axolotl": ("whet.config.convert.axolotl", "axolotl"),
    "llama-factory": ("whet.config.convert.llama_factory", "LLaMA-Factory"),
    "trl": ("whet.config.convert.trl", "TRL"),
    "mlx-lm": ("whet.config.convert.mlx_lm", "mlx-lm"),
}


def convert_config(path: str | Path, tool: str | None = None, *, gpus: int = 1) -> Translation:
    """Translate the config file of another tool.

    Args:
        path: The YAML or JSON file.
        tool: One of TOOLS; None recognises the tool by its keys.
        gpus: The number of GPUs the config was written for: other tools count a batch per GPU, whet in total.

    Returns:
        The translation: `values()` and `to_yaml()`, and every key that could not be translated.

    Raises:
        ConfigError: The file cannot be read, or it is not a config of a known tool.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        source = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}"
        ) from error
    if not isinstance(source, Mapping) or not all(isinstance(key, str) for key in source):
        raise ConfigError(f"{path} is not a config: it must be a mapping of keys to values")
    if tool is None:
        tool = next(
            (name for name, (module, _) in TOOLS.items() if load_object(f"{module}:is_config")(source)), None
        )
    if tool is None:
        raise ConfigError(
            f"{path} is not recognised as a config of {', '.join(title for _, title in TOOLS.values())}",
            hint=f"name the tool with --from {'|'.join(TOOLS)}",
        )
    if tool not in TOOLS:
        raise ConfigError(f"unknown tool {tool!r}", hint=f"known: {', '.join(TOOLS)}")
    module, title = TOOLS[tool]
    translation = Translation(title, source, path.parent, gpus)
    try:
        load_object(f"{module}:translate")(translation)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path}: a value is not what {title} expects: {error}") from error
    translation.report_rest(OTHER_TOOLS)
    return translation
