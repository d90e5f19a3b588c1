"""What a record says, in one form for all record formats: turns of a role and a text."""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from whet.data.sources.chat_messages import Message
from whet.data.sources.record_formats import is_record
from whet.data.sources.source import Record, validate_record

CONTEXT, PROMPT, ANSWER, LABEL = "context", "prompt", "answer", "label"
# the part of a record to which a role belongs; user, tool and all others belong to the prompt
_PART_OF_ROLE = {
    "system": CONTEXT,
    "developer": CONTEXT,
    "tools": CONTEXT,
    "assistant": ANSWER,
    "chosen": "chosen",
    "rejected": "rejected",
    "label": LABEL,
}


class Turn(NamedTuple):
    """One text of a record. The role of a field that is not a message is its name."""

    role: str
    text: str


def record_turns(record: Record) -> list[Turn]:
    """Return the turns of a record that is not validated yet; a record of no format is one turn.

    Fields that the format does not read, such as ids, are left out.

    Raises:
        DataError: The record has a format but violates it.
    """
    if not is_record(record.fields):
        return [Turn("text", " ".join(iter_strings(record.fields)))]
    record = validate_record(record)
    fields = record.fields
    match record.record_format:
        case "messages":
            turns = _message_turns(fields["messages"])
        case "completion":
            turns = [Turn("user", fields["prompt"]), Turn("assistant", fields["completion"])]
        case "preference":
            sides = (Turn(name, _to_text(fields[name])) for name in ("chosen", "rejected"))
            turns = [*_prompt_turns(fields["prompt"]), *sides]
        case "prompt":
            answer = fields.get("answer")
            turns = _prompt_turns(fields["prompt"])
            turns += [] if answer is None else [Turn("label", _to_text(answer))]
        case "classification":
            label = fields.get("label", fields.get("labels"))
            turns = [Turn("user", fields["input"]), Turn("label", _to_json(label))]
        case "tokens":
            ids = " ".join(map(str, fields["input_ids"]))
            turns = [Turn("text", ids), Turn("label", _to_json(fields["labels"]))]
        case "tabular":
            turns = [Turn("label", _to_json([fields["features"], fields["target"]]))]
        case _:
            turns = [Turn("text", fields["text"])]
    tools = [Turn("tools", _to_json(fields["tools"]))] if fields.get("tools") else []
    judged = [Turn("label", _to_json(fields["label"]))] if isinstance(fields.get("label"), bool) else []
    return [*tools, *turns, *judged]


def _prompt_turns(prompt: str | Sequence[Message]) -> list[Turn]:
    return [Turn("user", prompt)] if isinstance(prompt, str) else _message_turns(prompt)


def _message_turns(messages: Sequence[Message]) -> list[Turn]:
    turns = []
    for message in messages:
        other = {name: value for name, value in message.items() if name not in ("role", "content")}
        texts = [message.get("content") or "", *([_to_json(other)] if other else [])]
        turns.append(Turn(message["role"], "\n".join(texts)))
    return turns


def _to_text(value: Any) -> str:  # Any: a JSON value
    return value if isinstance(value, str) else _to_json(value)


def _to_json(value: Any) -> str:  # Any: a JSON value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def normalize_text(text: str) -> str:
    """Return a text in Unicode normalization form C, with each run of white space as one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def exact_key(turns: Sequence[Turn]) -> bytes:
    """Return a 128-bit hash of the roles and normalized texts of a record."""
    texts = _to_json([[turn.role, normalize_text(turn.text)] for turn in turns])
    return hashlib.blake2b(texts.encode(errors="surrogatepass"), digest_size=16).digest()


def split_parts(turns: Sequence[Turn]) -> dict[str, str]:
    """Return the texts of a record by part: context (system prompt and tools), prompt, answer, and others."""
    parts: dict[str, list[str]] = {}
    for turn in turns:
        parts.setdefault(_PART_OF_ROLE.get(turn.role, PROMPT), []).append(turn.text)
    return {name: "\n".join(texts) for name, texts in parts.items()}


def record_texts(records: Iterable[Record]) -> Iterator[str]:
    """Yield the text of each record: all strings of its fields but roles, in order."""
    for record in records:
        yield " ".join(iter_strings(record.fields))


def iter_strings(value: Any) -> Iterator[str]:  # Any: JSON values
    """Yield all strings of a JSON value but roles, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name != "role":  # it would interrupt a text that continues in the next message
                yield from iter_strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from iter_strings(each)
