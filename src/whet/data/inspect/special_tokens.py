"""Special tokens that are typed in texts, and markers of chats that a tokenizer splits into pieces."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from whet.data.clean.record_turns import iter_strings
from whet.data.sources.source import Record
from whet.data.tokens.tokenize import special_tokens

_MARKER = r"<\|[^\s|<>]{1,40}\|>|<(?:start|end)_of_turn>"
# some models write roles as plain text by design, such as Zephyr
_PLAIN_ROLES = ("<|user|>", "<|assistant|>", "<|system|>")


@dataclass(frozen=True)
class MarkerUse:
    """A marker such as `<|im_end|>` in the texts of records."""

    marker: str
    tokens: int  # 1: it becomes the special token; more: it is split into ordinary tokens
    records: int
    first: str  # the origin of the first of them


@dataclass
class MarkerCounter:
    """Counts the markers and special tokens in the texts of records.

    Attributes:
        tokenizer: The tokenizer of the model.
        formats: The number of records of each format.
    """

    tokenizer: Any  # Any: a transformers tokenizer
    formats: Counter[str] = field(default_factory=Counter)
    _counts: Counter[str] = field(default_factory=Counter)
    _first: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        special = sorted(filter(str.strip, special_tokens(self.tokenizer)), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, special), _MARKER]))

    def add(self, record: Record) -> None:
        """Count a record, and the markers in the fields that its format reads.

        A special token in plain text is left out: such texts often are chats that were rendered before.
        """
        self.formats[str(record.record_format)] += 1
        is_text = record.record_format in ("text", "distrust")
        fields = {name: value for name, value in record.fields.items() if name not in record.unread_fields}
        markers = {marker for text in iter_strings(fields) for marker in self._pattern.findall(text)}
        for marker in sorted(markers):
            if is_text and count_tokens(self.tokenizer, marker) == 1:
                continue
            self._counts[marker] += 1
            self._first.setdefault(marker, record.origin)

    def uses(self) -> tuple[MarkerUse, ...]:
        """Return the markers, the most frequent first."""
        return tuple(
            MarkerUse(marker, count_tokens(self.tokenizer, marker), count, self._first[marker])
            for marker, count in self._counts.most_common()
        )


def count_markers(
    records: Iterable[Record], tokenizer: Any
) -> MarkerCounter:  # Any: a transformers tokenizer
    """Return the formats and markers of records."""
    counter = MarkerCounter(tokenizer)
    for record in records:
        counter.add(record)
    return counter


def split_template_markers(template: str, tokenizer: Any, *, is_own: bool) -> dict[str, int]:
    """Return the markers in a chat template that are not single tokens, and how many tokens they are.

    Args:
        template: The source of the template.
        tokenizer: The tokenizer of the model. Any: a transformers tokenizer.
        is_own: Whether it is the template of the model, which may write roles as plain text.
    """
    markers = dict.fromkeys(re.findall(_MARKER, template))
    pieces = {marker: count_tokens(tokenizer, marker) for marker in markers}
    return {
        marker: count
        for marker, count in pieces.items()
        if count > 1 and not (is_own and marker in _PLAIN_ROLES)
    }


def count_tokens(tokenizer: Any, text: str) -> int:  # Any: a transformers tokenizer
    """Return the number of tokens of a text, without the tokens that the tokenizer adds around it."""
    return len(tokenizer.encode(text, add_special_tokens=False))
