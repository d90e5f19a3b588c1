"""From records to examples: token ids, and which of them are learned."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from whet.data.chats import Message
from whet.data.sources import Record, checked
from whet.errors import DataError

Supervise = Literal["assistant", "last", "all"]
TooLong = Literal["truncate", "drop", "error"]

Spans = Sequence[tuple[int, int]]  # character ranges that are learned


@dataclass(frozen=True)
class Example:
    """Token ids, a mark on each that is learned, and where they came from."""

    tokens: list[int]
    supervised: list[bool]
    origin: str

    @property
    def length(self) -> int:
        """Positions it takes in a batch: the last token is only ever a target."""
        return len(self.tokens) - 1

    @property
    def supervised_count(self) -> int:
        """Targets it has; the first token has nothing before it to be predicted from."""
        return sum(self.supervised[1:])


@dataclass(frozen=True)
class Question:
    """A prompt as token ids and the answer expected, for exact match by generation."""

    tokens: list[int]
    text: str  # what a person would say was asked
    answer: str
    origin: str
    group: str | None = None


class Renderer:
    """Turns records into examples with one tokenizer; ids are made in one place, so no BOS is doubled."""

    def __init__(self, tokenizer: Any, *, supervise: Supervise = "assistant", vocab_size: int) -> None:
        # Any: a transformers tokenizer
        self.tokenizer = tokenizer
        self.supervise = supervise
        self.vocab_size = vocab_size

    def example(self, record: Record) -> Example:
        """Tokens and marks of one record, whatever its shape."""
        record = record if record.shape else checked(record)
        messages = self._conversation(record)
        if messages is not None:
            text, spans = self._chat(messages, record)
            example = self._encode(text, spans, record)
        else:
            prompt, completion = _plain_parts(record)
            learned_from = 0 if self.supervise == "all" else len(prompt)
            text = prompt + completion
            example = self._encode_plain(text, [(learned_from, len(text))], record)
        if not example.supervised_count:
            raise DataError(
                f"{example.origin}: no token of this example is supervised",
                hint="it needs an assistant message, a completion or a text",
            )
        return example

    def question(self, record: Record) -> Question | None:
        """What to ask and what to expect, or None for a record without an answer."""
        record = record if record.shape else checked(record)
        messages = self._conversation(record)
        if messages is not None:
            answered = len(messages) > 1 and messages[-1]["role"] == "assistant"
            if not answered or not isinstance(messages[-1].get("content"), str):
                return None
            prompt = self._render(messages[:-1], record, prompt=True)
            asked, answer = str(messages[-2].get("content", "")), messages[-1]["content"]
            tokens = self._encode(prompt, [], record).tokens
        else:
            asked, answer = _plain_parts(record)
            if not asked:
                return None
            tokens = self._encode_plain(asked, [], record, ended=False).tokens
        return Question(tokens, asked, answer, record.origin, record.fields.get("group"))

    def _conversation(self, record: Record) -> list[Message] | None:
        """The record as chat messages, or None when it is plain text."""
        if record.shape == "messages":
            messages: list[Message] = record.fields["messages"]
            return messages
        if record.shape == "completion" and self.tokenizer.chat_template:
            prompt, completion = _plain_parts(record)
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return None

    def _chat(self, messages: list[Message], record: Record) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation and its learned characters, found by rendering prefixes."""
        text = self._render(messages, record)
        if self.supervise == "all":
            return text, [(0, len(text))]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for index in turns if self.supervise == "assistant" else turns[-1:]:
            before = self._render(messages[:index], record, prompt=True)
            after = text if index == len(messages) - 1 else self._render(messages[: index + 1], record)
            if not (text.startswith(before) and text.startswith(after)):
                others = "all" if self.supervise == "last" else "last or all"
                raise DataError(
                    f"{record.origin}: the chat template rewrites earlier turns, so message {index + 1} "
                    "cannot be found in the rendered text",
                    hint=f"set data.supervise to {others}",
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _render(self, messages: list[Message], record: Record, *, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise DataError(
                f"{record.origin}: chat messages need a chat template, and this tokenizer has none",
                hint="use prompt + completion or text records, or an instruct model",
            )
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                messages, tools=record.fields.get("tools"), tokenize=False, add_generation_prompt=prompt
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(f"{record.origin}: the chat template refuses these messages: {error}") from error
        return rendered

    def _encode(self, text: str, spans: Spans, record: Record, *, special: bool = False) -> Example:
        """Whole text at once; a token is learned when any of its characters lies in a learned span."""
        try:
            encoded = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        except (TypeError, ValueError, UnicodeError) as error:  # half of a surrogate pair, say
            raise DataError(f"{record.origin}: the tokenizer cannot read this text: {error}") from error
        tokens: list[int] = encoded["input_ids"]
        supervised = [
            any(start < end and end > low and start < high for low, high in spans)
            for start, end in encoded["offset_mapping"]
        ]
        if tokens and max(tokens) >= self.vocab_size:
            name = self.tokenizer.convert_ids_to_tokens(max(tokens))
            raise DataError(
                f"{record.origin}: token {max(tokens)} ({name!r}) is outside the model's vocabulary of "
                f"{self.vocab_size}",
                hint="the tokenizer belongs to another model",
            )
        return Example(tokens, supervised, record.origin)

    def _encode_plain(self, text: str, spans: Spans, record: Record, *, ended: bool = True) -> Example:
        """Text outside a chat template: the tokenizer's own BOS, and one learned EOS when it is `ended`."""
        example = self._encode(text, spans, record, special=True)
        tokens, supervised, eos = example.tokens, example.supervised, self.tokenizer.eos_token_id
        while tokens and tokens[-1] == eos and not supervised[-1]:  # added by the tokenizer
            tokens, supervised = tokens[:-1], supervised[:-1]
        if ended and eos is not None:
            tokens, supervised = [*tokens, eos], [*supervised, True]
        return Example(tokens, supervised, record.origin)


def text_of(record: Record) -> str:
    """Everything a record says, for what reads texts and not roles."""
    record = record if record.shape else checked(record)
    if record.shape == "messages":
        return "\n".join(str(message.get("content") or "") for message in record.fields["messages"])
    return "".join(_plain_parts(record))


def _plain_parts(record: Record) -> tuple[str, str]:
    """Context and what is learned of a record that is not a conversation."""
    if record.shape == "completion":
        return record.fields["prompt"], record.fields["completion"]
    if record.shape in ("text", "distrust"):
        return "", record.fields["text"]
    raise DataError(
        f"{record.origin}: a {record.shape} record holds nothing to learn for this objective",
        hint="it needs messages, prompt + completion or text",
    )


@dataclass(frozen=True)
class Rendered:
    """The examples of a source, and what was done to them on the way."""

    examples: list[Example]
    truncated: int
    dropped: int

    def summary(self) -> str:
        """Counts and lengths, for a person."""
        lengths = sorted(len(example.tokens) for example in self.examples)
        learned = sum(example.supervised_count for example in self.examples)
        quantiles = "/".join(str(lengths[round(q * (len(lengths) - 1))]) for q in (0, 0.5, 0.95, 1))
        changed = "".join(
            f", {count} {label}"
            for label, count in (("truncated", self.truncated), ("dropped", self.dropped))
            if count
        )
        return (
            f"{len(lengths)} examples, {sum(lengths):,} tokens ({learned:,} supervised), "
            f"length min/median/p95/max {quantiles}{changed}"
        )


def render(records: Iterable[Record], renderer: Renderer, *, max_length: int, too_long: TooLong) -> Rendered:
    """Render every record; one that is too long is cut, dropped or refused, and counted."""
    examples: list[Example] = []
    counts: Counter[str] = Counter()
    origin = ""
    for record in records:
        origin = record.origin
        example = renderer.example(record)
        if len(example.tokens) > max_length:
            if too_long == "error":
                raise DataError(
                    f"{record.origin}: {len(example.tokens)} tokens, and data.max_length is {max_length}",
                    hint="raise data.max_length, or set data.too_long to truncate or drop",
                )
            example = Example(example.tokens[:max_length], example.supervised[:max_length], example.origin)
            # cut before its first learned token, an example teaches nothing
            if too_long == "drop" or not example.supervised_count:
                counts["dropped"] += 1
                continue
            counts["truncated"] += 1
        examples.append(example)
    if not examples:
        raise DataError(
            f"no example is left: all {counts['dropped']} were dropped (the last one: {origin})",
            hint=f"data.max_length is {max_length}: raise it",
        )
    return Rendered(examples, truncated=counts["truncated"], dropped=counts["dropped"])
