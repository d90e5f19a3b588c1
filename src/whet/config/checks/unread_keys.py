"""Keys that are given and have no effect: another kind than the chosen one reads them."""

from collections.abc import Iterator, Mapping
from typing import Any

from whet.config.method import Method
from whet.config.objectives.union import section_of_kind
from whet.config.run_config import RunConfig
from whet.config.section import Section, key_info


def unread(config: RunConfig) -> dict[str, str]:
    """Keys that differ from their default and that nothing reads, each with the choice that makes it so."""
    method = config.method
    if method.targets == config.objective.default_targets:
        method = method.model_copy(update={"targets": Method().targets})
    return dict(_unread(config.model_copy(update={"method": method}), ""))


def unread_lines(config: RunConfig) -> list[str]:
    """The same in words."""
    return [f"{key} has no effect with {choice}" for key, choice in unread(config).items()]


def unread_by_objective(values: Mapping[str, Any]) -> set[str]:  # Any: YAML values
    """The keys of an objective, as plain values, that its kind does not read."""
    fields = section_of_kind(values.get("kind")).model_fields
    conditions = {key: read_by for key, field in fields.items() if (read_by := key_info(field).read_by)}
    return {
        key
        for key, read_by in conditions.items()
        if not read_by.includes([values.get(read_by.switch, fields[read_by.switch].get_default())])
    }


def _unread(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield what a section, the sections in it and those in its lists leave unread."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unread(item, f"{path}{index}.")
    if not isinstance(value, Section):
        return
    for name, field in type(value).model_fields.items():
        own, read_by = getattr(value, name), key_info(field).read_by
        if read_by is not None and own != field.get_default():
            chosen = _chosen(getattr(value, read_by.switch))
            if not read_by.includes(chosen):
                yield f"{path}{name}", f"{path}{read_by.switch}: {', '.join(map(_shown, chosen))}"
        yield from _unread(own, f"{path}{name}.")


def _chosen(switch: Any) -> list[Any]:  # Any: a name, a number, or sections that each have a kind
    return [each.kind for each in switch] if isinstance(switch, list) else [switch]


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
