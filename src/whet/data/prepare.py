"""Sources into token stores: tokenised once, found again the next time."""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.data.encode import Encoder, Question
from whet.data.examples import Example
from whet.data.render import Renderer, Rendering, Supervise
from whet.data.sources import REASONS_KEPT, Format, Record, Skipped, Source
from whet.data.store import TokenStore, open_store, write_store
from whet.errors import DataError

log = logging.getLogger("whet")

VERSION = 2  # of what rendering and encoding make of a record: a change makes all stores new
_CHUNK_RECORDS = 2000
_CHUNK_CHARACTERS = 1_000_000  # rendered at once: bounds memory, and is plenty for every thread


def encode_records(
    records: Iterable[Record], tokenizer: Any, *, supervise: Supervise = "assistant"
) -> list[Example]:
    """Records as examples in memory, for a loop of one's own. Any: a transformers tokenizer."""
    renderer, encoder = Renderer(tokenizer, supervise=supervise), Encoder(tokenizer)
    return [encoder.example(renderer.render(record)) for record in records]


class Preparation:
    """How the records of a run become tokens: one tokenizer, one rule of what is learned."""

    def __init__(
        self,
        tokenizer: Any,  # Any: a transformers tokenizer
        *,
        cache: Path,
        supervise: Supervise = "assistant",
        skip_bad: bool = False,
        score: str | None = None,
        form: Format = "auto",
    ) -> None:
        self.renderer = Renderer(tokenizer, supervise=supervise)
        self.encoder = Encoder(tokenizer)
        self.cache = cache
        self.skip_bad = skip_bad
        self.score = score  # the field that says how hard a record is
        self.form = form  # the shape that the sources were told to take records as

    def store(self, source: Source) -> TokenStore:
        """The source's token store: the one that is there, or a new one.

        One that bad records were left out of serves only those who would leave them out, too.
        """
        directory = self.cache / self._key(source)
        found = open_store(directory)
        if found is not None and (self.skip_bad or not found.notes["skipped"]):
            log.info("%s: tokens from the store", source.name)
            return found
        skipped, notes = Skipped(), {"only_last": 0}
        examples = self._examples(source, skipped, notes)
        return write_store(directory, examples, notes=lambda: self._notes(source, skipped, notes))

    def _notes(self, source: Source, skipped: Skipped, notes: dict[str, int]) -> dict[str, Any]:  # Any: JSON
        reasons = [*source.skipped.reasons, *skipped.reasons]
        return {
            "source": source.name,
            "skipped": source.skipped.count + skipped.count,
            "reasons": reasons[:REASONS_KEPT],
            **notes,
        }

    def questions(self, source: Source) -> list[Question]:
        """What the records with an answer ask."""
        found = []
        for record in source:
            try:
                asked = self.renderer.question(record)
                if asked is not None:
                    found.append(self.encoder.question(asked))
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
            "score": self.score,
            "form": self.form,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _examples(self, source: Source, skipped: Skipped, notes: dict[str, int]) -> Iterator[Example]:
        empty = True
        for renderings in self._chunks(source, skipped):
            for rendering, found in zip(renderings, self.encoder.encode(renderings), strict=True):
                if isinstance(found, DataError):
                    self._bad(found, skipped)
                    continue
                notes["only_last"] += rendering.only_last
                empty = False
                yield found
        if empty:
            raise DataError(f"{source.name} holds no record to learn from", hint=skipped.summary())

    def _chunks(self, source: Source, skipped: Skipped) -> Iterator[list[Rendering]]:
        chunk: list[Rendering] = []
        characters = 0
        for record in source:
            rendering = self._rendering(record, skipped)
            if rendering is None:
                continue
            chunk.append(rendering)
            characters += len(rendering.text)
            if len(chunk) >= _CHUNK_RECORDS or characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def _rendering(self, record: Record, skipped: Skipped) -> Rendering | None:
        try:
            return replace(self.renderer.render(record), score=self._score(record))
        except DataError as error:
            self._bad(error, skipped)
            return None

    def _score(self, record: Record) -> float:
        if self.score is None:
            return 0.0
        value = record.fields.get(self.score)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"{record.origin}: {self.score} must be a number, not {value!r}")
        return float(value)

    def _bad(self, error: DataError, skipped: Skipped) -> None:
        if not self.skip_bad:
            raise error
        skipped.add(error)
