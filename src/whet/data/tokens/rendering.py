"""Records as text before tokenization: the supervised characters and their loss weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whet.data.sources.message_weights import record_weight
from whet.data.sources.source import Record
from whet.data.tokens.loss_mask import WeightedSpan
from whet.errors import DataError

Spans = Sequence[tuple[int, int]]  # supervised character ranges


@dataclass(frozen=True)
class Rendering:
    """A record as text, before tokenization."""

    text: str
    spans: Spans
    is_plain: bool  # not from a chat template: the tokenizer adds its special tokens
    add_eos: bool  # a supervised EOS follows the text, if it is plain
    origin: str
    values: tuple[float, ...] = ()  # numeric columns of the record
    only_last: bool = False  # the template rewrites earlier turns, so only the last turn is supervised
    lost_turns: int = 0  # earlier turns that are not supervised, because they cannot follow their prompt
    is_classification: bool = False  # an input to classify, without a continuation
    weights: tuple[float, ...] = ()  # of each span; empty if all are 1


@dataclass(frozen=True)
class RenderedPrompt:
    """A rendered prompt with the question as plain text and the expected completion."""

    prompt: Rendering
    question: str
    answer: str
    group: str | None


def with_spans(rendering: Rendering, spans: Sequence[WeightedSpan]) -> Rendering:
    """Return a rendering with these spans, without those of weight 0."""
    counted = [span for span in spans if span[2] > 0]
    weights = tuple(weight for _, _, weight in counted)
    ranges = [(low, high) for low, high, _ in counted]
    return replace(rendering, spans=ranges, weights=() if set(weights) <= {1.0} else weights)


def weigh(rendering: Rendering, record: Record) -> Rendering:
    """Return a rendering with its weights multiplied by that of the record."""
    try:
        weight = record_weight(record.fields)
    except DataError as error:
        raise DataError(
            f"{record.origin}: {error.message}", hint="set data.ignore to [weight] if it is not a loss weight"
        ) from None
    if weight == 0:
        raise DataError(
            f"{record.origin}: the weight of the record is 0, so no token of it is supervised",
            hint="remove the record, or set data.on_bad_record: skip",
        )
    if weight == 1:
        return rendering
    weights = rendering.weights or (1.0,) * len(rendering.spans)
    return replace(rendering, weights=tuple(weight * each for each in weights))


def number_examples(examples: Sequence[Rendering]) -> tuple[Rendering, ...]:
    """Return the examples of one record with their number in the origin, if there are several."""
    if len(examples) == 1:
        return tuple(examples)
    return tuple(
        replace(each, origin=f"{each.origin} ({number} of {len(examples)})")
        for number, each in enumerate(examples, start=1)
    )


def empty_turn_error(name: str, record: Record, *, left_out: Sequence[str] = ()) -> DataError:
    """Return the error for a supervised turn without text; `left_out` are fields that the template omits."""
    reason = f": the chat template omits {', '.join(left_out)}" if left_out else ""
    fix = "use a model whose chat template writes it" if left_out else "add text"
    mask = ", mask it with weight: 0" if record.record_format == "messages" else ""
    return DataError(
        f"{record.origin}: {name} renders as empty text{reason}",
        hint=f"{fix}{mask}, or set data.allow_empty_answers: true to supervise empty text",
    )
