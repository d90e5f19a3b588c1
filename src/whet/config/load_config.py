"""Read configs from YAML, apply `section.key=value` overrides, validate, and write resolved YAML."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from whet.config.checks.error_messages import config_error, nested_sections
from whet.config.objectives.mix import Part
from whet.config.run_config import RunConfig
from whet.errors import ConfigError, short_repr, shorten

_MAX_CHARACTERS = 2**24  # of a file
_MAX_VALUES, _MAX_DEPTH = 100_000, 64

ConfigLike = RunConfig | Mapping[str, Any] | str | Path  # Any: validated by validate_config


class _Loader(yaml.SafeLoader):
    """YAML in which 2e-3 is a number (YAML 1.1 reads it as a string) and duplicate keys are errors."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:  # Any: YAML values
        """Build a mapping; duplicate keys, which PyYAML would overwrite, are errors."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _yaml_error(key, "a key must be a single value")
            if key.value in seen:
                raise _yaml_error(key, f"duplicate key {short_repr(key.value)}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # Any: YAML values
        """Build a value; an invalid date or number is an error with its position."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:  # for `2024-13-45` or `!!bool x`
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{str(node.value)[:50]!r} cannot be read ({error}): if it is text, put it in quotes",
                node.start_mark,
            ) from error


class _Dumper(yaml.SafeDumper):
    """The counterpart of _Loader, which quotes text that _Loader would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.(inf|nan)$"
        ),
        list("-+0123456789."),
    )


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config from a YAML file and apply `section.key=value` overrides."""
    values = read_sections(source)
    for override in overrides:
        _apply_override(values, override)
    return validate_config(values, origin=str(Path(source)))


def read_sections(source: str | Path) -> dict[str, Any]:  # Any: YAML values
    """Read the sections of a YAML file without validating them."""
    path = Path(source)
    text = ""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            raise ConfigError(f"{path} is too large for a config: more than {_MAX_CHARACTERS:,} characters")
        values = parse_yaml(text)
    except FileNotFoundError as error:
        hint = "the config file comes first, followed by KEY=VALUE overrides" if "=" in path.name else None
        raise ConfigError(f"{path} does not exist", hint=hint) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        position, problem = _yaml_problem(error, text)
        raise ConfigError(f"{path}{position} is not valid YAML: {problem}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must contain sections (model, data, run, ...)")
    return values


def _yaml_problem(error: yaml.YAMLError, text: str) -> tuple[str, str]:
    """Return the position of a YAML error, to append to the file name, and the problem."""
    match error:
        case yaml.MarkedYAMLError(problem=str(problem), problem_mark=yaml.Mark(line=line, column=column)):
            if error.context and error.context_mark:
                problem = f"{error.context} from line {error.context_mark.line + 1}, {problem}"
        case yaml.reader.ReaderError(position=position, reason=str(problem)):
            before = text[:position].split("\n")
            line, column = len(before) - 1, len(before[-1])
        case _:
            return "", str(error)
    return f", line {line + 1}, column {column + 1},", problem


def validate_config(values: Mapping[str, Any], *, origin: str = "config") -> RunConfig:  # Any: validated here
    """Validate a mapping.

    Args:
        values: The sections with their keys.
        origin: The file or name to report errors with.

    Raises:
        ConfigError: A key or a value is invalid; the message lists every problem with its key.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error, RunConfig, origin=origin) from error


def to_config(config: ConfigLike) -> RunConfig:
    """Convert a mapping or the path of a YAML file to a RunConfig; return a RunConfig unchanged."""
    if isinstance(config, str | Path):
        return load_config(config)
    return config if isinstance(config, RunConfig) else validate_config(config)


def to_yaml(config: RunConfig) -> str:
    """Return the resolved config as YAML, with every default explicit."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_dict(config: RunConfig) -> dict[str, Any]:  # Any: JSON values
    """Return the resolved config as JSON values, under the keys of the YAML file."""
    return config.model_dump(mode="json", by_alias=True)


def flatten_keys(
    values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:  # Any: JSON values
    """Yield the full key and the value of everything that is not a section."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe_keys(
    section: type[BaseModel] = RunConfig, prefix: str = "", *, always_present: bool = True
) -> Iterator[str]:
    """Yield one line per config key with its description and default.

    Args:
        section: The section to describe.
        prefix: The key of the section, with a trailing dot.
        always_present: Whether every run has this section, so that each config needs its required keys.
    """
    required = "required" if always_present else "required in this section"
    for attribute, field in section.model_fields.items():
        name = field.alias or attribute
        # the sections of a mix part are those of a run, which are described there
        inner = [] if section is Part else list(nested_sections(field.annotation))
        if not inner or prefix:
            default = required if field.is_required() else f"default {json.dumps(field.get_default())}"
            yield f"  {prefix}{name}: {field.description} ({default})"
        for subsection in inner:
            always = always_present and field.is_required() and field.annotation is subsection
            yield from describe_keys(subsection, f"{prefix}{name}.", always_present=always)


def _apply_override(values: dict[str, Any], override: str) -> None:  # Any: validated by validate_config later
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"{short_repr(override)} is not an override", hint="write section.key=value, e.g. optim.lr=1e-4"
        )
    section: Any = values
    for key in keys[:-1]:
        section = (
            section[_parse_index(section, key, override)]
            if isinstance(section, list)
            else section.setdefault(key, {})
        )
        if not isinstance(section, dict | list):
            raise ConfigError(f"override {short_repr(override)}: {shorten(key)} is not a section")
    last = _parse_index(section, keys[-1], override) if isinstance(section, list) else keys[-1]
    try:
        section[last] = parse_yaml(text)
    except yaml.YAMLError as error:
        hint = getattr(error, "problem", None)
        raise ConfigError(
            f"override {short_repr(override)}: {short_repr(text)} is not a YAML value", hint=hint
        ) from error


def parse_yaml(text: str) -> Any:  # Any: YAML values
    """Parse YAML; duplicate keys are errors, and 1e-3 is a number."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {})
        return loader.construct_document(node)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    finally:
        loader.dispose()


def _measure(node: yaml.Node, measured: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the number of values in a node and their nesting depth, with every alias expanded.

    A few lines with aliases of aliases can expand to billions of values.
    """
    if node in measured:
        if (size := measured[node]) is None:
            raise _yaml_error(node, "a value contains itself")
        return size
    measured[node] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    sizes = [_measure(part, measured) for part in parts]
    size = 1 + sum(count for count, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    if size[0] > _MAX_VALUES:
        raise _yaml_error(node, f"it contains more than {_MAX_VALUES:,} values, with aliases expanded")
    if size[1] > _MAX_DEPTH:
        raise _yaml_error(node, f"it is nested more than {_MAX_DEPTH} levels deep")
    measured[node] = size
    return size


def _yaml_error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _parse_index(items: list[Any], key: str, override: str) -> int:  # Any: YAML values
    if not key.isdecimal() or len(key) > 9 or int(key) >= len(items):
        problem = f"{shorten(key)} is not an index (from 0) of a list with {len(items)} items"
        raise ConfigError(f"override {short_repr(override)}: {problem}")
    return int(key)
