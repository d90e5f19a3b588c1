"""Render records to the text that the model reads, and mark its supervised characters."""

from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING, Any

from whet.data.sources.chat_messages import Message
from whet.data.sources.record_formats import renaming_hint
from whet.data.sources.source import Record, validate_record
from whet.data.templates.chat import ChatTemplate
from whet.data.templates.turn_spans import MAX_EXACT
from whet.data.tokens.conversation import ConversationRenderer
from whet.data.tokens.loss_mask import Supervise, Turns
from whet.data.tokens.rendering import RenderedPrompt, Rendering, empty_turn_error, weigh
from whet.errors import DataError

if TYPE_CHECKING:
    from whet.data.templates.probe import TemplateProbe

_PREFERENCE_ROLES = (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"))


class NothingToSuperviseError(DataError):
    """The format of a record has no tokens to supervise."""

    def __init__(self, record: Record) -> None:
        super().__init__(
            f"{record.origin}: a {record.record_format} record has no text to supervise for this objective",
            hint=renaming_hint(record.fields, "completion") or "use messages, prompt + completion or text",
        )
        self.record = record


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
        self.template = ChatTemplate(tokenizer, today=today or date.today(), arguments=template_args or {})
        self.conversations = ConversationRenderer(
            self.template,
            supervise=supervise,
            turns=turns,
            supervise_thinking=supervise_thinking,
            allow_empty=allow_empty,
        )
        self.supervise = self.conversations.supervise
        self.allow_empty = allow_empty

    @property
    def probe(self) -> "TemplateProbe":
        """What the chat template reads and writes."""
        return self.template.probe

    def render(self, record: Record) -> Rendering:
        """Return the text of a record of any format that has tokens to supervise."""
        record = record if record.record_format else validate_record(record)
        _check_unlabeled(record)
        messages = self._to_messages(record)
        if messages is not None:
            return self.conversations.render(messages, record)
        prompt, completion = _plain_parts(record)
        if record.record_format == "completion" and not completion and not self.allow_empty:
            raise empty_turn_error("the completion", record)
        if record.record_format != "completion" and self.supervise == "completion":
            raise DataError(
                f"{record.origin}: a {record.record_format} record has no completion, and data.supervise is "
                "completion",
                hint="set data.supervise to assistant, which supervises plain text as well",
            )
        text = prompt + completion
        start = 0 if self.supervise == "all" else len(prompt)
        return weigh(Rendering(text, [(start, len(text))], True, True, record.origin), record)

    def render_turns(self, record: Record) -> tuple[Rendering, ...]:
        """Return the examples of a record: one, unless the template rewrites earlier turns of a conversation.

        See `ConversationRenderer.render_turns`.
        """
        record = record if record.record_format else validate_record(record)
        messages = self._to_messages(record)
        if messages is None:
            return (self.render(record),)
        _check_unlabeled(record)
        return self.conversations.render_turns(messages, record)

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
        return weigh(rendering, record)

    def _render_completion(
        self, prompt: Any, completion: Any, record: Record, *, allow_empty: bool
    ) -> Rendering:
        # Any: text, or messages
        if isinstance(prompt, str) and not self.template.exists:
            if not completion and not allow_empty:
                raise empty_turn_error("chosen", record)
            text = prompt + completion
            return weigh(Rendering(text, [(len(prompt), len(text))], True, True, record.origin), record)
        return self.conversations.render_completion(
            _wrap_messages(prompt, "user"),
            _wrap_messages(completion, "assistant"),
            record,
            allow_empty=allow_empty,
        )

    def render_question(self, record: Record) -> RenderedPrompt | None:
        """Return the prompt and the expected completion, or None for a record without a completion."""
        record = _chosen_only(record if record.record_format else validate_record(record))
        messages = self._to_messages(record)
        if messages is not None:
            has_answer = len(messages) > 1 and messages[-1]["role"] == "assistant"
            if not has_answer or not isinstance(messages[-1].get("content"), str):
                return None
            text: str = self.conversations.render_text(messages[:-1], record, prompt=True)
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
            if isinstance(question, str) and self.template.exists:
                question = [{"role": "user", "content": question}]
            if isinstance(question, str):
                return RenderedPrompt(
                    Rendering(question, [], True, False, record.origin), question, answer, group
                )
            messages = question
        elif record.record_format == "messages" and record.fields["messages"][-1]["role"] != "assistant":
            messages = record.fields["messages"]
        if messages is not None:
            text = self.conversations.render_text(messages, record, prompt=True)
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
        if record.record_format == "completion" and self.template.exists:
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
        if not self.template.exists:
            return []
        if self.conversations.turns != "last":
            conversations = [part for messages in conversations for part in _parts_up_to_turns(messages)]
        return [self.conversations.render_text(messages, record) for messages in conversations if messages]


def _parts_up_to_turns(messages: list[Message]) -> list[list[Message]]:
    """Return a conversation and its beginnings up to each assistant turn; not those of a long one."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
    ends = [index + 1 for index in turns if index + 1 < len(messages)] if len(turns) <= MAX_EXACT else []
    return [*(messages[:end] for end in ends), messages]


def _wrap_messages(content: Any, role: str) -> list[Message]:  # Any: text, or messages
    return [{"role": role, "content": content}] if isinstance(content, str) else content


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
