"""Error messages for invalid configs: pydantic's errors by key, with suggestions for unknown keys."""

import difflib
import itertools
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from whet.config.objectives.union import OBJECTIVE_KINDS
from whet.config.quality import Quality
from whet.errors import ConfigError, short_repr, shorten

Location = tuple[int | str, ...]

_UNION_BRANCHES = (
    *("str", "int", "float", "a-name", "a-preset", "a-quality", "an-objective-of-whet", "a-custom-objective"),
    *OBJECTIVE_KINDS,
)
_MAX_PROBLEMS = 30  # enough for a pasted config of another tool, where every key is explained


def config_error(error: ValidationError, section: type[BaseModel], *, origin: str) -> ConfigError:
    """Convert a pydantic error to a ConfigError that lists every problem.

    Args:
        error: The error that pydantic raised.
        section: The section that was validated; suggestions for unknown keys come from it.
        origin: The file or name that the values came from, which starts the message.
    """
    from whet.config.checks.other_tools import OTHER_TOOLS  # a long table, only needed for errors

    problems = list(_explain(error, section))
    foreign = any(
        item["type"] == "extra_forbidden" and item["loc"][-1] in OTHER_TOOLS for item in error.errors()
    )
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"and {len(problems) - _MAX_PROBLEMS} more problems"]
    lines = f"{origin}: {problems[0]}" if len(problems) == 1 else "\n  ".join([f"{origin}:", *problems])
    hint = "docs/coming-from.md maps the keys of other tools to those of whet" if foreign else None
    return ConfigError(lines, hint=hint)


def _explain(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    problems = error.errors()
    deepest: dict[Location, int] = {}
    for problem in problems:
        field = _before_union(problem["loc"])
        deepest[field] = max(deepest.get(field, 0), len(problem["loc"]))
    for problem in problems:
        location = problem["loc"]
        field = _before_union(location)
        if field != location and len(location) < deepest[field]:
            continue  # of the branches of a union, only report the one that matched furthest
        key = shorten(".".join(str(part) for part in location if not _is_union_branch(part)), 200)
        if problem["type"] == "extra_forbidden":
            yield f"unknown key {key!r}{_suggestion(location, root)}"
        elif problem["type"] == "missing":
            yield f"{key} is missing"
        else:
            yield f"{key}: {_reason(problem, root)}" if key else _reason(problem, root)


def _reason(problem: Any, root: type[BaseModel]) -> str:  # Any: pydantic's typed dict of an error
    value = problem["input"]
    match problem["type"]:
        case "union_tag_invalid":
            kinds = re.findall(r"'([\w-]+)'", problem["ctx"]["expected_tags"])
            near = difflib.get_close_matches(problem["ctx"]["tag"], kinds, n=1)
            suggestion = f", did you mean {near[0]!r}?" if near else f" (known: {', '.join(kinds)})"
            return f"unknown kind {shorten(problem['ctx']['tag'])!r}{suggestion}"
        case "union_tag_not_found":
            return "kind is missing"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"this must be a section with keys, not a value (given: {short_repr(value)})"
    message = shorten(problem["msg"].removeprefix("Value error, "), 1000)
    if problem["type"] == "int_from_float" and (description := _description(problem["loc"], root)):
        message = f"{message}: {description}"
    return message if isinstance(value, dict) else f"{message} (given: {short_repr(value)})"


def _description(location: Location, root: type[BaseModel]) -> str | None:
    """Return the description of the key at a location, or None."""
    section = _section_at(location[:-1], root)
    field = section.model_fields.get(str(location[-1])) if section is not None else None
    return field.description if field is not None else None


def _is_union_branch(part: int | str) -> bool:
    """Return whether a part of a location is a type that pydantic inserted, not a key of the config."""
    return str(part) in _UNION_BRANCHES or str(part).startswith(
        ("constrained", "list[", "function-before[", "literal[")
    )


def _before_union(location: Location) -> Location:
    """Return the location of the innermost key before a union branch, or the full location."""
    return tuple(itertools.takewhile(lambda part: not _is_union_branch(part), location))


def _suggestion(location: Location, root: type[BaseModel]) -> str:
    """Return a suggestion for an unknown key, to append to the message."""
    from whet.config.checks.other_tools import OTHER_TOOLS

    section = _section_at(location[:-1], root)
    if section is None:
        return ""
    name = str(location[-1])
    known = [field.alias or key for key, field in section.model_fields.items()]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near and name not in OTHER_TOOLS:
        return f", did you mean {near[0]!r}?"
    if name in OTHER_TOOLS:
        return f": in whet, {OTHER_TOOLS[name]}"
    if elsewhere := [path for path in _paths(root) if path.rpartition(".")[2] == name]:
        return f", did you mean {' or '.join(repr(path) for path in elsewhere[:3])}?"
    return f" (known: {', '.join(known)})"


def _paths(section: type[BaseModel], prefix: str = "", depth: int = 2) -> Iterator[str]:
    """Yield the full keys of a section and its subsections, up to a depth."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        for inner in nested_sections(field.annotation) if depth > 1 else ():
            yield from _paths(inner, f"{path}.", depth - 1)


def _section_at(location: Location, root: type[BaseModel]) -> type[BaseModel] | None:
    sections: list[type[BaseModel]] = [root]
    for key in location:
        if key in OBJECTIVE_KINDS:  # selects a branch of the union
            sections = [
                section for section in sections if key in get_args(section.model_fields["kind"].annotation)
            ]
        if key == "a-quality":
            sections = [Quality]
        if not sections or _is_union_branch(key):
            continue
        # in a list or mapping of sections, the next part is an index or a user-defined key: keep the section
        if (field := sections[0].model_fields.get(str(key))) is not None:
            sections = list(nested_sections(field.annotation))
    return sections[0] if sections else None


def nested_sections(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the section classes in a field's type, including items of lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from nested_sections(inner)
