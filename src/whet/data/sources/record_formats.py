"""What a record is, told by its fields: each shape with what it needs, checked and brought to one form."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from whet.data.sources.chat_messages import Message, messages_of, split_pair, tools_of, turns_of
from whet.errors import DataError

Fields = dict[str, Any]  # Any: JSON values
ShapeName = Literal[
    "messages", "preference", "completion", "classification", "tabular", "distrust", "text", "prompt"
]


@dataclass(frozen=True)
class RecordFormat:
    """A kind of record: the fields that tell it, and the function that checks them.

    `read` gives the shape's own fields in their one form, and raises a DataError that does not yet say where.
    """

    name: ShapeName
    needs: tuple[str, ...]
    read: Callable[[Fields], Fields]
    reads: tuple[str, ...] = ()  # fields that its text is made of, where they are not those it needs

    def fits(self, fields: Fields) -> bool:
        """Whether the fields that tell this shape are there."""
        return all(fields.get(name) is not None for name in self.needs)

    def unread(self, fields: Fields) -> tuple[str, ...]:
        """The fields that are not part of its text, nor of what is learned about it."""
        return tuple(name for name in fields if name not in (self.reads or self.needs))


def recognise(fields: Fields) -> RecordFormat:
    """The first shape whose fields a record has; a null is a field that is not there."""
    shape = _told_by(tuple(name for name, value in fields.items() if value is not None))
    if shape is not None:
        return shape
    raise DataError(f"a record with the fields {seen(fields)} fits no shape", hint=_hint(fields))


@functools.lru_cache(maxsize=1024)
def _told_by(names: tuple[str, ...]) -> RecordFormat | None:
    """The first shape that some fields tell: the same for all records of most files."""
    return next((shape for shape in SHAPES if set(shape.needs) <= set(names)), None)


def fits_a_shape(fields: Fields) -> bool:
    """Whether an object is a record."""
    return any(shape.fits(fields) for shape in SHAPES)


def shaped(fields: Fields, wanted: ShapeName | None = None) -> tuple[ShapeName, Fields]:
    """A record's shape (the one `wanted`, or the first that fits) and its fields, checked, in their one form.

    Other fields stay as they are, for the reward or whoever reads them; nulls are left out.
    """
    shape = find_shape(fields, wanted)
    given = {name: value for name, value in fields.items() if value is not None}
    return shape.name, {**given, **shape.read(given)}


def find_shape(fields: Fields, wanted: ShapeName | None = None) -> RecordFormat:
    """The shape that is wanted, or the first that fits."""
    return recognise(fields) if wanted is None else _find(fields, wanted)


def _find(fields: Fields, wanted: ShapeName) -> RecordFormat:
    for shape in (*SHAPES, _TEXT_AND_LABEL, _TEXT_AND_LABELS, _QUESTION):
        if shape.name == wanted and shape.fits(fields):
            return shape
    needs = " or ".join(" + ".join(shape.needs) for shape in SHAPES if shape.name == wanted)
    raise DataError(
        f"a record with the fields {seen(fields)} has not what data.format {wanted} needs: {needs}"
    )


def _conversation(fields: Fields) -> Fields:
    return {"messages": messages_of(fields, "messages"), **tools_of(fields)}


def _sharegpt(fields: Fields) -> Fields:
    return {"messages": turns_of(fields), **tools_of(fields)}


def _preference(fields: Fields) -> Fields:
    """All three as text, or all three as messages."""
    prompt, chosen, rejected = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            raise DataError("chosen and rejected are texts, and there is no prompt beside them")
        if isinstance(prompt, str):
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **tools_of(fields)}
    answers = [_as_messages(fields, name, role="assistant") for name in ("chosen", "rejected")]
    asked = None if prompt is None else _as_messages(fields, "prompt", role="user")
    prompt, chosen, rejected = split_pair(asked, *answers)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **tools_of(fields)}


def _as_messages(fields: Fields, name: str, *, role: str) -> list[Message]:
    if isinstance(fields[name], str):
        return [{"role": role, "content": fields[name]}]
    return messages_of(fields, name)


def _completion(fields: Fields) -> Fields:
    texts = {name: _string(fields, name) for name in ("prompt", "completion")}
    return {**texts, **tools_of(fields)}


def _alpaca(fields: Fields) -> Fields:
    """The instruction, an empty line and the input, where there is one, are the prompt."""
    for name in ("system", "history"):
        if fields.get(name):
            raise DataError(
                f"whet does not read the field {name} of Alpaca records",
                hint="write the record as messages: system, user and assistant, each with role and content",
            )
    prompt = _string(fields, "instruction")
    if fields.get("input"):
        prompt = f"{prompt}\n\n{_string(fields, 'input')}"
    return {"prompt": prompt, "completion": _string(fields, "output"), **tools_of(fields)}


def _labelled(fields: Fields) -> Fields:
    label = fields["label"]
    if not (isinstance(label, str) or _is_class_number(label)):
        raise DataError(
            f"label must be a name or a whole number from 0, not {_short(label)}",
            hint="soft targets are for objective.multi_label: labels, a number from 0 to 1 for each class"
            if isinstance(label, float)
            else None,
        )
    return {"input": _string(fields, "input"), "label": label}


def _multi_labelled(fields: Fields) -> Fields:
    labels = fields["labels"]
    names = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    numbers = isinstance(labels, list) and all(_is_class_number(label) for label in labels)
    soft = isinstance(labels, list) and all(_is_target(label) for label in labels)
    if not (names or numbers or soft):
        raise DataError(
            "labels must be a list of names, of whole numbers from 0, or of a number from 0 to 1 for each "
            f"class, not {_short(labels)}"
        )
    return {"input": _string(fields, "input"), "labels": labels}


def _is_class_number(label: Any) -> bool:  # Any: a JSON value
    return isinstance(label, int | float) and 0 <= label < 2**31 and label == int(label)


def _is_target(label: Any) -> bool:  # Any: a JSON value
    return isinstance(label, int | float) and 0 <= label <= 1


def _tabular(fields: Fields) -> Fields:
    target = fields["target"]
    several = isinstance(target, list)
    return {
        "features": _numbers(fields["features"], "feature"),
        "target": _numbers(target, "target") if several else number(target, "target"),
    }


def _numbers(values: Any, name: str) -> list[float]:  # Any: a JSON value
    if not isinstance(values, list) or not values:
        raise DataError(f"{name}s must be a list of numbers, not {_short(values)}")
    return [number(value, f"{name} {place}") for place, value in enumerate(values, start=1)]


def _distrust(fields: Fields) -> Fields:
    weight = number(fields["auth_weight"], "auth_weight")
    entropy = number(fields["prov_entropy"], "prov_entropy")
    if not 0 <= weight <= 0.99:
        raise DataError(f"auth_weight must be from 0 to 0.99, not {weight:g}")
    if entropy < 0:
        raise DataError(f"prov_entropy must not be negative, and is {entropy:g}")
    return {"text": _string(fields, "text"), "auth_weight": weight, "prov_entropy": entropy}


def _text(fields: Fields) -> Fields:
    for one, other in (("auth_weight", "prov_entropy"), ("prov_entropy", "auth_weight")):
        if fields.get(one) is not None and fields.get(other) is None:
            raise DataError(f"a text with {one} and without {other}", hint="give both, or neither")
    return {"text": _string(fields, "text")}


def _prompt(fields: Fields) -> Fields:
    prompt = fields["prompt"] if isinstance(fields["prompt"], str) else messages_of(fields, "prompt")
    return {"prompt": prompt, **tools_of(fields)}


def _question(fields: Fields) -> Fields:
    return {"prompt": _string(fields, "question"), **tools_of(fields)}


def _from_text(read: Callable[[Fields], Fields]) -> Callable[[Fields], Fields]:
    return lambda fields: read({**fields, "input": fields["text"]})


# The order is the order of recognition.
SHAPES = (
    RecordFormat("messages", ("messages",), _conversation, ("messages", "tools")),
    RecordFormat("messages", ("conversations",), _sharegpt, ("conversations", "system", "tools")),
    RecordFormat(
        "preference", ("chosen", "rejected"), _preference, ("prompt", "chosen", "rejected", "tools")
    ),
    RecordFormat("completion", ("prompt", "completion"), _completion, ("prompt", "completion", "tools")),
    RecordFormat(
        "completion", ("instruction", "output"), _alpaca, ("instruction", "input", "output", "tools")
    ),
    RecordFormat("classification", ("input", "label"), _labelled),
    RecordFormat("classification", ("input", "labels"), _multi_labelled),
    RecordFormat("tabular", ("features", "target"), _tabular),
    RecordFormat("distrust", ("text", "auth_weight", "prov_entropy"), _distrust, ("text",)),
    RecordFormat("text", ("text",), _text),
    RecordFormat("prompt", ("prompt",), _prompt, ("prompt", "tools")),
)
# Only where the config asks for classification: a text with a label beside it may as well be meant as text.
_TEXT_AND_LABEL = RecordFormat("classification", ("text", "label"), _from_text(_labelled))
_TEXT_AND_LABELS = RecordFormat("classification", ("text", "labels"), _from_text(_multi_labelled))
# Only where the config asks for prompts: what answers a question may have any name.
_QUESTION = RecordFormat("prompt", ("question",), _question, ("question", "tools"))

# What other tools call the fields of the shapes above; only for hints, since a guess may be wrong.
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


def _hint(fields: Fields) -> str:
    renamed = renaming_hint(fields, *_ALIASES)
    known = dict.fromkeys(" + ".join(shape.needs) for shape in SHAPES)
    return f"{renamed + '; ' if renamed else ''}known shapes: {'; '.join(known)}"


def renaming_hint(fields: Fields, *wanted: str) -> str:
    """Which fields to rename so that a record has the wanted ones; empty where none looks like them."""
    given = {name.lower(): name for name in fields}
    renamed = [
        f"{given[alias]} -> {name}"
        for name in wanted
        if name not in fields
        for alias in _ALIASES[name]
        if alias in given
    ]
    return f"rename the fields: {', '.join(renamed)}" if renamed else ""


def seen(fields: Fields) -> str:
    """The names of a record's fields, the first few of very many, cut where they are very long."""
    names = [repr(name[:40]) + (" (null)" if value is None else "") for name, value in fields.items()]
    return ", ".join([*names[:20], *(["..."] if len(names) > 20 else [])]) or "none"


def _string(fields: Fields, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(f"{name} must be a string, not {type(value).__name__}")
    return value


def number(value: Any, name: str) -> float:  # Any: a JSON value
    """A finite number."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or abs(value) > 1e300 or not math.isfinite(value):
        raise DataError(f"{name} must be a number, not {_short(value)}")
    return float(value)


def _short(value: Any) -> str:  # Any: a JSON value
    text = repr(value)
    return text if len(text) <= 50 else f"{text[:50]}..."
