"""Tokenize sources into token stores, or reuse the stores of earlier runs."""

import copy
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config.data import Format
from whet.data.sources.record_formats import describe_fields, require_number
from whet.data.sources.source import MAX_REASONS, Record, Skipped, Source, validate_record
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.examples import Example
from whet.data.tokens.field_audit import FieldAudit
from whet.data.tokens.loss_mask import Supervise, Turns
from whet.data.tokens.rendering import Rendering
from whet.data.tokens.token_store import TokenBuffer, TokenStore, open_store, write_store
from whet.data.tokens.tokenize import Encoder, Question, render_tokens
from whet.errors import DataError

if TYPE_CHECKING:
    from whet.data.class_labels import ClassLabels

log = logging.getLogger("whet")

VERSION = 9  # of rendering and encoding; a new version invalidates all stores
_LABELS_VERSION = 1  # of `ClassLabels`; 1 supports soft labels, which were bad records before
_CHUNK_RECORDS = 1000
_CHUNK_CHARACTERS = 300_000  # per chunk: bounds memory, and is enough to occupy all threads


def encode_records(
    records: Iterable[Record],
    tokenizer: Any,
    *,
    supervise: Supervise = "assistant",
    turns: Turns = "auto",
) -> list[Example]:
    """Tokenize records into examples in memory, for custom training loops.

    Args:
        records: The records, for example from `open_source`.
        tokenizer: A fast transformers tokenizer.
        supervise: Which tokens are supervised: `assistant`, `last`, `all`, `completion` or a list of roles.
        turns: The examples of a conversation whose earlier turns the chat template rewrites: `auto` (as few
            as possible), `last` (the last turn only) or `each` (one per turn).

    Returns:
        One example per record, or several of a conversation whose earlier turns the template rewrites. Each
        has token ids, a loss mask and, if the record has any, loss weights.

    Raises:
        DataError: A record cannot be rendered, or has no supervised token.
    """
    renderer, encoder = Renderer(tokenizer, supervise=supervise, turns=turns), Encoder(tokenizer)
    return [encoder.encode_one(each) for record in records for each in _render(renderer, record)]


def _render(renderer: Renderer, record: Record) -> tuple[Rendering, ...]:
    """Return the texts of a record, or its token ids if it is already tokenized."""
    record = record if record.record_format else validate_record(record)
    if record.record_format == "tokens":
        return (render_tokens(record, supervise=renderer.supervise),)
    return renderer.render_turns(record)


@dataclass
class _Tally:
    """Counts collected while a source is tokenized."""

    audit: FieldAudit
    skipped: Skipped = field(default_factory=Skipped)
    only_last: int = 0  # conversations of which only the last turn is supervised
    split: int = 0  # conversations with several examples
    turn_examples: int = 0  # the examples of these
    lost_turns: int = 0  # turns that are not supervised, because they cannot follow their prompt

    def add(self, group: Sequence[Rendering], *, pairs: bool) -> None:
        """Count the examples of one record."""
        self.only_last += group[0].only_last
        self.lost_turns += sum(rendering.lost_turns for rendering in group)
        if len(group) > 1 and not pairs:
            self.split += 1
            self.turn_examples += len(group)

    def notes(self, unreadable: Skipped) -> dict[str, Any]:  # Any: JSON values
        skipped = [part for part in (unreadable, self.skipped) if part.count]
        return {
            "skipped": sum(part.count for part in skipped),
            "reasons": [reason for part in skipped for reason in part.reasons][:MAX_REASONS],
            "hint": skipped[0].hint if skipped else None,
            "only_last": self.only_last,
            "split": self.split,
            "turn_examples": self.turn_examples,
            "lost_turns": self.lost_turns,
            "unread": self.audit.counts(),
        }


class Preparation:
    """Tokenize the records of a run with one tokenizer and one rule for the loss mask."""

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
        labels: "ClassLabels | None" = None,
        today: date | None = None,
        weights: bool = True,
        template_args: Mapping[str, Any] | None = None,  # Any: JSON values
        supervise_thinking: bool = True,
        turns: Turns = "auto",
    ) -> None:
        self.renderer = Renderer(
            tokenizer,
            supervise=supervise,
            allow_empty=allow_empty,
            today=today,
            template_args=template_args,
            supervise_thinking=supervise_thinking,
            turns=turns,
        )
        self.encoder = Encoder(tokenizer)
        self.cache = cache
        self.skip_bad = skip_bad
        self.pairs = pairs  # two examples per record: chosen and rejected
        self.columns: tuple[str, ...] = ()  # numeric fields stored with the tokens
        self.form = form  # the record format that the sources require
        self.allow_weights = weights  # whether the objective uses loss weights
        self.labels = labels  # the classes of a classifier; label values are stored before the columns

    def with_columns(self, columns: Sequence[str]) -> "Preparation":
        """Return a copy that stores these numeric fields of each record with its tokens."""
        copied = copy.copy(self)
        copied.columns = tuple(columns)
        return copied

    def store(self, source: Source) -> TokenStore:
        """Return the token store of a source: an existing one, or a new one.

        A store without its bad records is only reused if bad records are to be skipped.
        """
        directory = self.cache / self._key(source)
        existing = open_store(directory)
        if existing is not None and self._can_use(existing):
            log.info("%s: using cached tokens", source.name)
            return existing
        tally = _Tally(FieldAudit(self.renderer))
        return write_store(
            directory,
            self._examples(source, tally),
            notes=lambda: {"source": source.name, **tally.notes(source.skipped)},
        )

    def buffer(
        self, records: Iterable[Record | DataError], *, name: str, carried: Sequence[Example] = ()
    ) -> TokenBuffer:
        """Tokenize records of a stream into memory.

        Args:
            records: The records, or the errors of those that cannot be read.
            name: The name of the source.
            carried: Examples that come first, because the previous block left them over.
        """
        tally = _Tally(FieldAudit(self.renderer))

        def readable() -> Iterator[Record]:
            for record in records:
                if isinstance(record, Record):
                    yield record
                else:
                    self._handle_bad_record(record, tally)

        return TokenBuffer(
            itertools.chain(carried, self._encode(readable(), tally)),
            notes=lambda: {"source": name, **tally.notes(Skipped())},
        )

    def _can_use(self, store: TokenStore) -> bool:
        # the error for a weight is raised while its record is rendered
        return (self.skip_bad or not store.notes["skipped"]) and (self.allow_weights or not store.has_weights)

    def questions(self, source: Source) -> list[Question]:
        """Return the prompts of all records that have an answer."""
        questions = []
        for record in source:
            try:
                is_tokenized = record.record_format == "tokens"
                prompt = None if is_tokenized else self.renderer.render_question(record)
                if prompt is not None:
                    questions.append(replace(self.encoder.encode_question(prompt), record=record.fields))
            except DataError:  # counted when the source was tokenized
                if not self.skip_bad:
                    raise
        return questions

    def _key(self, source: Source) -> str:
        """Return a hash of everything the tokens depend on."""
        tokenizer, template = self.renderer.tokenizer, self.renderer.template
        parts = {
            "version": VERSION,
            "source": source.digest(),
            "name": source.name,  # part of the origins
            "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            "template": tokenizer.chat_template,
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "supervise": self.renderer.supervise,
            "allow_empty": self.renderer.allow_empty,
            "template_args": template.arguments,
            "supervise_thinking": self.renderer.conversations.supervise_thinking,
            "turns": self.renderer.conversations.turns,
            "columns": self.columns,
            "pairs": self.pairs,
            "form": self.form,
        }
        if template.is_dated:
            parts["today"] = template.today.isoformat()
        if self.labels is not None:
            parts["labels"] = [self.labels.names, self.labels.multi_label, _LABELS_VERSION]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _examples(self, source: Source, tally: _Tally) -> Iterator[Example]:
        empty = True
        for example in self._encode(source, tally):
            empty = False
            yield example
        if empty:
            if tally.skipped.count:
                raise tally.skipped.as_error(source.name)
            raise DataError(f"{source.name} contains no record to train on")

    def _encode(self, records: Iterable[Record], tally: _Tally) -> Iterator[Example]:
        for chunk, encoded in self._encode_chunks(records, tally):
            remaining = iter(encoded)
            for group in chunk:
                examples = [next(remaining) for _ in group]
                errors = [example for example in examples if isinstance(example, DataError)]
                if errors:
                    self._handle_bad_record(errors[0], tally)
                    continue
                tally.add(group, pairs=self.pairs)
                yield from (example for example in examples if isinstance(example, Example))

    def _encode_chunks(
        self, records: Iterable[Record], tally: _Tally
    ) -> Iterator[tuple[list[tuple[Rendering, ...]], list[Example | DataError]]]:
        """Yield chunks with their examples. One chunk is tokenized while the next one is rendered."""
        pending: tuple[list[tuple[Rendering, ...]], list[Rendering], Future[list[Any]]] | None = None
        with ThreadPoolExecutor(max_workers=1) as worker:
            for chunk in itertools.chain(self._render_chunks(records, tally), [None]):
                submitted = None
                if chunk is not None:
                    texts = [rendering for group in chunk for rendering in group]
                    submitted = (chunk, texts, worker.submit(self.encoder.tokenize_batch, texts))
                if pending is not None:
                    previous, renderings, encodings = pending
                    yield previous, self.encoder.to_examples(renderings, encodings.result())
                pending = submitted

    def _render_chunks(
        self, records: Iterable[Record], tally: _Tally
    ) -> Iterator[list[tuple[Rendering, ...]]]:
        """Yield the rendered texts of several records at a time."""
        chunk: list[tuple[Rendering, ...]] = []
        characters = 0
        for record in records:
            if record.record_format:
                tally.audit.add(record)
            group = self._render_record(record, tally)
            if not group:
                continue
            chunk.append(group)
            characters += sum(len(rendering.text) for rendering in group)
            if len(chunk) >= _CHUNK_RECORDS or characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def _render_record(self, record: Record, tally: _Tally) -> tuple[Rendering, ...]:
        try:
            values = self._column_values(record)
            group = self._render_group(record)
        except DataError as error:
            self._handle_bad_record(error, tally)
            return ()
        if not self.allow_weights and any(rendering.weights for rendering in group):
            raise unused_weight_error(record)  # not a bad record: the objective is not for these records
        return tuple(replace(rendering, values=values) for rendering in group)

    def _render_group(self, record: Record) -> tuple[Rendering, ...]:
        if self.pairs:
            return self.renderer.render_pair(record)
        if self.labels is not None:
            return (self.renderer.render_classification(record),)
        return _render(self.renderer, record)

    def _column_values(self, record: Record) -> tuple[float, ...]:
        columns = tuple(_require_column(record, name) for name in self.columns)
        return self._label_values(record) + columns

    def _label_values(self, record: Record) -> tuple[float, ...]:
        if self.labels is None or record.record_format not in (None, "classification"):
            return ()  # `render_classification` rejects other formats
        try:
            return self.labels.label_values(record.fields)
        except DataError as error:
            raise DataError(f"{record.origin}: {error.message}", hint=error.hint) from None

    def _handle_bad_record(self, error: DataError, tally: _Tally) -> None:
        if not self.skip_bad:
            raise error
        tally.skipped.add(error)


def unused_weight_error(record: Record) -> DataError:
    """Return the error for a record with loss weights, for objectives that would ignore them."""
    return DataError(
        f"{record.origin}: the record or one of its messages has a weight, which this objective cannot use",
        hint="use objective.kind: sft or mtp, weights of 0 and 1 on messages only, or set data.ignore to "
        "[weight]",
    )


def _require_column(record: Record, name: str) -> float:
    try:
        return require_number(record.fields.get(name), name)
    except DataError as error:
        reason = (
            "" if name in record.fields else f"; the record has the fields {describe_fields(record.fields)}"
        )
        raise DataError(f"{record.origin}: {error.message}{reason}") from None
