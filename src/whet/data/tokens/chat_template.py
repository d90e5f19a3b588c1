"""Render records to the text that the model reads, and mark its supervised characters."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from whet.data.sources.chat_messages import Message
from whet.data.sources.message_weights import MARKS, PART_WEIGHTS, record_weight
from whet.data.sources.record_formats import renaming_hint
from whet.data.sources.source import Record, validate_record
from whet.data.tokens.loss_mask import (
    Supervise,
    Turns,
    WeightedSpan,
    check_supervise,
    is_supervised,
    overlay,
    selected_turns,
    turn_weight,
)
from whet.data.tokens.template_probe import TemplateProbe, probe_template
from whet.data.tokens.template_sandbox import Rendered, render_template
from whet.data.tokens.thinking import complete_opened_turn, thinking_spans
from whet.data.tokens.turn_spans import MAX_EXACT, Render, Skeletons, Span, find_turns
from whet.errors import DataError, short_repr, shorten

Spans = Sequence[tuple[int, int]]  # supervised character ranges
_PREFERENCE_ROLES = (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"))


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


class NothingToSuperviseError(DataError):
    """The format of a record has no tokens to supervise."""

    def __init__(self, record: Record) -> None:
        super().__init__(
            f"{record.origin}: a {record.record_format} record has no text to supervise for this objective",
            hint=renaming_hint(record.fields, "completion") or "use messages, prompt + completion or text",
        )
        self.record = record


class LostTurnError(DataError):
    """A turn does not follow the prompt with which the model is served."""


class Renderer:
    """Render records to text with the chat template of a tokenizer."""

    def __init__(
        self,
        tokenizer: Any,  # Any: a transformers tokenizer
        *,
        supervise: Supervise = "assistant",
        allow_empty: bool = False,
        today: date | None = None,
        template_args: Mapping[str, Any] | None = None,  # Any: JSON values
        supervise_thinking: bool = True,
        turns: Turns = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self.turns = turns
        self.template_args = check_template_args(template_args or {})
        self.supervise_thinking = supervise_thinking
        self.supervise = check_supervise(supervise)
        self.allow_empty = allow_empty  # accept supervised turns that render as empty text
        self.today = today or date.today()
        # the output of such a template depends on the date
        self.is_dated = "strftime_now" in str(tokenizer.chat_template)
        self._skeletons = Skeletons()

    @functools.cached_property
    def probe(self) -> TemplateProbe:
        """What the chat template reads and writes."""
        return probe_tokenizer(self.tokenizer, template_args=self.template_args)

    def render(self, record: Record) -> Rendering:
        """Return the text of a record of any format that has tokens to supervise."""
        record = record if record.record_format else validate_record(record)
        _check_unlabeled(record)
        messages = self._to_messages(record)
        if messages is not None:
            return self._render_conversation(messages, record)
        prompt, completion = _plain_parts(record)
        if record.record_format == "completion" and not completion and not self.allow_empty:
            raise _empty_turn_error("the completion", record)
        if record.record_format != "completion" and self.supervise == "completion":
            raise DataError(
                f"{record.origin}: a {record.record_format} record has no completion, and data.supervise is "
                "completion",
                hint="set data.supervise to assistant, which supervises plain text as well",
            )
        text = prompt + completion
        start = 0 if self.supervise == "all" else len(prompt)
        return _weigh(Rendering(text, [(start, len(text))], True, True, record.origin), record)

    def render_turns(self, record: Record) -> tuple[Rendering, ...]:
        """Return the examples of a record: one, unless the template rewrites earlier turns of a conversation.

        Then no text contains the prompts of all supervised turns. The conversation becomes several examples,
        each of which ends with a supervised turn after the prompt that the model is served at that point.
        """
        record = record if record.record_format else validate_record(record)
        messages = self._to_messages(record)
        if messages is None or self.turns == "last" or self.supervise == "all":
            return (self.render(record),)
        _check_unlabeled(record)
        supervised = self._supervised_turns(messages, record)
        text = self._render_messages(messages, record)
        spans = self._turn_spans(supervised, messages, text, record)
        if None not in spans and (self.turns == "auto" or len(spans) < 2):
            span_of_turn = {i: span for i, span in zip(supervised, spans, strict=True) if span is not None}
            return (self._supervise_turns(span_of_turn, messages, text, record),)
        return self._render_groups(supervised, messages, record)

    def _render_groups(
        self, supervised: list[int], messages: list[Message], record: Record
    ) -> tuple[Rendering, ...]:
        """Return examples that end with a supervised turn, with the earlier ones whose prompt they have."""
        remaining, examples, lost = list(supervised), list[Rendering](), 0
        while remaining:
            last, spans = remaining[-1], dict[int, Span]()
            text, prompt = self._turn_texts(last, messages, record)
            finished = text
            while text.startswith(prompt) and text.startswith(finished):
                spans[remaining.pop()] = len(prompt), len(finished)
                if not remaining or self.turns == "each":
                    break
                finished, prompt = self._turn_texts(remaining[-1], messages, record)
            if spans:
                span_of_turn = dict(sorted(spans.items()))
                examples.append(self._supervise_turns(span_of_turn, messages[: last + 1], text, record))
                continue
            remaining.pop()
            try:
                examples.append(self._render_opened_turn([last], messages[: last + 1], text, record))
            except LostTurnError:
                if not examples or self.turns == "each":  # the last turn is never left out
                    raise
                lost += 1
        examples[0] = replace(examples[0], lost_turns=lost)
        return _number_examples(examples[::-1])

    def _turn_texts(self, index: int, messages: list[Message], record: Record) -> tuple[Rendered, str]:
        """Return the conversation up to a turn, and the prompt that the turn follows."""
        is_assistant = messages[index]["role"] == "assistant"
        prompt = self._render_messages(messages[:index], record, prompt=is_assistant) if index else ""
        return self._render_messages(messages[: index + 1], record), prompt

    def render_pair(self, record: Record) -> tuple[Rendering, Rendering]:
        """Return chosen and rejected, each with the prompt; only the completions are supervised."""
        record = record if record.record_format else validate_record(record)
        if record.record_format != "preference":
            raise DataError(
                f"{record.origin}: a {record.record_format} record has no completions to compare",
                hint="use prompt, chosen and rejected",
            )
        prompt, chosen, rejected = (record.fields[name] for name in ("prompt", "chosen", "rejected"))
        # an empty rejected completion is fine
        pair = (
            self._render_completion(prompt, chosen, record, allow_empty=self.allow_empty),
            self._render_completion(prompt, rejected, record, allow_empty=True),
        )
        if pair[0].text == pair[1].text:  # the template may strip the difference
            raise DataError(f"{record.origin}: chosen and rejected are the same")
        return pair

    def render_classification(self, record: Record) -> Rendering:
        """Return the input of a classification record, to which the tokenizer adds its special tokens."""
        record = record if record.record_format else validate_record(record, "classification")
        if record.record_format != "classification":
            raise DataError(
                f"{record.origin}: a {record.record_format} record has no label", hint="use input and label"
            )
        text = record.fields["input"]
        rendering = Rendering(text, [(0, len(text))], True, False, record.origin, is_classification=True)
        return _weigh(rendering, record)

    def _render_completion(
        self, prompt: Any, completion: Any, record: Record, *, allow_empty: bool
    ) -> Rendering:
        # Any: text, or messages
        if isinstance(prompt, str) and not self.tokenizer.chat_template:
            if not completion and not allow_empty:
                raise _empty_turn_error("chosen", record)
            text = prompt + completion
            return _weigh(Rendering(text, [(len(prompt), len(text))], True, True, record.origin), record)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        messages = [*prompt, *completion]
        text = self._render_messages(messages, record)
        prefix = self._render_messages(prompt, record, prompt=True)
        if not text.startswith(prefix):
            raise DataError(
                f"{record.origin}: the chat template changes the prompt when a completion follows"
            )
        spans = self._weighted_spans(messages, text, record, start=len(prefix), first=len(prompt))
        if not allow_empty:
            turns = [
                index
                for index in range(len(prompt), len(messages))
                if messages[index]["role"] == "assistant" and is_supervised(messages[index])
            ]
            self._check_not_empty(dict.fromkeys(turns, (len(prefix), len(text))), messages, text, record)
        return _weigh(_with_spans(Rendering(text, [], False, False, record.origin), spans), record)

    def render_question(self, record: Record) -> RenderedPrompt | None:
        """Return the prompt and the expected completion, or None for a record without a completion."""
        record = _chosen_only(record if record.record_format else validate_record(record))
        messages = self._to_messages(record)
        if messages is not None:
            has_answer = len(messages) > 1 and messages[-1]["role"] == "assistant"
            if not has_answer or not isinstance(messages[-1].get("content"), str):
                return None
            text: str = self._render_messages(messages[:-1], record, prompt=True)
            question, answer = str(messages[-2].get("content", "")), messages[-1]["content"]
        else:
            question, answer = _plain_parts(record)
            text = question
            if not question:
                return None
        prompt = Rendering(text, [], messages is None, False, record.origin)
        return RenderedPrompt(prompt, question, answer, record.fields.get("group"))

    def render_prompt(self, record: Record) -> RenderedPrompt:
        """Return the prompt of a record with its reference answer, which is empty if the record has none."""
        record = record if record.record_format else validate_record(record)
        messages: list[Message] | None = None
        answer, group = _reference_answer(record), record.fields.get("group")
        if record.record_format == "prompt":
            question = record.fields["prompt"]
            if isinstance(question, str) and self.tokenizer.chat_template:
                question = [{"role": "user", "content": question}]
            if isinstance(question, str):
                return RenderedPrompt(
                    Rendering(question, [], True, False, record.origin), question, answer, group
                )
            messages = question
        elif record.record_format == "messages" and record.fields["messages"][-1]["role"] != "assistant":
            messages = record.fields["messages"]
        if messages is not None:
            text = self._render_messages(messages, record, prompt=True)
            question = str(messages[-1].get("content", ""))
            return RenderedPrompt(Rendering(text, [], False, False, record.origin), question, answer, group)
        rendered = self.render_question(record)
        if rendered is None:
            raise DataError(
                f"{record.origin}: a {record.record_format} record has no prompt to complete",
                hint="use messages, prompt or prompt + completion",
            )
        return rendered

    def _to_messages(self, record: Record) -> list[Message] | None:
        """Return the record as chat messages, or None if it is plain text."""
        if record.record_format == "messages":
            messages: list[Message] = record.fields["messages"]
            return messages
        if record.record_format == "completion" and self.tokenizer.chat_template:
            prompt, completion = _plain_parts(record)
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return None

    def render_chats(self, record: Record) -> list[str]:
        """Return the rendered conversations of a record; empty for plain text.

        They include the beginnings up to each assistant turn, which may become examples of their own.
        """
        if record.record_format == "preference":
            prompt, *completions = (
                _wrap_messages(record.fields[name], role) for name, role in _PREFERENCE_ROLES
            )
            conversations = [[*prompt, *completion] for completion in completions]
        elif record.record_format == "prompt":
            conversations = [_wrap_messages(record.fields["prompt"], "user")]
        else:
            conversations = [self._to_messages(record) or []]
        if not self.tokenizer.chat_template:
            return []
        if self.turns != "last":
            conversations = [
                messages[: index + 1]
                for messages in conversations
                for index, message in enumerate(messages)
                if message["role"] == "assistant" or index == len(messages) - 1
            ]
        return [self._render_messages(messages, record) for messages in conversations if messages]

    def _render_conversation(self, messages: list[Message], record: Record) -> Rendering:
        """Render a conversation and find its supervised characters.

        Turn positions are computed once per sequence of roles, unless a text deviates from that pattern.
        """
        text = self._render_messages(messages, record)
        rendering = Rendering(text, [], False, False, record.origin)
        if self.supervise == "all":
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
            everything = {i: (0, len(text)) for i in turns if is_supervised(messages[i])}
            self._check_not_empty(everything, messages, text, record)
            return _weigh(_with_spans(rendering, self._weighted_spans(messages, text, record)), record)
        supervised = self._supervised_turns(messages, record)
        spans = self._turn_spans(supervised, messages, text, record)
        turn_spans = [span for span in spans if span is not None]
        is_rewritten = len(turn_spans) < len(spans)
        if is_rewritten and (not spans or spans[-1] is None):
            return self._render_opened_turn(supervised, messages, text, record)
        if is_rewritten:
            supervised, turn_spans = supervised[-1:], turn_spans[-1:]
        span_of_turn = dict(zip(supervised, turn_spans, strict=True))
        return replace(self._supervise_turns(span_of_turn, messages, text, record), only_last=is_rewritten)

    def _supervised_turns(self, messages: list[Message], record: Record) -> list[int]:
        if [i for i, message in enumerate(messages) if message["role"] == "assistant"] == [0]:
            raise DataError(
                f"{record.origin}: the only assistant message is the first message, which has no prompt"
            )
        return [i for i in selected_turns(messages, self.supervise) if is_supervised(messages[i])]

    def _supervise_turns(
        self, span_of_turn: Mapping[int, Span], messages: list[Message], text: Rendered, record: Record
    ) -> Rendering:
        """Return the text of a conversation with these turns supervised."""
        assistant_spans = {i: span for i, span in span_of_turn.items() if messages[i]["role"] == "assistant"}
        self._check_not_empty(assistant_spans, messages, text, record)
        weighted = [
            piece
            for index, span in span_of_turn.items()
            for piece in self._weigh_turn(index, span, messages, text, record)
        ]
        return _weigh(_with_spans(Rendering(text, [], False, False, record.origin), weighted), record)

    def _turn_spans(
        self, indices: list[int], messages: list[Message], text: Rendered, record: Record
    ) -> Sequence[Span | None]:
        """Return the spans of turns, from the skeleton of their roles if the text has one."""
        render = self._renderer_for(record)
        assistant_turns = sum(message["role"] == "assistant" for message in messages[1:])
        if assistant_turns <= MAX_EXACT and not record.fields.get("tools"):
            skeleton = self._skeletons.spans(_without_marks(messages), text, render)
            if skeleton is not None and all(index in skeleton for index in indices):
                return [skeleton[index] for index in indices]
        return find_turns(messages, indices, text, render)

    def _render_opened_turn(
        self, supervised: list[int], messages: list[Message], text: str, record: Record
    ) -> Rendering:
        """Render a conversation up to its last supervised turn, which continues a prompt that opens thinking.

        What follows the turn is left out: no supervised token depends on it.
        """
        index = supervised[-1]
        prompt = self._render_messages(messages[:index], record, prompt=True)
        finished = self._render_messages(messages[: index + 1], record)
        completed = complete_opened_turn(prompt, finished, messages[index])
        if completed is None or PART_WEIGHTS in messages[index]:
            raise self._lost_turn_error(index, messages, text, record)
        span = (len(prompt), len(completed))
        if not self.allow_empty and not (messages[index].get("content") or messages[index].get("tool_calls")):
            raise _empty_turn_error(f"message {index + 1} (assistant)", record)
        pieces = self._mask_thinking([(*span, turn_weight(messages[index]))], span, completed)
        rendering = _with_spans(Rendering(completed, [], False, False, record.origin), pieces)
        return _weigh(replace(rendering, only_last=len(supervised) > 1), record)

    def _mask_thinking(self, pieces: list[WeightedSpan], span: Span, text: str) -> list[WeightedSpan]:
        """Return the weighted spans of an assistant turn, without its thinking if that is not supervised."""
        if self.supervise_thinking:
            return pieces
        return overlay(pieces, [(low, high, 0.0) for low, high in thinking_spans(text, *span)])

    def _lost_turn_error(
        self, index: int, messages: list[Message], text: str, record: Record
    ) -> LostTurnError:
        """Return the error for a turn that does not follow its generation prompt."""
        prompt = self._render_messages(messages[:index], record, prompt=True)
        without_prompt = self._render_messages(messages[:index], record)
        if text.startswith(without_prompt):  # only the generation prompt differs
            pairs = enumerate(zip(prompt, text, strict=False))
            opening = prompt[next((i for i, (left, right) in pairs if left != right), len(text)) :]
            return LostTurnError(
                f"{record.origin}: the chat template ends a prompt with {short_repr(opening)}, but does not "
                f"write this before message {index + 1}",
                hint="set data.supervise to all, or edit the model's chat_template.jinja so that both agree",
            )
        return LostTurnError(
            f"{record.origin}: the chat template rewrites earlier turns, so message {index + 1} "
            "cannot be found in the rendered text",
            hint="set data.supervise to all",
        )

    def _weighted_spans(
        self, messages: list[Message], text: Rendered, record: Record, *, start: int = 0, first: int = 0
    ) -> list[WeightedSpan]:
        """Return the range from `start` to the end, with the weights of the messages from `first` on."""
        indices = [
            index for index, message in enumerate(messages) if index >= first and self._is_weighted(message)
        ]
        pieces: list[WeightedSpan] = []
        spans = find_turns(messages, indices, text, self._renderer_for(record))
        for index, span in zip(indices, spans, strict=True):
            if span is None:
                raise DataError(
                    f"{record.origin}: the chat template rewrites earlier turns, so message {index + 1}, "
                    "which has a weight, cannot be found in the rendered text"
                )
            pieces += self._weigh_turn(index, span, messages, text, record)
        pieces = [(max(low, start), max(high, start), weight) for low, high, weight in pieces]
        return overlay([(start, len(text), 1.0)], pieces)

    def _is_weighted(self, message: Message) -> bool:
        """Return whether a message may have characters of another weight than 1."""
        is_thoughtful = message["role"] == "assistant" and not self.supervise_thinking
        return turn_weight(message) != 1 or PART_WEIGHTS in message or is_thoughtful

    def _weigh_turn(
        self, index: int, span: Span, messages: list[Message], text: Rendered, record: Record
    ) -> list[WeightedSpan]:
        """Return the span of a turn with its weight, cut where parts of its content have other weights."""
        pieces = self._weigh_parts(index, span, messages, text, record)
        return self._mask_thinking(pieces, span, text) if messages[index]["role"] == "assistant" else pieces

    def _weigh_parts(
        self, index: int, span: Span, messages: list[Message], text: Rendered, record: Record
    ) -> list[WeightedSpan]:
        weight = turn_weight(messages[index])
        parts = messages[index].get(PART_WEIGHTS)
        if parts is None:
            return [(*span, weight)]
        from whet.data.tokens.part_spans import part_boundaries

        lengths = [length for length, _ in parts]
        render = self._renderer_for(record)
        cuts = part_boundaries(messages, index, lengths, text=text, span=span, render=render)
        if cuts is None:
            raise DataError(
                f"{record.origin}: the chat template changes the content of message {index + 1}, so its "
                "weighted parts cannot be found in the rendered text",
                hint="weigh the message instead of its parts, or end parts with whole words",
            )
        pieces = [
            (low, high, weight if own is None else own)
            for low, high, (_, own) in zip(cuts, cuts[1:], parts, strict=False)
        ]
        return [(low, high, w) for low, high, w in overlay([(*span, weight)], pieces)]

    def _check_not_empty(
        self, spans: Mapping[int, Span], messages: list[Message], text: str, record: Record
    ) -> None:
        """Raise an error for a supervised turn (index -> span) whose content the template does not write."""
        for index, (low, high) in spans.items() if not self.allow_empty else ():
            content = messages[index].get("content") or ""
            if content.strip() and text.find(content.strip(), low, high) >= 0:
                continue
            extra_fields = [name for name in messages[index] if name not in ("role", "content", *MARKS)]
            extra_values = [messages[index][name] for name in extra_fields]
            if high - low < len(text) and _contains_text_of(text[low:high], extra_values):
                continue
            bare = {"role": messages[index]["role"], "content": ""}
            is_empty = not content and not extra_fields
            if not is_empty:
                with contextlib.suppress(DataError):
                    emptied = [*messages[:index], bare, *messages[index + 1 :]]
                    is_empty = self._render_messages(emptied, record) == text
            if is_empty:
                name = (
                    f"message {index + 1} (assistant)"
                    if record.record_format == "messages"
                    else "the completion"
                )
                raise _empty_turn_error(
                    name, record, left_out=[*(["content"] if content else []), *extra_fields]
                )

    def _renderer_for(self, record: Record) -> Render:
        return lambda part, prompt: self._render_messages(part, record, prompt=prompt)

    def _render_messages(self, messages: list[Message], record: Record, *, prompt: bool = False) -> Rendered:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{record.origin}: chat messages need a chat template, and this tokenizer has none",
                hint="use prompt + completion or text records, or an instruct model",
            )
        tools = record.fields.get("tools")
        if tools is not None or any(message.get("tool_calls") for message in messages):
            from whet.data.tokens.tool_calls import normalize_calls, normalize_tools

            tools = normalize_tools(tools)
            messages = normalize_calls(messages, self.probe.tool_arguments)
        # with tool_calls, content may be null: some templates require it, others print None or fail
        has_null = any(message.get("content") is None for message in messages)
        try:
            text = render_chat(
                self.tokenizer,
                _without_marks(messages),
                tools=tools,
                add_generation_prompt=prompt,
                today=self.today,
                template_args=self.template_args,
            )
        except DataError as error:
            if has_null:
                return self._render_messages(_fill_null_content(messages), record, prompt=prompt)
            raise DataError(f"{record.origin}: {error.message}", hint=error.hint) from error
        if has_null and "None" in text:
            filled = self._render_messages(_fill_null_content(messages), record, prompt=prompt)
            return filled if filled.count("None") < text.count("None") else text
        return text


def render_chat(
    tokenizer: Any,  # Any: a transformers tokenizer
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Any = None,  # Any: JSON values
    today: date | None = None,
    template_args: Mapping[str, Any] | None = None,  # Any: JSON values
) -> Rendered:
    """Render messages with a tokenizer's chat template. All chats are rendered by this function."""
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:  # several templates without a default
        raise DataError(shorten(str(error))) from error
    special = tokenizer.special_tokens_map
    return render_template(
        template,
        messages,
        tools=tools,
        prompt=add_generation_prompt,
        special=special,
        today=today,
        arguments=template_args,
    )


def probe_tokenizer(
    tokenizer: Any, *, template_args: Mapping[str, Any] | None = None
) -> TemplateProbe:  # Any: a transformers tokenizer; JSON values
    """Probe the chat template of a tokenizer, or its default one and the one for tools."""

    def render(messages: Sequence[Mapping[str, Any]], *, tools: Any, prompt: bool) -> str:
        chat = [dict(message) for message in messages]
        return render_chat(
            tokenizer, chat, tools=tools, add_generation_prompt=prompt, template_args=template_args
        )

    try:
        source = str(tokenizer.get_chat_template())
    except ValueError:  # several templates without a default
        source = ""
    return probe_template(source, render, special=list(tokenizer.special_tokens_map))


def check_template_args(arguments: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON values
    """Return the arguments of a template; raise a DataError for names that whet sets itself."""
    reserved = sorted({"messages", "tools", "add_generation_prompt", "strftime_now"} & arguments.keys())
    if reserved:
        raise DataError(
            f"data.template_args cannot set {', '.join(reserved)}",
            hint="tools come from the records; the others are set for each conversation",
        )
    return dict(arguments)


def _without_marks(messages: list[Message]) -> list[Message]:
    """Return the messages without the fields that set loss weights, which are not for templates."""
    if not any(name in message for message in messages for name in MARKS):
        return messages
    return [{name: value for name, value in message.items() if name not in MARKS} for message in messages]


def _number_examples(examples: Sequence[Rendering]) -> tuple[Rendering, ...]:
    """Return the examples of one record with their number in the origin, if there are several."""
    if len(examples) == 1:
        return tuple(examples)
    return tuple(
        replace(each, origin=f"{each.origin} ({number} of {len(examples)})")
        for number, each in enumerate(examples, start=1)
    )


def _with_spans(rendering: Rendering, spans: Sequence[WeightedSpan]) -> Rendering:
    """Return a rendering with these spans, without those of weight 0."""
    counted = [span for span in spans if span[2] > 0]
    weights = tuple(weight for _, _, weight in counted)
    ranges = [(low, high) for low, high, _ in counted]
    return replace(rendering, spans=ranges, weights=() if set(weights) <= {1.0} else weights)


def _weigh(rendering: Rendering, record: Record) -> Rendering:
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


def _contains_text_of(turn: str, values: list[Any]) -> bool:  # Any: JSON values
    """Return whether the text of a turn contains a string from these values, including nested ones."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str) and len(value) > 3 and value in turn:
            return True
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
    return False


def _wrap_messages(content: Any, role: str) -> list[Message]:  # Any: text, or messages
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def _fill_null_content(messages: list[Message]) -> list[Message]:
    return [{**message, "content": message.get("content") or ""} for message in messages]


def _check_unlabeled(record: Record) -> None:
    """Raise an error for a completion labeled good or bad: SFT would imitate both."""
    label = record.fields.get("label")
    if record.record_format not in ("completion", "messages") or str(label).lower() not in ("true", "false"):
        return
    raise DataError(
        f"{record.origin}: label: {str(label).lower()} marks a good or bad completion (as for KTO), but this "
        "objective would imitate both",
        hint="keep only the good completions and remove the field label, or pair completions as chosen and "
        "rejected for objective.kind: dpo",
    )


def _empty_turn_error(name: str, record: Record, *, left_out: Sequence[str] = ()) -> DataError:
    reason = f": the chat template omits {', '.join(left_out)}" if left_out else ""
    fix = "use a model whose chat template writes it" if left_out else "add text"
    mask = ", mask it with weight: 0" if record.record_format == "messages" else ""
    return DataError(
        f"{record.origin}: {name} renders as empty text{reason}",
        hint=f"{fix}{mask}, or set data.allow_empty_answers: true to supervise empty text",
    )


def _chosen_only(record: Record) -> Record:
    """Return a preference record with only its chosen completion, and any other record unchanged."""
    if record.record_format != "preference":
        return record
    prompt, chosen = record.fields["prompt"], record.fields["chosen"]
    if isinstance(prompt, str):
        return Record({**record.fields, "completion": chosen}, record.origin, "completion")
    return Record({**record.fields, "messages": [*prompt, *chosen]}, record.origin, "messages")


def _reference_answer(record: Record) -> str:
    """Return the reference answer (`completion` or `answer`, which rewards read), or an empty string."""
    values = [record.fields.get(name) for name in ("completion", "answer")]
    return next((str(value) for value in values if value is not None), "")


def record_text(record: Record) -> str:
    """Return all text of a record, for example to train a tokenizer."""
    record = _chosen_only(record if record.record_format else validate_record(record))
    if record.record_format == "messages":
        return "\n".join(str(message.get("content") or "") for message in record.fields["messages"])
    if record.record_format == "classification":
        return str(record.fields["input"])
    return "".join(_plain_parts(record))


def _plain_parts(record: Record) -> tuple[str, str]:
    """Return the context and the supervised text of a record that is not a conversation."""
    if record.record_format == "completion":
        return record.fields["prompt"], record.fields["completion"]
    if record.record_format in ("text", "distrust"):
        return "", record.fields["text"]
    raise NothingToSuperviseError(record)
