"""Sources into token stores: tokenised once, found again the next time."""

import copy
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from whet.data.class_labels import Labels
from whet.data.sources.record_formats import number, seen
from whet.data.sources.source import REASONS_KEPT, Format, Record, Skipped, Source
from whet.data.tokens.chat_template import Renderer, Rendering, Supervise
from whet.data.tokens.examples import Example
from whet.data.tokens.field_audit import FieldAudit
from whet.data.tokens.token_store import TokenStore, open_store, write_store
from whet.data.tokens.tokenize import Encoder, Question
from whet.errors import DataError

log = logging.getLogger("whet")

VERSION = 6  # of what rendering and encoding make of a record: a change makes all stores new
_LABELS_VERSION = 1  # of what `Labels` makes of a record: 1 knows soft labels, which were bad records before
_CHUNK_RECORDS = 1000
_CHUNK_CHARACTERS = 300_000  # rendered at once: bounds memory, and is plenty for every thread


def encode_records(
    records: Iterable[Record], tokenizer: Any, *, supervise: Supervise = "assistant"
) -> list[Example]:
    """Records as examples in memory, for a loop of one's own. Any: a transformers tokenizer."""
    renderer, encoder = Renderer(tokenizer, supervise=supervise), Encoder(tokenizer)
    return [encoder.example(renderer.render(record)) for record in records]


@dataclass
class _Tally:
    """What is noted while a source is tokenised."""

    audit: FieldAudit
    skipped: Skipped = field(default_factory=Skipped)
    only_last: int = 0

    def notes(self, source: Source) -> dict[str, Any]:  # Any: JSON values
        both = [each for each in (source.skipped, self.skipped) if each.count]
        return {
            "skipped": sum(each.count for each in both),
            "reasons": [reason for each in both for reason in each.reasons][:REASONS_KEPT],
            "hint": both[0].hint if both else None,
            "only_last": self.only_last,
            "unread": self.audit.counts(),
        }


class Preparation:
    """How the records of a run become tokens: one tokenizer, one rule of what is learned."""

    def __init__(
        self,
        tokenizer: Any,  # Any: a transformers tokenizer
        *,
        cache: Path,
        supervise: Supervise = "assistant",
        skip_bad: bool = False,
        allow_empty: bool = False,
        pairs: bool = False,
        form: Format = "auto",
        labels: Labels | None = None,
        today: date | None = None,
    ) -> None:
        self.renderer = Renderer(tokenizer, supervise=supervise, allow_empty=allow_empty, today=today)
        self.encoder = Encoder(tokenizer)
        self.cache = cache
        self.skip_bad = skip_bad
        self.pairs = pairs  # two examples a record, a preferred answer and a worse one
        self.columns: tuple[str, ...] = ()  # fields whose numbers are kept beside the tokens
        self.form = form  # the shape that the sources were told to take records as
        self.labels = labels  # the classes that texts belong to, whose numbers come before the columns

    def keeping(self, columns: Sequence[str]) -> "Preparation":
        """The same, with these numbers of each record kept beside its tokens."""
        found = copy.copy(self)
        found.columns = tuple(columns)
        return found

    def store(self, source: Source) -> TokenStore:
        """The source's token store: the one that is there, or a new one.

        One that bad records were left out of serves only those who would leave them out, too.
        """
        directory = self.cache / self._key(source)
        found = open_store(directory)
        if found is not None and (self.skip_bad or not found.notes["skipped"]):
            log.info("%s: tokens from the store", source.name)
            return found
        tally = _Tally(FieldAudit(self.renderer))
        return write_store(
            directory,
            self._examples(source, tally),
            notes=lambda: {"source": source.name, **tally.notes(source)},
        )

    def questions(self, source: Source) -> list[Question]:
        """What the records with an answer ask."""
        found = []
        for record in source:
            try:
                asked = self.renderer.question(record)
                if asked is not None:
                    found.append(replace(self.encoder.question(asked), record=record.fields))
            except DataError:  # counted when the source was tokenised
                if not self.skip_bad:
                    raise
        return found

    def _key(self, source: Source) -> str:
        """A hash of everything the tokens depend on."""
        tokenizer = self.renderer.tokenizer
        parts = {
            "version": VERSION,
            "source": source.digest(),
            "name": source.name,  # origins carry it
            "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            "template": tokenizer.chat_template,
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "supervise": self.renderer.supervise,
            "allow_empty": self.renderer.allow_empty,
            "columns": self.columns,
            "pairs": self.pairs,
            "form": self.form,
        }
        if self.renderer.is_dated:
            parts["today"] = self.renderer.today.isoformat()
        if self.labels is not None:
            parts["labels"] = [self.labels.names, self.labels.multi_label, _LABELS_VERSION]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _examples(self, source: Source, tally: _Tally) -> Iterator[Example]:
        empty = True
        for chunk, encoded in self._encoded(source, tally):
            following = iter(encoded)
            for group in chunk:
                found = [next(following) for _ in group]
                bad = [example for example in found if isinstance(example, DataError)]
                if bad:
                    self._bad(bad[0], tally)
                    continue
                tally.only_last += group[0].only_last
                empty = False
                yield from (example for example in found if isinstance(example, Example))
        if empty:
            if tally.skipped.count:
                raise tally.skipped.as_error(source.name)
            raise DataError(f"{source.name} holds no record to learn from")

    def _encoded(
        self, source: Source, tally: _Tally
    ) -> Iterator[tuple[list[tuple[Rendering, ...]], list[Example | DataError]]]:
        """Chunks with their examples; one is tokenised while the next is read and rendered."""
        waiting: tuple[list[tuple[Rendering, ...]], list[Rendering], Future[list[Any]]] | None = None
        with ThreadPoolExecutor(max_workers=1) as worker:
            for chunk in itertools.chain(self._chunks(source, tally), [None]):
                ahead = None
                if chunk is not None:
                    texts = [rendering for group in chunk for rendering in group]
                    ahead = (chunk, texts, worker.submit(self.encoder.encodings, texts))
                if waiting is not None:
                    before, renderings, encodings = waiting
                    yield before, self.encoder.examples(renderings, encodings.result())
                waiting = ahead

    def _chunks(self, source: Source, tally: _Tally) -> Iterator[list[tuple[Rendering, ...]]]:
        """The texts of some records at a time."""
        chunk: list[tuple[Rendering, ...]] = []
        characters = 0
        for record in source:
            if record.shape:
                tally.audit.add(record)
            group = self._renderings(record, tally)
            if not group:
                continue
            chunk.append(group)
            characters += sum(len(rendering.text) for rendering in group)
            if len(chunk) >= _CHUNK_RECORDS or characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def _renderings(self, record: Record, tally: _Tally) -> tuple[Rendering, ...]:
        try:
            values = self._values(record)
            group = self._group(record)
        except DataError as error:
            self._bad(error, tally)
            return ()
        return tuple(replace(rendering, values=values) for rendering in group)

    def _group(self, record: Record) -> tuple[Rendering, ...]:
        if self.pairs:
            return self.renderer.pair(record)
        return (self.renderer.render(record) if self.labels is None else self.renderer.judged(record),)

    def _values(self, record: Record) -> tuple[float, ...]:
        numbers = tuple(_number(record, name) for name in self.columns)
        return self._classes(record) + numbers

    def _classes(self, record: Record) -> tuple[float, ...]:
        if self.labels is None or record.shape not in (None, "classification"):
            return ()  # `judged` refuses other shapes
        try:
            return self.labels.values(record.fields)
        except DataError as error:
            raise DataError(f"{record.origin}: {error.message}", hint=error.hint) from None

    def _bad(self, error: DataError, tally: _Tally) -> None:
        if not self.skip_bad:
            raise error
        tally.skipped.add(error)


def _number(record: Record, name: str) -> float:
    try:
        return number(record.fields.get(name), name)
    except DataError as error:
        why = "" if name in record.fields else f": there is no such field, only {seen(record.fields)}"
        raise DataError(f"{record.origin}: {error.message}{why}") from None
