"""Fields of records and messages of which no token is made, counted while records are rendered."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from whet.data.sources.chat_messages import MESSAGE_LISTS, without_fields
from whet.data.sources.source import Record
from whet.data.tokens.chat_template import Renderer
from whet.errors import DataError

Unread = Mapping[str, Mapping[str, int]]  # of "record" and "message": how many records have which field

_TESTED = 32  # records after which a field that always, or never, reached a token is taken to go on so
_SHOWN = 20  # fields
_OF_MESSAGES = frozenset(("role", "content", "train"))  # what every template, or the loss mask, reads


@dataclass
class _Verdicts:
    """Whether a field reached a token, for the records that were tested."""

    reached: int = 0
    left_out: int = 0

    @property
    def settled(self) -> bool | None:
        """The verdict, where enough records agree on it."""
        if self.reached + self.left_out < _TESTED or (self.reached and self.left_out):
            return None
        return bool(self.reached)


@dataclass
class FieldAudit:
    """Counts the records with a field that reaches no token.

    What a shape does not read is known beforehand. Whether a template writes `tools` or a field of messages
    is found by rendering records without it: the first ones that have it, or all where the verdicts differ.
    """

    renderer: Renderer
    _record: Counter[str] = field(default_factory=Counter)
    _message: Counter[str] = field(default_factory=Counter)
    _verdicts: dict[str, _Verdicts] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Look at one more record, whose shape is known."""
        fields = record.fields
        self._record.update(name for name in record.unread if not _is_empty(fields[name]))
        if not _is_empty(fields.get("tools")) and "tools" not in record.unread:
            self._record.update(() if self._reaches("tools", record) else ("tools",))
        names = dict.fromkeys(
            name
            for key in MESSAGE_LISTS
            for message in _messages(fields.get(key))
            for name, value in message.items()
            if name not in _OF_MESSAGES and not _is_empty(value)
        )
        self._message.update(name for name in names if not self._reaches(name, record))

    def counts(self) -> dict[str, dict[str, int]]:
        """How many records have each field that reached no token."""
        return {"record": dict(self._record), "message": dict(self._message)}

    def _reaches(self, name: str, record: Record) -> bool:
        verdicts = self._verdicts.setdefault(name, _Verdicts())
        if verdicts.settled is not None:
            return verdicts.settled
        try:
            texts = self.renderer.chats(record)
        except DataError:  # a bad record, which is reported as such
            return True
        if not texts:  # no template is used
            return False
        try:
            reached = (
                self.renderer.chats(replace(record, fields=without_fields(record.fields, {name}))) != texts
            )
        except DataError:  # the template asks for it
            reached = True
        verdicts.reached += reached
        verdicts.left_out += not reached
        return reached


def unread_fields(unread: Unread, *, used: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """For each field that reaches no token and nothing else uses, what is wrong and what to do.

    `used`: fields of records that are read beside the tokens; None: all of them are.
    """
    of_record = {} if used is None else unread.get("record", {})
    tools = unread.get("record", {}) if used is None else {}
    entries = [
        *((name, "field", count) for name, count in of_record.items() if name not in (used or ())),
        *((name, "field", count) for name, count in tools.items() if name == "tools"),
        *((name, "message field", count) for name, count in unread.get("message", {}).items()),
    ]
    for name, kind, count in entries[:_SHOWN]:
        fix = (
            "the chat template does not write it: use a model whose template does"
            if kind == "message field" or name == "tools"
            else "nothing reads a field of this name"
        )
        yield (
            f"{kind} {name[:40]} of {count:,} record{'s' * (count != 1)} reaches no token",
            f"{fix}; set data.ignore to [{name[:40]}] if it is not needed",
        )
    if len(entries) > _SHOWN:
        yield (
            f"{len(entries) - _SHOWN:,} more fields reach no token",
            "list fields that are not needed in data.ignore",
        )


def _messages(value: Any) -> list[dict[str, Any]]:  # Any: JSON values
    return value if isinstance(value, list) else []


def _is_empty(value: Any) -> bool:  # Any: a JSON value
    return value is None or value in ("", [], {})
