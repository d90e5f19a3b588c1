"""Record formats: detect the format of a record by its fields, validate the fields and normalize them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from whet.data.sources.chat_messages import (
    Message,
    parse_conversations,
    parse_messages,
    parse_tools,
    split_pair,
)
from whet.errors import DataError

Fields = dict[str, Any]  # Any: JSON values
FormatName = Literal[
    "messages", "preference", "completion", "classification", "tabular", "distrust", "text", "prompt"
]


@dataclass(frozen=True)
class RecordFormat:
    """A record format: the fields that identify it, and the function that validates them.

    `read` returns the fields of the format in normalized form. Its DataErrors do not yet name the record.
    """

    name: FormatName
    required: tuple[str, ...]
    read: Callable[[Fields], Fields]
    text_fields: tuple[str, ...] = ()  # fields that become text, if not the required ones

    def matches(self, fields: Fields) -> bool:
        """Return whether a record has the required fields."""
        return all(fields.get(name) is not None for name in self.required)

    def unread(self, fields: Fields) -> tuple[str, ...]:
        """Return the fields that are neither part of the text nor of its labels."""
        return tuple(name for name in fields if name not in (self.text_fields or self.required))


def detect_format(fields: Fields) -> RecordFormat:
    """Return the first format whose required fields a record has; null fields count as missing."""
    record_format = _detect_by_names(tuple(name for name, value in fields.items() if value is not None))
    if record_format is not None:
        return record_format
    raise DataError(
        f"a record with the fields {describe_fields(fields)} matches no known record format",
        hint=_format_hint(fields),
    )


@functools.lru_cache(maxsize=1024)
def _detect_by_names(names: tuple[str, ...]) -> RecordFormat | None:
    """Return the first format whose required fields are in `names`. Cached: files are mostly uniform."""
    return next(
        (record_format for record_format in RECORD_FORMATS if set(record_format.required) <= set(names)), None
    )


def is_record(fields: Fields) -> bool:
    """Return whether an object is a record of any format."""
    return any(record_format.matches(fields) for record_format in RECORD_FORMATS)


def normalize_record(fields: Fields, name: FormatName | None = None) -> tuple[FormatName, Fields]:
    """Return the format of a record and its fields, validated and normalized.

    Args:
        fields: The fields of the record. Nulls are removed, and fields outside the format stay unchanged.
        name: The format to use; None uses the first one that matches.
    """
    record_format = find_format(fields, name)
    present = {key: value for key, value in fields.items() if value is not None}
    return record_format.name, {**present, **record_format.read(present)}


def find_format(fields: Fields, name: FormatName | None = None) -> RecordFormat:
    """Return the format called `name`, or the first format that matches."""
    return detect_format(fields) if name is None else _find_named(fields, name)


def _find_named(fields: Fields, name: FormatName) -> RecordFormat:
    for record_format in (*RECORD_FORMATS, _TEXT_AND_LABEL, _TEXT_AND_LABELS, _QUESTION):
        if record_format.name == name and record_format.matches(fields):
            return record_format
    required = " or ".join(
        " + ".join(record_format.required) for record_format in RECORD_FORMATS if record_format.name == name
    )
    raise DataError(
        f"a record with the fields {describe_fields(fields)} "
        f"lacks the fields that data.format {name} needs: {required}"
    )


def _read_messages(fields: Fields) -> Fields:
    return {"messages": parse_messages(fields, "messages"), **parse_tools(fields)}


def _read_sharegpt(fields: Fields) -> Fields:
    return {"messages": parse_conversations(fields), **parse_tools(fields)}


def _read_preference(fields: Fields) -> Fields:
    """Normalize prompt, chosen and rejected: all three are text, or all three are messages."""
    prompt, chosen, rejected = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            raise DataError("chosen and rejected are text, and the record has no prompt")
        if isinstance(prompt, str):
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **parse_tools(fields)}
    completions = [_as_messages(fields, name, role="assistant") for name in ("chosen", "rejected")]
    prompt_messages = None if prompt is None else _as_messages(fields, "prompt", role="user")
    prompt, chosen, rejected = split_pair(prompt_messages, *completions)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **parse_tools(fields)}


def _as_messages(fields: Fields, name: str, *, role: str) -> list[Message]:
    if isinstance(fields[name], str):
        return [{"role": role, "content": fields[name]}]
    return parse_messages(fields, name)


def _read_completion(fields: Fields) -> Fields:
    texts = {name: _require_string(fields, name) for name in ("prompt", "completion")}
    return {**texts, **parse_tools(fields)}


def _read_alpaca(fields: Fields) -> Fields:
    """Build the prompt from the instruction and, if present, an empty line and the input."""
    for name in ("system", "history"):
        if fields.get(name):
            raise DataError(
                f"the field {name} of Alpaca records is not supported",
                hint="write the record as messages with the roles system, user and assistant",
            )
    prompt = _require_string(fields, "instruction")
    if fields.get("input"):
        prompt = f"{prompt}\n\n{_require_string(fields, 'input')}"
    return {"prompt": prompt, "completion": _require_string(fields, "output"), **parse_tools(fields)}


def _read_label(fields: Fields) -> Fields:
    label = fields["label"]
    if not (isinstance(label, str) or _is_class_index(label)):
        raise DataError(
            f"label must be a class name or an integer >= 0, not {_short_repr(label)}",
            hint="soft targets need objective.multi_label and labels: one number from 0 to 1 per class"
            if isinstance(label, float)
            else None,
        )
    return {"input": _require_string(fields, "input"), "label": label}


def _read_labels(fields: Fields) -> Fields:
    labels = fields["labels"]
    names = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    numbers = isinstance(labels, list) and all(_is_class_index(label) for label in labels)
    soft = isinstance(labels, list) and all(_is_target(label) for label in labels)
    if not (names or numbers or soft):
        raise DataError(
            "labels must be a list of class names, of integers >= 0, or of one number from 0 to 1 per class, "
            f"not {_short_repr(labels)}"
        )
    return {"input": _require_string(fields, "input"), "labels": labels}


def _is_class_index(label: Any) -> bool:  # Any: a JSON value
    return isinstance(label, int | float) and 0 <= label < 2**31 and label == int(label)


def _is_target(label: Any) -> bool:  # Any: a JSON value
    return isinstance(label, int | float) and 0 <= label <= 1


def _read_tabular(fields: Fields) -> Fields:
    target = fields["target"]
    several = isinstance(target, list)
    return {
        "features": _require_numbers(fields["features"], "feature"),
        "target": _require_numbers(target, "target") if several else require_number(target, "target"),
    }


def _require_numbers(values: Any, name: str) -> list[float]:  # Any: a JSON value
    if not isinstance(values, list) or not values:
        raise DataError(f"{name}s must be a list of numbers, not {_short_repr(values)}")
    return [require_number(value, f"{name} {index}") for index, value in enumerate(values, start=1)]


def _read_distrust(fields: Fields) -> Fields:
    weight = require_number(fields["auth_weight"], "auth_weight")
    entropy = require_number(fields["prov_entropy"], "prov_entropy")
    if not 0 <= weight <= 0.99:
        raise DataError(f"auth_weight must be from 0 to 0.99, not {weight:g}")
    if entropy < 0:
        raise DataError(f"prov_entropy must not be negative, but is {entropy:g}")
    return {"text": _require_string(fields, "text"), "auth_weight": weight, "prov_entropy": entropy}


def _read_text(fields: Fields) -> Fields:
    for field, partner in (("auth_weight", "prov_entropy"), ("prov_entropy", "auth_weight")):
        if fields.get(field) is not None and fields.get(partner) is None:
            raise DataError(f"the record has {field} but not {partner}", hint="set both fields, or neither")
    return {"text": _require_string(fields, "text")}


def _read_prompt(fields: Fields) -> Fields:
    prompt = fields["prompt"] if isinstance(fields["prompt"], str) else parse_messages(fields, "prompt")
    return {"prompt": prompt, **parse_tools(fields)}


def _read_question(fields: Fields) -> Fields:
    return {"prompt": _require_string(fields, "question"), **parse_tools(fields)}


def _with_text_as_input(read: Callable[[Fields], Fields]) -> Callable[[Fields], Fields]:
    return lambda fields: read({**fields, "input": fields["text"]})


# Formats are tried in this order.
RECORD_FORMATS = (
    RecordFormat("messages", ("messages",), _read_messages, ("messages", "tools")),
    RecordFormat("messages", ("conversations",), _read_sharegpt, ("conversations", "system", "tools")),
    RecordFormat(
        "preference", ("chosen", "rejected"), _read_preference, ("prompt", "chosen", "rejected", "tools")
    ),
    RecordFormat("completion", ("prompt", "completion"), _read_completion, ("prompt", "completion", "tools")),
    RecordFormat(
        "completion", ("instruction", "output"), _read_alpaca, ("instruction", "input", "output", "tools")
    ),
    RecordFormat("classification", ("input", "label"), _read_label),
    RecordFormat("classification", ("input", "labels"), _read_labels),
    RecordFormat("tabular", ("features", "target"), _read_tabular),
    RecordFormat("distrust", ("text", "auth_weight", "prov_entropy"), _read_distrust, ("text",)),
    RecordFormat("text", ("text",), _read_text),
    RecordFormat("prompt", ("prompt",), _read_prompt, ("prompt", "tools")),
)
# Only if the config asks for classification: otherwise text with a label counts as plain text.
_TEXT_AND_LABEL = RecordFormat("classification", ("text", "label"), _with_text_as_input(_read_label))
_TEXT_AND_LABELS = RecordFormat("classification", ("text", "labels"), _with_text_as_input(_read_labels))
# Only if the config asks for prompts: the answer to a question may be in any field.
_QUESTION = RecordFormat("prompt", ("question",), _read_question, ("question", "tools"))

# Field names of other tools; used only in hints, because a guess may be wrong.
_ALIASES = {
    "completion": ("answer", "response", "output", "reply", "completions", "solution", "target"),
    "prompt": ("question", "query", "instruction", "input", "prompts"),
    "text": ("content", "document", "body", "texts"),
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "chosen": ("accepted", "preferred", "response_chosen"),
    "rejected": ("dispreferred", "response_rejected"),
    "input": ("sentence",),
    "label": ("class", "category"),
}


def _format_hint(fields: Fields) -> str:
    renaming = renaming_hint(fields, *_ALIASES)
    known = dict.fromkeys(" + ".join(record_format.required) for record_format in RECORD_FORMATS)
    return f"{renaming + '; ' if renaming else ''}known formats: {'; '.join(known)}"


def renaming_hint(fields: Fields, *names: str) -> str:
    """Return a hint to rename fields to the missing ones of `names`; empty if no field is a known alias."""
    by_lowercase = {name.lower(): name for name in fields}
    renamings = [
        f"{by_lowercase[alias]} -> {name}"
        for name in names
        if name not in fields
        for alias in _ALIASES[name]
        if alias in by_lowercase
    ]
    return f"rename the fields: {', '.join(renamings)}" if renamings else ""


def describe_fields(fields: Fields) -> str:
    """Return the names of a record's fields for messages: at most 20, each shortened to 40 characters."""
    names = [repr(name[:40]) + (" (null)" if value is None else "") for name, value in fields.items()]
    return ", ".join([*names[:20], *(["..."] if len(names) > 20 else [])]) or "none"


def _require_string(fields: Fields, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(f"{name} must be a string, not {type(value).__name__}")
    return value


def require_number(value: Any, name: str) -> float:  # Any: a JSON value
    """Return a finite number as a float; raise a DataError for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or abs(value) > 1e300 or not math.isfinite(value):
        raise DataError(f"{name} must be a number, not {_short_repr(value)}")
    return float(value)


def _short_repr(value: Any) -> str:  # Any: a JSON value
    text = repr(value)
    return text if len(text) <= 50 else f"{text[:50]}..."
