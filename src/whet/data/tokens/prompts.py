"""Prompts to complete: what stands before the answer in any record, with the record itself for who judges."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from whet.data.sources.source import Skipped, Source
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.field_audit import FieldAudit, Unread
from whet.data.tokens.tokenize import Encoder, Question
from whet.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """A question, its answer empty where the record has none, and the fields of the record."""

    question: Question
    fields: dict[str, Any]  # Any: JSON values

    @property
    def tokens(self) -> list[int]:
        """What the model reads."""
        return self.question.tokens


class Prompts(list[Prompt]):
    """The prompts of a source, and how many of its records were left out."""

    skipped: Skipped
    unread: Unread  # fields that reach no token: those of the record are there for the rewards

    def summary(self) -> str:
        """Counts and lengths, for a person."""
        sizes = sorted(len(prompt.tokens) for prompt in self)
        quantiles = "/".join(str(sizes[round(q * (len(sizes) - 1))]) for q in (0, 0.5, 0.95, 1))
        return f"{len(self):,} prompts, length min/median/p95/max {quantiles}"


def read_prompts(
    source: Source, tokenizer: Any, *, skip_bad: bool = False, today: date | None = None
) -> Prompts:
    """All prompts of a source. Any: a transformers tokenizer."""
    skipped = Skipped()
    renderer = Renderer(tokenizer, today=today)
    audit = FieldAudit(renderer)
    found = Prompts(_prompts(source, audit, skipped if skip_bad else None))
    found.unread = audit.counts()
    if source.skipped.count:
        skipped.hint = source.skipped.hint
    skipped.count += source.skipped.count
    skipped.reasons[:0] = source.skipped.reasons
    found.skipped = skipped
    if not found:
        raise skipped.as_error(source.name) if skipped.count else DataError(f"{source.name} holds no prompt")
    return found


def _prompts(source: Source, audit: FieldAudit, skipped: Skipped | None) -> Iterator[Prompt]:
    renderer = audit.renderer
    encoder = Encoder(renderer.tokenizer)
    for record in source:
        if record.shape:
            audit.add(record)
        try:
            question = encoder.question(renderer.prompt(record))
            if not question.tokens:
                raise DataError(f"{record.origin}: the prompt is empty: there is nothing to go on from")
        except DataError as error:
            if skipped is None:
                raise
            skipped.add(error)
        else:
            yield Prompt(question, record.fields)


def fitting(
    prompts: Sequence[Prompt], *, context: int, max_length: int, max_new_tokens: int, drop: bool
) -> list[Prompt]:
    """The prompts that leave room for a completion; one that does not is an error, or left out."""
    limit = min(max_length, context) - max_new_tokens
    long = [prompt for prompt in prompts if len(prompt.tokens) > limit]
    if not long:
        return list(prompts)
    found = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
    if drop and found:
        return found
    key = "data.max_length" if max_length < context else "the model's context"
    raise DataError(
        f"{long[0].question.origin}: a prompt of {len(long[0].tokens)} tokens leaves no room for "
        f"objective.max_new_tokens={max_new_tokens} in {key}, {min(max_length, context)} tokens "
        f"({len(long)} of {len(prompts)} prompts are too long)",
        hint="lower objective.max_new_tokens, raise data.max_length, or leave them out: data.too_long: drop",
    )
