"""Objects from Python and the placeholders that stand for them in a config, brought together."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.config.load_config import ConfigLike, as_config, make_config, read_values, to_dict
from whet.config.placeholder import Placeholder, parse_placeholder
from whet.config.run_config import RunConfig
from whet.errors import CheckpointError, ConfigError, WhetError
from whet.given.given import Given, placeholder_of

Values = Mapping[str, Any]  # Any: YAML values
KeyPath = tuple[str | int, ...]
_SPLITS = ("train", "valid", "test")


def bind_config(config: ConfigLike, given: Given) -> RunConfig:
    """Return the config of a run, with the name and the hash of every object that it is given.

    Objects that the config does not name come where they belong: data of train, valid and test in the section
    `data`, rewards at the end of `objective.rewards`, metrics in `eval.metrics`, and the objective as
    `objective.kind`.

    Raises:
        ConfigError: an object is missing, is not the one that the config names, or has no place in it.
    """
    if not given:
        bound = as_config(config)
    else:
        values, origin = _values(config)
        bound = make_config(bind(values, given), origin=origin)
    _check(bound, given, "the config", ConfigError, "whet.train(config{})")
    return bound


def check_given(config: RunConfig, given: Given, directory: Path) -> None:
    """Refuse to resume a run without the very objects that it began with.

    Raises:
        CheckpointError: an object is missing, has changed, or is not part of the run.
    """
    _check(config, given, str(directory), CheckpointError, f'whet.resume("{directory}"{{}})')


def bind(values: Values, given: Given) -> dict[str, Any]:  # Any: YAML values
    """Return the values of a config with placeholders for all objects; it is not yet validated."""
    digests = {
        (kind, name): placeholder_of(name, value)
        for kind, objects in given.named().items()
        for name, value in objects.items()
    }
    mentioned = set()

    def fill(kind: str, placeholder: Placeholder) -> str:
        key = kind, placeholder.name
        if key not in digests:
            return str(placeholder)
        mentioned.add(key)
        return digests[key] if placeholder.digest is None else str(placeholder)

    bound: dict[str, Any] = _mapped(values, (), fill)
    for (kind, name), text in digests.items():
        if (kind, name) not in mentioned:
            _insert(bound, kind, name, text)
    return bound


def _values(config: ConfigLike) -> tuple[Values, str]:
    if isinstance(config, RunConfig):
        return config.model_dump(mode="json", by_alias=True, exclude_unset=True), "config"
    return (config, "config") if isinstance(config, Mapping) else (read_values(config), str(config))


def _mapped(value: Any, path: KeyPath, fill: Callable[[str, Placeholder], str]) -> Any:  # Any: YAML values
    """Return a copy of a config's values in which `fill` has replaced every placeholder."""
    if isinstance(value, Mapping):
        return {key: _mapped(each, (*path, key), fill) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, (*path, index), fill) for index, each in enumerate(value)]
    placeholder, kind = parse_placeholder(value), _kind_at(path)
    return value if placeholder is None or kind is None else fill(kind, placeholder)


def _kind_at(path: KeyPath) -> str | None:
    """Return what kind of object a placeholder at this place stands for; None where it is plain text."""
    names = [key for key in path if isinstance(key, str)]
    if names[:2] == ["eval", "metrics"]:
        return "metrics"
    if names[-2:] == ["objective", "kind"]:
        return "objective"
    if names[:2] == ["objective", "rewards"]:
        return "rewards" if names[2:] in ([], ["function"]) else None
    return "data" if "data" in names[:3] else None


def _insert(values: dict[str, Any], kind: str, name: str, text: str) -> None:  # Any: YAML values
    """Put a placeholder where the config has none for it."""
    if kind == "data":
        if name not in _SPLITS:
            raise ConfigError(
                f"data={{{name!r}: ...}}: no key of the config names it",
                hint=f"write python:{name} where it is read (data.curriculum.hard, a list of sources, or the "
                f"data of a part); {', '.join(_SPLITS)} need not be named",
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
        if objective_kind != "grpo" and ":" not in objective_kind:  # a kind of the user's own may take them
            raise ConfigError(
                f"rewards= is given, and objective.kind is {objective_kind}",
                hint="rewards are for objective.kind: grpo",
            )
        objective["rewards"] = [*(objective.get("rewards") or []), {"function": text, "name": name}]


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:  # Any: YAML values
    section = values.get(name)
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{name}: this is a section with keys of its own, not {type(section).__name__}")
    filled: dict[str, Any] = section or {}
    values[name] = filled
    return filled


def _set(section: dict[str, Any], name: str, text: str, key: str, argument: str) -> None:
    # Any: YAML values
    if section.get(name) is not None:
        raise ConfigError(
            f"{key} is given twice: {section[name]} in the config, and {argument}",
            hint="leave one of them out",
        )
    section[name] = text


def _placeholders(config: RunConfig) -> dict[tuple[str, str], str]:
    """Return the placeholders of a config, by the kind and the name of the object."""
    found: dict[tuple[str, str], str] = {}

    def note(kind: str, placeholder: Placeholder) -> str:
        found[kind, placeholder.name] = str(placeholder)
        return str(placeholder)

    _mapped(to_dict(config), (), note)
    return found


def _check(config: RunConfig, given: Given, owner: str, error: type[WhetError], call: str) -> None:
    """Compare the placeholders of a config with the objects that are there."""
    wanted = _placeholders(config)
    objects = {
        (kind, name): each for kind, by_name in given.named().items() for name, each in by_name.items()
    }
    if problems := list(_problems(wanted, objects)):
        lacking = f"{owner} needs Python objects, which a program in Python must pass:"
        others = f"the Python objects passed are not those of {owner}:"
        raise error(
            "\n  ".join([others if objects else lacking, *problems]),
            hint=call.format("".join(f", {argument}" for argument in _arguments(wanted))),
        )


def _problems(
    wanted: Mapping[tuple[str, str], str], objects: Mapping[tuple[str, str], object]
) -> Iterator[str]:
    for (kind, name), text in wanted.items():
        if (kind, name) not in objects:
            yield f"{kind} {name!r} is missing ({text})"
        elif text not in (now := placeholder_of(name, objects[kind, name]), f"python:{name}"):
            yield f"{kind} {name!r} has changed: {text} became {now}"
    for kind, name in objects:
        if (kind, name) not in wanted:
            yield f"{kind} {name!r} is not part of it"


def _arguments(wanted: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield the arguments of a call that passes these objects."""
    for kind in dict.fromkeys(kind for kind, _ in wanted):
        names = [name for each, name in wanted if each == kind]
        listed = ", ".join(f'"{name}": ...' for name in names)
        yield f"objective={names[0]}(...)" if kind == "objective" else f"{kind}={{{listed}}}"
