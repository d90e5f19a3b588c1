"""YAML in, `section.key=value` overrides, one clear message for what is wrong, resolved YAML out."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from whet.config.checks.error_messages import config_error, inner_sections
from whet.config.objectives.mix import Part
from whet.config.run_config import RunConfig
from whet.errors import ConfigError, shorten, shown

_MOST_BYTES = 2**24  # of a file

ConfigLike = RunConfig | Mapping[str, Any] | str | Path  # Any: checked by make_config
_MOST_VALUES, _MOST_LEVELS = 100_000, 64


class _Loader(yaml.SafeLoader):
    """YAML in which 2e-3 is a number (plain YAML 1.1 reads a string) and a key given twice is an error."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:  # Any: YAML values
        """Build a mapping, refusing what YAML would silently overwrite."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refused(key, "a key must be a single value")
            if key.value in seen:
                raise _refused(key, f"the key {shown(key.value)} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # Any: YAML values
        """Build a value; one that only looks like a date or a number is an error with its place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:  # PyYAML's own, of `2024-13-45` or `!!bool x`
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{str(node.value)[:50]!r} cannot be read ({error}): is it a text without quotes?",
                node.start_mark,
            ) from error


class _Dumper(yaml.SafeDumper):
    """What _Loader reads back: a text that looks like one of its numbers is quoted."""


for _resolving in (_Loader, _Dumper):
    _resolving.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.(inf|nan)$"
        ),
        list("-+0123456789."),
    )


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's config from a YAML file and apply `section.key=value` overrides."""
    values = read_values(source)
    for override in overrides:
        _apply(values, override)
    return make_config(values, origin=str(Path(source)))


def read_values(source: str | Path) -> dict[str, Any]:  # Any: YAML values
    """Read the sections of a YAML file, which are not yet validated."""
    path = Path(source)
    text = ""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than {_MOST_BYTES:,} characters: is it a config?")
        values = parse_yaml(text)
    except FileNotFoundError as error:
        hint = "the config file comes first, KEY=VALUE after it" if "=" in path.name else None
        raise ConfigError(f"{path} does not exist", hint=hint) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        place, problem = _yaml_problem(error, text)
        raise ConfigError(f"{path}{place} is not valid YAML: {problem}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections (model, data, run, ...)")
    return values


def _yaml_problem(error: yaml.YAMLError, text: str) -> tuple[str, str]:
    """Where a YAML text is wrong, as it follows the name of its file, and what is."""
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


def make_config(values: Mapping[str, Any], *, origin: str = "config") -> RunConfig:  # Any: checked here
    """Validate a plain mapping; every problem is named with its path."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error, RunConfig, origin=origin) from error


def as_config(config: ConfigLike) -> RunConfig:
    """Return a RunConfig from one, from a mapping, or from the path of a YAML file."""
    if isinstance(config, str | Path):
        return load_config(config)
    return config if isinstance(config, RunConfig) else make_config(config)


def to_yaml(config: RunConfig) -> str:
    """The resolved config, every default written out."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_dict(config: RunConfig) -> dict[str, Any]:  # Any: JSON values
    """The resolved config as plain values, under the names that people write."""
    return config.model_dump(mode="json", by_alias=True)


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:  # Any: JSON values
    """Every value that is no section, by its whole key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe_keys(
    section: type[BaseModel] = RunConfig, prefix: str = "", *, chosen: bool = True
) -> Iterator[str]:
    """Yield every config key with its default and meaning, one line each.

    `chosen` says that a run always has this section: only then are its required keys required of all.
    """
    required = "required" if chosen else "required in this section"
    for own_name, field in section.model_fields.items():
        name = field.alias or own_name
        # what a part of a mix has is described where a run has it
        inner = [] if section is Part else list(inner_sections(field.annotation))
        if not inner or prefix:
            default = required if field.is_required() else f"default {json.dumps(field.get_default())}"
            yield f"  {prefix}{name}: {field.description} ({default})"
        for each in inner:
            own = chosen and field.is_required() and field.annotation is each
            yield from describe_keys(each, f"{prefix}{name}.", chosen=own)


def _apply(values: dict[str, Any], override: str) -> None:  # Any: checked by make_config afterwards
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"{shown(override)} is not an override", hint="write section.key=value, e.g. optim.lr=1e-4"
        )
    section: Any = values
    for key in keys[:-1]:
        section = (
            section[_place(section, key, override)]
            if isinstance(section, list)
            else section.setdefault(key, {})
        )
        if not isinstance(section, dict | list):
            raise ConfigError(f"override {shown(override)}: {shorten(key)} is not a section")
    last = _place(section, keys[-1], override) if isinstance(section, list) else keys[-1]
    try:
        section[last] = parse_yaml(text)
    except yaml.YAMLError as error:
        hint = getattr(error, "problem", None)
        raise ConfigError(
            f"override {shown(override)}: {shown(text)} is not a YAML value", hint=hint
        ) from error


def parse_yaml(text: str) -> Any:  # Any: YAML values
    """A YAML text; a key that is there twice is an error, and 1e-3 a number."""
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


def _measure(node: yaml.Node, known: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """Return how many values a node stands for and how deep they are, each alias written out.

    A few lines with aliases of aliases can stand for billions of values.
    """
    if node in known:
        if (size := known[node]) is None:
            raise _refused(node, "a value holds itself")
        return size
    known[node] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    sizes = [_measure(part, known) for part in parts]
    size = 1 + sum(count for count, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    if size[0] > _MOST_VALUES:
        raise _refused(node, f"it holds more than {_MOST_VALUES:,} values, aliases written out")
    if size[1] > _MOST_LEVELS:
        raise _refused(node, f"it is nested more than {_MOST_LEVELS} levels deep")
    known[node] = size
    return size


def _refused(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _place(items: list[Any], key: str, override: str) -> int:  # Any: YAML values
    if not key.isdecimal() or len(key) > 9 or int(key) >= len(items):
        problem = f"{shorten(key)} is not an index of a list of {len(items)}, counted from 0"
        raise ConfigError(f"override {shown(override)}: {problem}")
    return int(key)
