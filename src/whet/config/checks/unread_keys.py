"""Config keys that are set but have no effect, because only other kinds use them."""

from collections.abc import Iterator, Mapping
from typing import Any

from whet.config.method import Method
from whet.config.objectives.union import objective_section
from whet.config.run_config import RunConfig
from whet.config.section import Section, key_info


def keys_without_effect(config: RunConfig) -> dict[str, str]:
    """Return the keys that are set but have no effect, each with the choice that disables it.

    Keys at their default value are left out.
    """
    method = config.method
    if method.targets == config.objective.default_targets:
        method = method.model_copy(update={"targets": Method().targets})
    return dict(_unread(config.model_copy(update={"method": method}), ""))


def unused_key_messages(config: RunConfig) -> list[str]:
    """Return one message for each key that is set but has no effect."""
    return [f"{key} has no effect with {choice}" for key, choice in keys_without_effect(config).items()]


def objective_keys_without_effect(values: Mapping[str, Any]) -> set[str]:  # Any: YAML values
    """Return the keys that have no effect for an objective, given as plain values."""
    fields = objective_section(values.get("kind")).model_fields
    conditions = {key: read_by for key, field in fields.items() if (read_by := key_info(field).used_when)}
    return {
        key
        for key, read_by in conditions.items()
        if not read_by.matches([values.get(read_by.switch, fields[read_by.switch].get_default())])
    }


def _unread(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the keys without effect in a section, its subsections and its lists, with the reason."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unread(item, f"{path}{index}.")
    if not isinstance(value, Section):
        return
    for name, field in type(value).model_fields.items():
        current, read_by = getattr(value, name), key_info(field).used_when
        if read_by is not None and current != field.get_default():
            chosen = _chosen(getattr(value, read_by.switch))
            if not read_by.matches(chosen):
                yield f"{path}{name}", f"{path}{read_by.switch}: {', '.join(map(_format, chosen))}"
        yield from _unread(current, f"{path}{name}.")


def _chosen(switch: Any) -> list[Any]:  # Any: a name, a number, or sections with a kind
    return [section.kind for section in switch] if isinstance(switch, list) else [switch]


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
