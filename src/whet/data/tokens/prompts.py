"""Prompts for generation: the text before the completion of a record, with the record for the rewards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from whet.data.sources.chat_messages import MESSAGE_LISTS
from whet.data.sources.message_weights import PART_WEIGHTS
from whet.data.sources.source import Record, Skipped, Source
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.field_audit import FieldAudit, Unread
from whet.data.tokens.loss_mask import turn_weight
from whet.data.tokens.prepare_dataset import unused_weight_error
from whet.data.tokens.tokenize import Encoder, Question
from whet.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """A prompt and the fields of its record. The answer is empty if the record has none."""

    question: Question
    fields: dict[str, Any]  # Any: JSON values

    @property
    def tokens(self) -> list[int]:
        """The token ids of the prompt."""
        return self.question.tokens


class Prompts(list[Prompt]):
    """The prompts of a source, and the number of records that were skipped."""

    skipped: Skipped
    unread_fields: Unread  # fields that are not tokenized; rewards may still read the fields of records

    def summary(self) -> str:
        """Return counts and lengths as one line."""
        sizes = sorted(len(prompt.tokens) for prompt in self)
        quantiles = "/".join(str(sizes[round(q * (len(sizes) - 1))]) for q in (0, 0.5, 0.95, 1))
        return f"{len(self):,} prompts, length min/median/p95/max {quantiles}"


def read_prompts(
    source: Source,
    tokenizer: Any,
    *,
    skip_bad: bool = False,
    today: date | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> Prompts:
    """Return all prompts of a source. Any: a transformers tokenizer; JSON values."""
    skipped = Skipped()
    renderer = Renderer(tokenizer, today=today, template_args=template_args)
    audit = FieldAudit(renderer)
    prompts = Prompts(_prompts(source, audit, skipped if skip_bad else None))
    prompts.unread_fields = audit.counts()
    if source.skipped.count:
        skipped.hint = source.skipped.hint
    skipped.count += source.skipped.count
    skipped.reasons[:0] = source.skipped.reasons
    prompts.skipped = skipped
    if not prompts:
        raise (
            skipped.as_error(source.name) if skipped.count else DataError(f"{source.name} contains no prompt")
        )
    return prompts


def _prompts(source: Source, audit: FieldAudit, skipped: Skipped | None) -> Iterator[Prompt]:
    renderer = audit.renderer
    encoder = Encoder(renderer.tokenizer)
    for record in source:
        if record.record_format:
            audit.add(record)
            _check_weights(record)
        try:
            question = encoder.encode_question(renderer.render_prompt(record))
            if not question.tokens:
                raise DataError(f"{record.origin}: the prompt is empty")
        except DataError as error:
            if skipped is None:
                raise
            skipped.add(error)
        else:
            yield Prompt(question, record.fields)


def _check_weights(record: Record) -> None:
    """Raise an error for messages with other weights than 0 and 1; rewards may read that of a record."""
    messages = [
        message
        for name in MESSAGE_LISTS
        if isinstance(value := record.fields.get(name), list)
        for message in value
    ]
    if any(turn_weight(message) not in (0, 1) or PART_WEIGHTS in message for message in messages):
        raise unused_weight_error(record)


def select_fitting_prompts(
    prompts: Sequence[Prompt], *, context: int, max_length: int, max_new_tokens: int, drop: bool
) -> list[Prompt]:
    """Return the prompts that leave enough tokens for a completion.

    Args:
        prompts: The prompts.
        context: The context length of the model.
        max_length: The limit on prompt and completion, in tokens.
        max_new_tokens: The length of a completion.
        drop: Whether prompts that are too long are dropped instead of raising an error.

    Raises:
        DataError: A prompt is too long and `drop` is false, or all prompts are too long.
    """
    limit = min(max_length, context) - max_new_tokens
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > limit]
    if not too_long:
        return list(prompts)
    selected = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
    if drop and selected:
        return selected
    key = "data.max_length" if max_length < context else "the model's context"
    raise DataError(
        f"{too_long[0].question.origin}: a prompt of {len(too_long[0].tokens)} tokens and "
        f"objective.max_new_tokens={max_new_tokens} exceed {key} of {min(max_length, context)} tokens "
        f"({len(too_long)} of {len(prompts)} prompts are too long)",
        hint="lower objective.max_new_tokens, raise data.max_length, or set data.too_long: drop",
    )
