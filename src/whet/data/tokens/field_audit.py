"""Count the fields of records and messages that are not tokenized, while records are rendered."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from whet.data.sources.chat_messages import MESSAGE_LISTS, without_fields
from whet.data.sources.message_weights import MARKS
from whet.data.sources.source import Record
from whet.data.tokens.chat_template import Renderer
from whet.errors import DataError

Unread = Mapping[str, Mapping[str, int]]  # for "record" and "message": field -> number of records

_TESTED_RECORDS = 32  # records to test before the result for a field is assumed for all others
_MAX_REPORTED = 20  # fields
_STANDARD_MESSAGE_FIELDS = frozenset(("role", "content")) | MARKS  # read by every template or the loss


@dataclass
class _TestResults:
    """How often the content of a field was tokenized, among the records tested."""

    reached: int = 0
    left_out: int = 0

    @property
    def settled(self) -> bool | None:
        """Whether the field is tokenized, or None until enough records agree."""
        if self.reached + self.left_out < _TESTED_RECORDS or (self.reached and self.left_out):
            return None
        return bool(self.reached)


@dataclass
class FieldAudit:
    """Count the records with a field that is not tokenized.

    The fields that a record format ignores are known. Whether a template writes `tools` or a message field is
    tested by rendering records without it: the first ones that have the field, or all if the results differ.
    """

    renderer: Renderer
    _record: Counter[str] = field(default_factory=Counter)
    _message: Counter[str] = field(default_factory=Counter)
    _test_results: dict[str, _TestResults] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Inspect one more record, whose format is known."""
        fields = record.fields
        self._record.update(name for name in record.unread_fields if not _is_empty(fields[name]))
        if not _is_empty(fields.get("tools")) and "tools" not in record.unread_fields:
            self._record.update(() if self._reaches("tools", record) else ("tools",))
        names = dict.fromkeys(
            name
            for key in MESSAGE_LISTS
            for message in _messages(fields.get(key))
            for name, value in message.items()
            if name not in _STANDARD_MESSAGE_FIELDS and not _is_empty(value)
        )
        self._message.update(name for name in names if not self._reaches(name, record))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of records per field that was not tokenized."""
        return {"record": dict(self._record), "message": dict(self._message)}

    def _reaches(self, name: str, record: Record) -> bool:
        results = self._test_results.setdefault(name, _TestResults())
        if results.settled is not None:
            return results.settled
        try:
            texts = self.renderer.render_chats(record)
        except DataError:  # reported elsewhere as a bad record
            return True
        if not texts:  # no chat template is used
            return False
        try:
            reached = (
                self.renderer.render_chats(replace(record, fields=without_fields(record.fields, {name})))
                != texts
            )
        except DataError:  # the template requires the field
            reached = True
        results.reached += reached
        results.left_out += not reached
        return reached


def unread_fields(unread: Unread, *, used: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """Yield a message and a fix for each field that is not tokenized and not used otherwise.

    Args:
        unread: The fields that are not tokenized, from `FieldAudit.counts`.
        used: Record fields that are read for other purposes; None means that all of them are.
    """
    record_fields = {} if used is None else unread.get("record", {})
    tools = unread.get("record", {}) if used is None else {}
    entries = [
        *((name, "field", count) for name, count in record_fields.items() if name not in (used or ())),
        *((name, "field", count) for name, count in tools.items() if name == "tools"),
        *((name, "message field", count) for name, count in unread.get("message", {}).items()),
    ]
    for name, kind, count in entries[:_MAX_REPORTED]:
        fix = (
            "the chat template does not write it; use a model whose template does"
            if kind == "message field" or name == "tools"
            else "no component reads this field"
        )
        yield (
            f"{kind} {name[:40]} of {count:,} record{'s' * (count != 1)} is not tokenized",
            f"{fix}; set data.ignore to [{name[:40]}] if you do not need it",
        )
    if len(entries) > _MAX_REPORTED:
        yield (
            f"{len(entries) - _MAX_REPORTED:,} more fields are not tokenized",
            "list the fields that you do not need in data.ignore",
        )


def _messages(value: Any) -> list[dict[str, Any]]:  # Any: JSON values
    return value if isinstance(value, list) else []


def _is_empty(value: Any) -> bool:  # Any: a JSON value
    return value is None or value in ("", [], {})
