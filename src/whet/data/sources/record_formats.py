"""Record formats: detect the format of a record by its fields, validate the fields and normalize them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whet.config.data import FormatName
from whet.data.sources.chat_messages import parse_messages, parse_tools
from whet.data.sources.peer_formats import (
    Fields,
    read_alpaca,
    read_alpaca_preference,
    read_completion,
    read_openai_preference,
    read_preference,
    read_sharegpt,
    read_sharegpt_preference,
    read_tokens,
    require_string,
)
from whet.errors import DataError


@dataclass(frozen=True)
class RecordFormat:
    """A record format: the fields that identify it, and the function that validates them.

    `read` returns the fields of the format in normalized form. Its DataErrors do not yet name the record. If
    it returns messages, the record is a conversation, whatever the format is called.
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
    raise _no_format_error(fields)


@functools.lru_cache(maxsize=1024)
def _detect_by_names(names: tuple[str, ...]) -> RecordFormat | None:
    """Return the first format whose required fields are in `names`. Cached: files are mostly uniform."""
    *formats, prompt = RECORD_FORMATS
    return next(
        (each for each in (*formats, _STEPWISE, prompt) if set(each.required) <= set(names)),
        None,
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
    normalized = record_format.read(present)
    return "messages" if "messages" in normalized else record_format.name, {**present, **normalized}


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
    candidates = [record_format for record_format in RECORD_FORMATS if record_format.name == name]
    nearest = min(candidates, key=lambda record_format: len(_missing(record_format, fields)))
    raise DataError(
        f"a record with the fields {describe_fields(fields)} "
        f"lacks the fields that data.format {name} needs: {required}",
        hint=renaming_hint(fields, *nearest.required) or None,
    )


def _read_messages(fields: Fields) -> Fields:
    return {"messages": parse_messages(fields, "messages"), **parse_tools(fields)}


def _read_stepwise(_: Fields) -> Fields:
    raise DataError(
        "completions with labels are stepwise supervision for a process reward model, which whet does not "
        "train",
        hint="keep the correct completions as prompt and completion",
    )


def _read_label(fields: Fields) -> Fields:
    label = fields["label"]
    if not (isinstance(label, str) or _is_class_index(label)):
        raise DataError(
            f"label must be a class name or an integer >= 0, not {_short_repr(label)}",
            hint="soft targets need objective.multi_label and labels: one number from 0 to 1 per class"
            if isinstance(label, float)
            else None,
        )
    return {"input": require_string(fields, "input"), "label": label}


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
    return {"input": require_string(fields, "input"), "labels": labels}


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
    return {"text": require_string(fields, "text"), "auth_weight": weight, "prov_entropy": entropy}


def _read_text(fields: Fields) -> Fields:
    for field, partner in (("auth_weight", "prov_entropy"), ("prov_entropy", "auth_weight")):
        if fields.get(field) is not None and fields.get(partner) is None:
            raise DataError(f"the record has {field} but not {partner}", hint="set both fields, or neither")
    return {"text": require_string(fields, "text")}


def _read_prompt(fields: Fields) -> Fields:
    prompt = fields["prompt"] if isinstance(fields["prompt"], str) else parse_messages(fields, "prompt")
    return {"prompt": prompt, **parse_tools(fields)}


def _read_question(fields: Fields) -> Fields:
    return {"prompt": require_string(fields, "question"), **parse_tools(fields)}


def _with_text_as_input(read: Callable[[Fields], Fields]) -> Callable[[Fields], Fields]:
    return lambda fields: read({**fields, "input": fields["text"]})


_PAIR = ("chosen", "rejected", "tools")
_ALPACA = ("instruction", "input", "system", "history", "tools")
# Formats are tried in this order.
RECORD_FORMATS = (
    RecordFormat("messages", ("messages",), _read_messages, ("messages", "tools")),
    RecordFormat(
        "preference",
        ("conversations", "chosen", "rejected"),
        read_sharegpt_preference,
        ("conversations", "system", *_PAIR),
    ),
    RecordFormat("messages", ("conversations",), read_sharegpt, ("conversations", "system", "tools")),
    RecordFormat(
        "preference", ("instruction", "chosen", "rejected"), read_alpaca_preference, (*_ALPACA, *_PAIR)
    ),
    RecordFormat("preference", ("chosen", "rejected"), read_preference, ("prompt", *_PAIR)),
    RecordFormat("preference", ("input", "preferred_output", "non_preferred_output"), read_openai_preference),
    RecordFormat("completion", ("prompt", "completion"), read_completion, ("prompt", "completion", "tools")),
    RecordFormat("completion", ("instruction", "output"), read_alpaca, (*_ALPACA, "output")),
    RecordFormat("tokens", ("input_ids",), read_tokens, ("input_ids", "labels", "attention_mask")),
    RecordFormat("classification", ("input", "label"), _read_label),
    RecordFormat("classification", ("input", "labels"), _read_labels),
    RecordFormat("tabular", ("features", "target"), _read_tabular),
    RecordFormat("distrust", ("text", "auth_weight", "prov_entropy"), _read_distrust, ("text",)),
    RecordFormat("text", ("text",), _read_text),
    RecordFormat("prompt", ("prompt",), _read_prompt, ("prompt", "tools")),
)
# Recognized, to refuse it with a reason.
_STEPWISE = RecordFormat("prompt", ("completions", "labels"), _read_stepwise)
# Only if the config asks for classification: otherwise text with a label counts as plain text.
_TEXT_AND_LABEL = RecordFormat("classification", ("text", "label"), _with_text_as_input(_read_label))
_TEXT_AND_LABELS = RecordFormat("classification", ("text", "labels"), _with_text_as_input(_read_labels))
# Only if the config asks for prompts: the answer to a question may be in any field.
_QUESTION = RecordFormat("prompt", ("question",), _read_question, ("question", "tools"))

# Field names of other tools; only suggested for data.columns, because a guess may be wrong.
_ALIASES = {
    "completion": ("answer", "response", "output", "reply", "completions", "solution", "target", "assistant"),
    "prompt": ("question", "query", "instruction", "input", "prompts", "problem", "user"),
    "text": ("content", "document", "body", "texts"),
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "chosen": ("accepted", "preferred", "response_chosen", "positive"),
    "rejected": ("dispreferred", "response_rejected", "negative"),
    "input": ("sentence",),
    "label": ("class", "category"),
    "input_ids": ("tokens", "token_ids"),
}


def _no_format_error(fields: Fields) -> DataError:
    """Return the error for a record of no format: the nearest format, what it lacks, and how to map it."""
    problem = f"a record with the fields {describe_fields(fields)} matches no known record format"
    nearest = min(RECORD_FORMATS, key=lambda record_format: _distance(record_format, fields))
    missing = _missing(nearest, fields)
    present = {name for name, value in fields.items() if value is not None}
    renaming = renaming_hint(fields, *nearest.required)
    if not renaming and present.isdisjoint(nearest.required):
        known = dict.fromkeys(" + ".join(record_format.required) for record_format in RECORD_FORMATS)
        return DataError(
            problem,
            hint="name your columns, as in data.columns: {prompt: question, completion: answer}; known "
            f"formats: {'; '.join(known)}",
        )
    return DataError(
        f"{problem}; the nearest, {nearest.name} ({' + '.join(nearest.required)}), lacks "
        f"{' and '.join(missing)}",
        hint=renaming or f"add {' and '.join(missing)}, or map the columns with data.columns",
    )


def _distance(record_format: RecordFormat, fields: Fields) -> tuple[int, int, int]:
    """Return how far a record is from a format: fields without a candidate, candidates, fields present."""
    missing = _missing(record_format, fields)
    unmatched = len(missing) - len(_find_aliases(fields, *missing))
    return unmatched, -len(record_format.required) if not unmatched else 0, len(missing)


def _missing(record_format: RecordFormat, fields: Fields) -> list[str]:
    return [name for name in record_format.required if fields.get(name) is None]


def _find_aliases(fields: Fields, *names: str) -> dict[str, str]:
    """Return the fields that look like the fields in `names`; no field is used twice."""
    by_lowercase = {name.lower(): name for name, value in fields.items() if value is not None}
    aliases: dict[str, str] = {}
    for name in names:
        for alias in _ALIASES.get(name, ()):
            if alias in by_lowercase and by_lowercase[alias] not in aliases.values():
                aliases[name] = by_lowercase[alias]
                break
    return aliases


def renaming_hint(fields: Fields, *names: str) -> str:
    """Return the data.columns that map a record to the fields in `names`; empty if no field looks alike."""
    aliases = _find_aliases(fields, *(name for name in names if fields.get(name) is None))
    columns = ", ".join(f"{name}: {field}" for name, field in aliases.items())
    return f"set data.columns: {{{columns}}}" if columns else ""


def describe_fields(fields: Fields) -> str:
    """Return the names of a record's fields for messages: at most 20, each shortened to 40 characters."""
    names = [repr(name[:40]) + (" (null)" if value is None else "") for name, value in fields.items()]
    return ", ".join([*names[:20], *(["..."] if len(names) > 20 else [])]) or "none"


def require_number(value: Any, name: str) -> float:  # Any: a JSON value
    """Return a finite number as a float; raise a DataError for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or abs(value) > 1e300 or not math.isfinite(value):
        raise DataError(f"{name} must be a number, not {_short_repr(value)}")
    return float(value)


def _short_repr(value: Any) -> str:  # Any: a JSON value
    text = repr(value)
    return text if len(text) <= 50 else f"{text[:50]}..."
