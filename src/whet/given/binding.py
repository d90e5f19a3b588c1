"""Bind Python objects to their placeholders in a config, and check them when a run resumes."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.config.load_config import ConfigLike, read_sections, to_config, to_dict, validate_config
from whet.config.placeholder import Placeholder, parse_placeholder
from whet.config.run_config import RunConfig
from whet.errors import CheckpointError, ConfigError, WhetError
from whet.given.given import Given, placeholder_of

Values = Mapping[str, Any]  # Any: YAML values
KeyPath = tuple[str | int, ...]
_SPLITS = ("train", "valid", "test")


def bind_config(config: ConfigLike, given: Given) -> RunConfig:
    """Return the config of a run with a placeholder (name and hash) for every object.

    Objects that the config does not mention are added at their default keys: train, valid and test data in
    `data`, rewards at the end of `objective.rewards`, metrics in `eval.metrics`, and the objective as
    `objective.kind`.

    Raises:
        ConfigError: An object is missing, differs from that of the config, or is not used by any key.
    """
    if not given:
        bound = to_config(config)
    else:
        values, origin = _values(config)
        _mark_streamed(values, given)
        bound = validate_config(insert_placeholders(values, given), origin=origin)
    _check(bound, given, "the config", ConfigError, "whet.train(config{})")
    return bound


def check_given(config: RunConfig, given: Given, directory: Path) -> None:
    """Check that a run is resumed with the same Python objects that it was started with.

    Raises:
        CheckpointError: An object is missing, has changed, or is not part of the run.
    """
    _mark_streamed(to_dict(config), given)
    _check(config, given, str(directory), CheckpointError, f'whet.resume("{directory}"{{}})')


def insert_placeholders(values: Values, given: Given) -> dict[str, Any]:  # Any: YAML values
    """Return the values of a config with a placeholder for every object, not validated."""
    texts = {
        (kind, name): placeholder_of(name, value)
        for kind, objects in given.named().items()
        for name, value in objects.items()
    }
    mentioned = set()

    def fill(kind: str, placeholder: Placeholder) -> str:
        key = kind, placeholder.name
        if key not in texts:
            return str(placeholder)
        mentioned.add(key)
        return texts[key] if placeholder.digest is None else str(placeholder)

    bound: dict[str, Any] = _map_placeholders(values, (), fill)
    for (kind, name), text in texts.items():
        if (kind, name) not in mentioned:
            _insert(bound, kind, name, text)
    return bound


def _mark_streamed(values: Values, given: Given) -> None:
    """Mark the records that are streamed: they may be endless, so their hash covers only the first ones."""
    objective = values.get("objective")
    parts = objective.get("parts") if isinstance(objective, Mapping) else None
    sections = [values, *(part for part in parts or () if isinstance(part, Mapping))]
    for section in (each.get("data") for each in sections):
        if isinstance(section, Mapping) and section.get("stream") not in (None, False):
            train = section.get("train", "python:train")
            for item in train if isinstance(train, list) else [train]:
                placeholder = parse_placeholder(item.get("source") if isinstance(item, Mapping) else item)
                if placeholder is not None and placeholder.name in given.data:
                    given.data[placeholder.name].is_streamed = True


def _values(config: ConfigLike) -> tuple[Values, str]:
    if isinstance(config, RunConfig):
        return config.model_dump(mode="json", by_alias=True, exclude_unset=True), "config"
    return (config, "config") if isinstance(config, Mapping) else (read_sections(config), str(config))


def _map_placeholders(
    value: Any, path: KeyPath, fill: Callable[[str, Placeholder], str]
) -> Any:  # Any: YAML values
    """Return a copy of a config's values in which `fill` has replaced every placeholder."""
    if isinstance(value, Mapping):
        return {key: _map_placeholders(item, (*path, key), fill) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_placeholders(item, (*path, index), fill) for index, item in enumerate(value)]
    placeholder, kind = parse_placeholder(value), _kind_at(path)
    return value if placeholder is None or kind is None else fill(kind, placeholder)


def _kind_at(path: KeyPath) -> str | None:
    """Return the kind of object that a placeholder at this key stands for, or None for plain text."""
    names = [key for key in path if isinstance(key, str)]
    if names[:2] == ["eval", "metrics"]:
        return "metrics"
    if names[-2:] == ["objective", "kind"]:
        return "objective"
    if names[:2] == ["objective", "rewards"]:
        return "rewards" if names[2:] in ([], ["function"]) else None
    return "data" if "data" in names[:3] else None


def _insert(values: dict[str, Any], kind: str, name: str, text: str) -> None:  # Any: YAML values
    """Insert a placeholder that the config does not mention at its default key."""
    if kind == "data":
        if name not in _SPLITS:
            raise ConfigError(
                f"data={{{name!r}: ...}}: no key of the config refers to it",
                hint=f"write python:{name} at the key that uses it (data.curriculum.hard, a list of sources, "
                f"or the data of a part); only {', '.join(_SPLITS)} are inserted automatically",
            )
        _set(_section(values, "data"), name, text, f"data.{name}", f"data={{{name!r}: ...}}")
    elif kind == "metrics":
        metrics = _section(_section(values, "eval"), "metrics")
        _set(metrics, name, text, f"eval.metrics.{name}", f"metrics={{{name!r}: ...}}")
    elif kind == "objective":
        _set(_section(values, "objective"), "kind", text, "objective.kind", "objective=...")
    else:
        objective = _section(values, "objective")
        objective_kind = str(objective.get("kind", "sft"))
        if objective_kind != "grpo" and ":" not in objective_kind:  # a custom kind may accept rewards
            raise ConfigError(
                f"rewards= needs objective.kind: grpo, not {objective_kind}",
                hint="set objective.kind: grpo, or remove rewards=",
            )
        objective["rewards"] = [*(objective.get("rewards") or []), {"function": text, "name": name}]


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:  # Any: YAML values
    section = values.get(name)
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{name}: this must be a section with keys, not {type(section).__name__}")
    filled: dict[str, Any] = section or {}
    values[name] = filled
    return filled


def _set(section: dict[str, Any], name: str, text: str, key: str, argument: str) -> None:
    # Any: YAML values
    if section.get(name) is not None:
        raise ConfigError(
            f"{key} is set twice: {section[name]} in the config, and {argument}",
            hint="remove one of them",
        )
    section[name] = text


def _placeholders(config: RunConfig) -> dict[tuple[str, str], str]:
    """Return the placeholders of a config by (kind, name) of the object."""
    placeholders: dict[tuple[str, str], str] = {}

    def record(kind: str, placeholder: Placeholder) -> str:
        placeholders[kind, placeholder.name] = str(placeholder)
        return str(placeholder)

    _map_placeholders(to_dict(config), (), record)
    return placeholders


def _check(config: RunConfig, given: Given, owner: str, error: type[WhetError], call: str) -> None:
    """Raise an error unless the objects match the placeholders of a config."""
    placeholders = _placeholders(config)
    objects = {
        (kind, name): value for kind, by_name in given.named().items() for name, value in by_name.items()
    }
    if problems := list(_problems(placeholders, objects)):
        missing = f"{owner} needs Python objects, which must be passed from Python:"
        different = f"the Python objects passed are not those of {owner}:"
        raise error(
            "\n  ".join([different if objects else missing, *problems]),
            hint=call.format("".join(f", {argument}" for argument in _arguments(placeholders))),
        )


def _problems(
    placeholders: Mapping[tuple[str, str], str], objects: Mapping[tuple[str, str], object]
) -> Iterator[str]:
    for (kind, name), text in placeholders.items():
        if (kind, name) not in objects:
            yield f"{kind} {name!r} is missing ({text})"
        elif text not in (current := placeholder_of(name, objects[kind, name]), f"python:{name}"):
            yield f"{kind} {name!r} has changed: expected {text}, but it is {current}"
    for kind, name in objects:
        if (kind, name) not in placeholders:
            yield f"{kind} {name!r} is not expected"


def _arguments(placeholders: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield the arguments of a call that passes the objects of these placeholders."""
    for kind in dict.fromkeys(kind for kind, _ in placeholders):
        names = [name for key, name in placeholders if key == kind]
        entries = ", ".join(f'"{name}": ...' for name in names)
        yield f"objective={names[0]}(...)" if kind == "objective" else f"{kind}={{{entries}}}"
