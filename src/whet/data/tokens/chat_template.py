"""From records to text: what the model will read, and which characters of it are learned."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from whet.data.sources.chat_messages import Message
from whet.data.sources.record_formats import renaming_hint
from whet.data.sources.source import Record, checked
from whet.data.tokens.loss_mask import masked_turns
from whet.data.tokens.template_sandbox import Rendered, render_template
from whet.data.tokens.turn_spans import MAX_EXACT, Render, Skeletons, Span, find_turns
from whet.errors import DataError, shorten, shown

Supervise = Literal["assistant", "last", "all"]
Spans = Sequence[tuple[int, int]]  # character ranges that are learned
_PREFERENCE_ROLES = (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"))


@dataclass(frozen=True)
class Rendering:
    """A record as one text, before it is tokenised."""

    text: str
    spans: Spans
    plain: bool  # outside a chat template: the tokenizer's own BOS in front of it
    ended: bool  # and a learned EOS behind it
    origin: str
    values: tuple[float, ...] = ()  # numbers that came with the record
    only_last: bool = False  # the template rewrites earlier turns, so only the last answer could be found
    judged: bool = False  # read to the end and judged as a whole: nothing follows it


@dataclass(frozen=True)
class AskedRendering:
    """A prompt, what a person would say was asked, and the answer expected."""

    prompt: Rendering
    asked: str
    answer: str
    group: str | None


class NothingToLearnError(DataError):
    """A record of a shape that has no next tokens to learn."""

    def __init__(self, record: Record) -> None:
        super().__init__(
            f"{record.origin}: a {record.shape} record holds nothing to learn for this objective",
            hint=renaming_hint(record.fields, "completion")
            or "it needs messages, prompt + completion or text",
        )
        self.record = record


class Renderer:
    """Turns records into text with one tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: Any,  # Any: a transformers tokenizer
        *,
        supervise: Supervise = "assistant",
        allow_empty: bool = False,
        today: date | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.supervise = supervise
        self.allow_empty = allow_empty  # supervised answers of which no text reaches the model
        self.today = today or date.today()
        # where a template asks for the date, what it writes depends on the day
        self.is_dated = "strftime_now" in str(tokenizer.chat_template)
        self._skeletons = Skeletons()

    def render(self, record: Record) -> Rendering:
        """The text of one record, whatever its shape."""
        record = record if record.shape else checked(record)
        _refuse_unpaired(record)
        messages = self._conversation(record)
        if messages is not None:
            return self._chat(messages, record)
        prompt, completion = _plain_parts(record)
        if record.shape == "completion" and not completion and not self.allow_empty:
            raise _empty_answer("the completion", record)
        text = prompt + completion
        learned_from = 0 if self.supervise == "all" else len(prompt)
        return Rendering(text, [(learned_from, len(text))], True, True, record.origin)

    def pair(self, record: Record) -> tuple[Rendering, Rendering]:
        """A preferred answer and a worse one to the same prompt; only the answers are learned."""
        record = record if record.shape else checked(record)
        if record.shape != "preference":
            raise DataError(
                f"{record.origin}: a {record.shape} record has no two answers to compare",
                hint="it needs prompt, chosen and rejected",
            )
        prompt, chosen, rejected = (record.fields[name] for name in ("prompt", "chosen", "rejected"))
        # an empty answer may well be the worse one
        both = (
            self._answer(prompt, chosen, record, allow_empty=self.allow_empty),
            self._answer(prompt, rejected, record, allow_empty=True),
        )
        if both[0].text == both[1].text:  # a template may strip what told them apart
            raise DataError(f"{record.origin}: chosen and rejected are the same")
        return both

    def judged(self, record: Record) -> Rendering:
        """The text of a record that is classified: as it is, with what the tokenizer puts around any text."""
        record = record if record.shape else checked(record, "classification")
        if record.shape != "classification":
            raise DataError(
                f"{record.origin}: a {record.shape} record has no class", hint="it needs input and label"
            )
        text = record.fields["input"]
        return Rendering(text, [(0, len(text))], True, False, record.origin, judged=True)

    def _answer(self, prompt: Any, answer: Any, record: Record, *, allow_empty: bool) -> Rendering:
        # Any: text, or messages
        if isinstance(prompt, str) and not self.tokenizer.chat_template:
            if not answer and not allow_empty:
                raise _empty_answer("chosen", record)
            text = prompt + answer
            return Rendering(text, [(len(prompt), len(text))], True, True, record.origin)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
            answer = [{"role": "assistant", "content": answer}]
        messages = [*prompt, *answer]
        text = self._rendered(messages, record)
        before = self._rendered(prompt, record, prompt=True)
        if not text.startswith(before):
            raise DataError(f"{record.origin}: the chat template rewrites the prompt when an answer follows")
        masked = {index for index in masked_turns(messages) if index >= len(prompt)}
        spans = self._spans_without(masked, messages, text, record, start=len(before))
        if not allow_empty:
            turns = [
                index
                for index in range(len(prompt), len(messages))
                if messages[index]["role"] == "assistant" and index not in masked
            ]
            self._refuse_empty(dict.fromkeys(turns, (len(before), len(text))), messages, text, record)
        return Rendering(text, spans, False, False, record.origin)

    def question(self, record: Record) -> AskedRendering | None:
        """What to ask and what to expect, or None for a record without an answer."""
        record = _preferred(record if record.shape else checked(record))
        messages = self._conversation(record)
        if messages is not None:
            answered = len(messages) > 1 and messages[-1]["role"] == "assistant"
            if not answered or not isinstance(messages[-1].get("content"), str):
                return None
            text: str = self._rendered(messages[:-1], record, prompt=True)
            asked, answer = str(messages[-2].get("content", "")), messages[-1]["content"]
        else:
            asked, answer = _plain_parts(record)
            text = asked
            if not asked:
                return None
        prompt = Rendering(text, [], messages is None, False, record.origin)
        return AskedRendering(prompt, asked, answer, record.fields.get("group"))

    def prompt(self, record: Record) -> AskedRendering:
        """What comes before an answer, whether the record has one (else it is empty) or not."""
        record = record if record.shape else checked(record)
        messages: list[Message] | None = None
        answer, group = _answer_beside(record), record.fields.get("group")
        if record.shape == "prompt":
            asked = record.fields["prompt"]
            if isinstance(asked, str) and self.tokenizer.chat_template:
                asked = [{"role": "user", "content": asked}]
            if isinstance(asked, str):
                return AskedRendering(Rendering(asked, [], True, False, record.origin), asked, answer, group)
            messages = asked
        elif record.shape == "messages" and record.fields["messages"][-1]["role"] != "assistant":
            messages = record.fields["messages"]
        if messages is not None:
            text = self._rendered(messages, record, prompt=True)
            asked = str(messages[-1].get("content", ""))
            return AskedRendering(Rendering(text, [], False, False, record.origin), asked, answer, group)
        found = self.question(record)
        if found is None:
            raise DataError(
                f"{record.origin}: a {record.shape} record has no prompt to complete",
                hint="it needs messages, prompt or prompt + completion",
            )
        return found

    def _conversation(self, record: Record) -> list[Message] | None:
        """The record as chat messages, or None when it is plain text."""
        if record.shape == "messages":
            messages: list[Message] = record.fields["messages"]
            return messages
        if record.shape == "completion" and self.tokenizer.chat_template:
            prompt, completion = _plain_parts(record)
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return None

    def chats(self, record: Record) -> list[str]:
        """The conversations of a record as the template writes them; of plain text there are none."""
        if record.shape == "preference":
            prompt, *answers = (_as_chat(record.fields[name], role) for name, role in _PREFERENCE_ROLES)
            conversations = [[*prompt, *answer] for answer in answers]
        elif record.shape == "prompt":
            conversations = [_as_chat(record.fields["prompt"], "user")]
        else:
            conversations = [self._conversation(record) or []]
        if not self.tokenizer.chat_template:
            return []
        return [self._rendered(messages, record) for messages in conversations if messages]

    def _chat(self, messages: list[Message], record: Record) -> Rendering:
        """Render a conversation and find its supervised characters.

        Where turns stand is learned once per sequence of roles, unless a text does not follow the pattern.
        """
        text = self._rendered(messages, record)
        masked = masked_turns(messages)
        # templates cannot be asked for what comes before the first message
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
        if self.supervise == "all":
            whole = (0, len(text))
            self._refuse_empty({i: whole for i in turns if i not in masked}, messages, text, record)
            spans_left = self._spans_without(masked, messages, text, record)
            return Rendering(text, spans_left, False, False, record.origin)
        if not turns and messages[0]["role"] == "assistant":
            raise DataError(f"{record.origin}: the assistant says the first message, and no other")
        wanted = [i for i in (turns if self.supervise == "assistant" else turns[-1:]) if i not in masked]
        render = self._rendering(record)
        known = None
        if len(turns) <= MAX_EXACT and not record.fields.get("tools"):
            known = self._skeletons.spans(_shown(messages), text, render)
        spans: Sequence[Span | None]
        if known is not None:
            spans = [known[index] for index in wanted]
        else:
            spans = find_turns(messages, wanted, text, render)
        found = [span for span in spans if span is not None]
        rewritten = len(found) < len(spans)
        if rewritten and (not spans or spans[-1] is None):
            raise self._lost_turn(wanted[-1], messages, text, record)
        if rewritten:
            wanted, found = wanted[-1:], found[-1:]
        self._refuse_empty(dict(zip(wanted, found, strict=True)), messages, text, record)
        return Rendering(text, found, False, False, record.origin, only_last=rewritten)

    def _lost_turn(self, index: int, messages: list[Message], text: str, record: Record) -> DataError:
        """Return the error for a turn that does not follow the prompt for it."""
        prompt = self._rendered(messages[:index], record, prompt=True)
        if text.startswith(self._rendered(messages[:index], record)):  # only the prompt for it differs
            pairs = enumerate(zip(prompt, text, strict=False))
            opening = prompt[next((at for at, (one, other) in pairs if one != other), len(text)) :]
            return DataError(
                f"{record.origin}: the chat template ends a prompt with {shown(opening)}, and does not write "
                f"that before message {index + 1}",
                hint="set data.supervise to all, or edit the model's chat_template.jinja so that both agree",
            )
        return DataError(
            f"{record.origin}: the chat template rewrites earlier turns, so message {index + 1} "
            "cannot be found in the rendered text",
            hint="set data.supervise to all",
        )

    def _spans_without(
        self,
        masked: Collection[int],
        messages: list[Message],
        text: Rendered,
        record: Record,
        *,
        start: int = 0,
    ) -> Spans:
        """Everything from `start` on, less the masked messages."""
        found = []
        indices = sorted(masked)
        spans = find_turns(messages, indices, text, self._rendering(record))
        for index, span in zip(indices, spans, strict=True):
            if span is None:
                raise DataError(
                    f"{record.origin}: the chat template rewrites earlier turns, so the masked message "
                    f"{index + 1} cannot be found in the rendered text"
                )
            found.append((start, max(start, span[0])))
            start = max(start, span[1])
        return [(low, high) for low, high in (*found, (start, len(text))) if low < high]

    def _refuse_empty(
        self, spans: Mapping[int, Span], messages: list[Message], text: str, record: Record
    ) -> None:
        """Refuse a supervised answer (index: where it stands) of which the template writes nothing."""
        for index, (low, high) in spans.items() if not self.allow_empty else ():
            content = messages[index].get("content") or ""
            if content.strip() and text.find(content.strip(), low, high) >= 0:
                continue
            others = [name for name in messages[index] if name not in ("role", "content", "train")]
            fields = [messages[index][name] for name in others]
            if high - low < len(text) and _is_written(text[low:high], fields):
                continue
            bare = {"role": messages[index]["role"], "content": ""}
            same = not content and not others
            if not same:
                with contextlib.suppress(DataError):
                    same = self._rendered([*messages[:index], bare, *messages[index + 1 :]], record) == text
            if same:
                name = f"message {index + 1} (assistant)" if record.shape == "messages" else "the answer"
                raise _empty_answer(name, record, left_out=[*(["content"] if content else []), *others])

    def _rendering(self, record: Record) -> Render:
        return lambda part, prompt: self._rendered(part, record, prompt=prompt)

    def _rendered(self, messages: list[Message], record: Record, *, prompt: bool = False) -> Rendered:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{record.origin}: chat messages need a chat template, and this tokenizer has none",
                hint="use prompt + completion or text records, or an instruct model",
            )
        tools = record.fields.get("tools")
        # beside tool_calls, content may be null: some templates ask for that, others write None or fail
        has_null = any(message.get("content") is None for message in messages)
        try:
            text = render_chat(self.tokenizer, _shown(messages), tools=tools, prompt=prompt, today=self.today)
        except DataError as error:
            if has_null:
                return self._rendered(_filled(messages), record, prompt=prompt)
            raise DataError(f"{record.origin}: {error.message}", hint=error.hint) from error
        if has_null and "None" in text:
            other = self._rendered(_filled(messages), record, prompt=prompt)
            return other if other.count("None") < text.count("None") else text
        return text


def render_chat(
    tokenizer: Any,  # Any: a transformers tokenizer
    messages: Sequence[Message],
    *,
    prompt: bool,
    tools: Any = None,  # Any: JSON values
    today: date | None = None,
) -> Rendered:
    """Render messages with a tokenizer's chat template: the one way for every chat."""
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:  # several templates, and none is the default
        raise DataError(shorten(str(error))) from error
    special = tokenizer.special_tokens_map
    return render_template(template, messages, tools=tools, prompt=prompt, special=special, today=today)


def _shown(messages: list[Message]) -> list[Message]:
    """The messages as a template gets them: without the mark that says what is learned."""
    if not any("train" in message for message in messages):
        return messages
    return [{name: value for name, value in message.items() if name != "train"} for message in messages]


def _is_written(turn: str, values: list[Any]) -> bool:  # Any: JSON values
    """Whether a turn's text has a text of these fields in it, however deep."""
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, str) and len(value) > 3 and value in turn:
            return True
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
    return False


def _as_chat(given: Any, role: str) -> list[Message]:  # Any: text, or messages
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def _filled(messages: list[Message]) -> list[Message]:
    return [{**message, "content": message.get("content") or ""} for message in messages]


def _refuse_unpaired(record: Record) -> None:
    """Refuse an answer that is marked as good or bad: imitation would learn both alike."""
    label = record.fields.get("label")
    if record.shape not in ("completion", "messages") or str(label).lower() not in ("true", "false"):
        return
    raise DataError(
        f"{record.origin}: an answer with label: {str(label).lower()} is a judged answer (as for KTO), and "
        "this objective would imitate good and bad answers alike",
        hint="keep the good answers and remove the field label, or pair answers as chosen and rejected "
        "for objective.kind: dpo",
    )


def _empty_answer(name: str, record: Record, *, left_out: Sequence[str] = ()) -> DataError:
    why = f": the chat template leaves out {', '.join(left_out)}" if left_out else ""
    fix = "use a model whose chat template writes it" if left_out else "give it a text"
    mask = ", mask it with weight: 0" if record.shape == "messages" else ""
    return DataError(
        f"{record.origin}: {name} renders empty{why}",
        hint=f"{fix}{mask}, or set data.allow_empty_answers: true to supervise empty answers",
    )


def _preferred(record: Record) -> Record:
    """Of a preference, the prompt and the better answer; of anything else, itself."""
    if record.shape != "preference":
        return record
    prompt, chosen = record.fields["prompt"], record.fields["chosen"]
    if isinstance(prompt, str):
        return Record({**record.fields, "completion": chosen}, record.origin, "completion")
    return Record({**record.fields, "messages": [*prompt, *chosen]}, record.origin, "messages")


def _answer_beside(record: Record) -> str:
    """The answer in a field of its own, where there is one: the same that the rewards look for."""
    given = [record.fields.get(name) for name in ("completion", "answer")]
    return next((str(each) for each in given if each is not None), "")


def text_of(record: Record) -> str:
    """Everything a record says, for what reads texts and not roles."""
    record = _preferred(record if record.shape else checked(record))
    if record.shape == "messages":
        return "\n".join(str(message.get("content") or "") for message in record.fields["messages"])
    if record.shape == "classification":
        return str(record.fields["input"])
    return "".join(_plain_parts(record))


def _plain_parts(record: Record) -> tuple[str, str]:
    """Context and what is learned of a record that is not a conversation."""
    if record.shape == "completion":
        return record.fields["prompt"], record.fields["completion"]
    if record.shape in ("text", "distrust"):
        return "", record.fields["text"]
    raise NothingToLearnError(record)
