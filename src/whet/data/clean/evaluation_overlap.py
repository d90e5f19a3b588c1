"""Training records that repeat evaluation records: the same question, or a long common sequence of words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from whet.data.clean.record_turns import (
    CONTEXT,
    LABEL,
    PROMPT,
    Turn,
    normalize_text,
    record_turns,
    split_parts,
)
from whet.data.clean.word_ngrams import DEFAULT_NGRAM, NgramIndex, hash_text, split_words
from whet.data.sources.source import Record
from whet.errors import check_positive


class EvaluationOverlap(NamedTuple):
    """An evaluation record that a training record repeats, and what they have in common."""

    record: int
    text: str


class EvaluationIndex:
    """Evaluation records, to find the training records that repeat one of them.

    A record repeats an evaluation record if they share an n-gram of words, or ask the same question. System
    prompts and tools do not count: they are the same in most records of a data set.

    Args:
        records: The evaluation records, not validated yet.
        ngram: The number of words that make an overlap.
    """

    def __init__(self, records: Iterable[Record], *, ngram: int = DEFAULT_NGRAM) -> None:
        check_positive(ngram=ngram)
        self.origins: list[str] = []
        self._questions: dict[int, int] = {}
        self._index = NgramIndex(self._read(records), ngram, short_items=False)

    def _read(self, records: Iterable[Record]) -> Iterator[list[str]]:
        for index, record in enumerate(records):
            parts = split_parts(record_turns(record))
            if question := _question(parts):
                self._questions.setdefault(hash_text(question), index)
            self.origins.append(record.origin)
            yield _words(parts)

    def search(self, turns: Sequence[Turn]) -> EvaluationOverlap | None:
        """Return the first evaluation record that a training record repeats, or None."""
        parts = split_parts(turns)
        question = _question(parts)
        if question and (index := self._questions.get(hash_text(question))) is not None:
            return EvaluationOverlap(index, question)
        words = _words(parts)
        match = next(self._index.search(words), None)
        if match is None:
            return None
        return EvaluationOverlap(match.item, " ".join(words[match.start : match.start + match.size]))


def _question(parts: Mapping[str, str]) -> str:
    return normalize_text(parts.get(PROMPT, "")).casefold()


def _words(parts: Mapping[str, str]) -> list[str]:
    texts = (text for name, text in parts.items() if name not in (CONTEXT, LABEL))
    return split_words("\n".join(texts))
