"""Render conversations, and find the supervised characters of their turns."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet.data.sources.chat_messages import Message
from whet.data.sources.message_weights import MARKS, PART_WEIGHTS
from whet.data.sources.source import Record
from whet.data.templates.chat import ChatTemplate, without_marks
from whet.data.templates.sandbox import Rendered
from whet.data.templates.turn_spans import MAX_EXACT, Render, Skeletons, Span, find_turns
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
from whet.data.tokens.rendering import Rendering, empty_turn_error, number_examples, weigh, with_spans
from whet.errors import DataError, short_repr


class LostTurnError(DataError):
    """A turn does not follow the prompt with which the model is served."""


class ConversationRenderer:
    """Renders conversations with one chat template and one rule for the loss mask."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        supervise: Supervise,
        turns: Turns,
        supervise_thinking: bool,
        allow_empty: bool,
    ) -> None:
        self.template = template
        self.supervise = check_supervise(supervise)
        self.turns = turns
        self.supervise_thinking = supervise_thinking
        self.allow_empty = allow_empty  # accept supervised turns that render as empty text
        self._skeletons = Skeletons()

    def render_text(self, messages: list[Message], record: Record, *, prompt: bool = False) -> Rendered:
        """Return the text of messages that belong to a record, with the record's tools."""
        tools = record.fields.get("tools")
        return self.template.render(messages, tools=tools, prompt=prompt, origin=record.origin)

    def render(self, messages: list[Message], record: Record) -> Rendering:
        """Render a conversation and find its supervised characters.

        Turn positions are computed once per sequence of roles, unless a text deviates from that pattern.
        """
        text = self.render_text(messages, record)
        rendering = Rendering(text, [], False, False, record.origin)
        if self.supervise == "all":
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
            everything = {i: (0, len(text)) for i in turns if is_supervised(messages[i])}
            self._check_not_empty(everything, messages, text, record)
            return weigh(with_spans(rendering, self._weighted_spans(messages, text, record)), record)
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

    def render_turns(self, messages: list[Message], record: Record) -> tuple[Rendering, ...]:
        """Return the examples of a conversation: one, unless the template rewrites earlier turns.

        Then no text contains the prompts of all supervised turns. The conversation becomes several examples,
        each of which ends with a supervised turn after the prompt that the model is served at that point.
        """
        if self.turns == "last" or self.supervise == "all":
            return (self.render(messages, record),)
        supervised = self._supervised_turns(messages, record)
        text = self.render_text(messages, record)
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
        return number_examples(examples[::-1])

    def _turn_texts(self, index: int, messages: list[Message], record: Record) -> tuple[Rendered, str]:
        """Return the conversation up to a turn, and the prompt that the turn follows."""
        is_assistant = messages[index]["role"] == "assistant"
        prompt = self.render_text(messages[:index], record, prompt=is_assistant) if index else ""
        return self.render_text(messages[: index + 1], record), prompt

    def render_completion(
        self, prompt: list[Message], completion: list[Message], record: Record, *, allow_empty: bool
    ) -> Rendering:
        """Return a prompt and its completion, which is supervised.

        Args:
            prompt: The messages before the completion.
            completion: The messages of the completion.
            record: Their record.
            allow_empty: Whether to accept a completion that renders as empty text.
        """
        messages = [*prompt, *completion]
        text = self.render_text(messages, record)
        prefix = self.render_text(prompt, record, prompt=True)
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
        return weigh(with_spans(Rendering(text, [], False, False, record.origin), spans), record)

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
        return weigh(with_spans(Rendering(text, [], False, False, record.origin), weighted), record)

    def _turn_spans(
        self, indices: list[int], messages: list[Message], text: Rendered, record: Record
    ) -> Sequence[Span | None]:
        """Return the spans of turns, from the skeleton of their roles if the text has one."""
        render = self._renderer_for(record)
        assistant_turns = sum(message["role"] == "assistant" for message in messages[1:])
        if assistant_turns <= MAX_EXACT and not record.fields.get("tools"):
            skeleton = self._skeletons.spans(without_marks(messages), text, render)
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
        prompt = self.render_text(messages[:index], record, prompt=True)
        finished = self.render_text(messages[: index + 1], record)
        from whet.data.templates.thinking import complete_opened_turn

        completed = complete_opened_turn(prompt, finished, messages[index])
        if completed is None or PART_WEIGHTS in messages[index]:
            raise self._lost_turn_error(index, messages, text, record)
        span = (len(prompt), len(completed))
        if not self.allow_empty and not (messages[index].get("content") or messages[index].get("tool_calls")):
            raise empty_turn_error(f"message {index + 1} (assistant)", record)
        pieces = self._mask_thinking([(*span, turn_weight(messages[index]))], span, completed)
        rendering = with_spans(Rendering(completed, [], False, False, record.origin), pieces)
        return weigh(replace(rendering, only_last=len(supervised) > 1), record)

    def _mask_thinking(self, pieces: list[WeightedSpan], span: Span, text: str) -> list[WeightedSpan]:
        """Return the weighted spans of an assistant turn, without its thinking if that is not supervised."""
        if self.supervise_thinking:
            return pieces
        from whet.data.templates.thinking import thinking_spans

        return overlay(pieces, [(low, high, 0.0) for low, high in thinking_spans(text, *span)])

    def _lost_turn_error(
        self, index: int, messages: list[Message], text: str, record: Record
    ) -> LostTurnError:
        """Return the error for a turn that does not follow its generation prompt."""
        prompt = self.render_text(messages[:index], record, prompt=True)
        without_prompt = self.render_text(messages[:index], record)
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
        from whet.data.templates.part_spans import part_boundaries

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
                    is_empty = self.render_text(emptied, record) == text
            if is_empty:
                name = (
                    f"message {index + 1} (assistant)"
                    if record.record_format == "messages"
                    else "the completion"
                )
                raise empty_turn_error(
                    name, record, left_out=[*(["content"] if content else []), *extra_fields]
                )

    def _renderer_for(self, record: Record) -> Render:
        return lambda part, prompt: self.render_text(part, record, prompt=prompt)


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
