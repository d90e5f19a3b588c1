"""Conversations in the forms people write them, brought to one: messages with a role and a text."""

from collections.abc import Collection
from itertools import takewhile
from typing import Any

from whet.data.sources.strict_json import parse_text
from whet.errors import DataError, shown

Message = dict[str, Any]  # Any: templates read fields of their own choice
MessageFields = dict[str, Any]  # Any: JSON values

MESSAGE_LISTS = ("messages", "prompt", "chosen", "rejected")  # fields that may hold messages, once read

# ShareGPT's names of the speakers, and those of the sets made after it
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}


def messages_of(fields: MessageFields, name: str) -> list[Message]:
    """The messages in a field."""
    messages = fields[name]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{name} must be a list of at least one message")
    return [_message(message, number) for number, message in enumerate(messages, start=1)]


def _message(message: Any, number: int) -> Message:  # Any: a JSON value
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"message {number} must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, number)
    # tables give every message the fields of all others, as nulls
    given = {name: value for name, value in message.items() if value is not None or name == "content"}
    if isinstance(content, str):
        given["content"] = content
    elif content is not None or "tool_calls" not in given:
        kind = "null" if content is None else type(content).__name__
        raise DataError(
            f"message {number} ({message['role']}) has no text content: it is {kind}",
            hint='write "" for an empty text; only a message with tool_calls may have no content',
        )
    return _with_mask(given, number)


def _with_mask(message: Message, number: int) -> Message:
    """The message with `train: False` where it is not supervised, and else without `train` and `weight`."""
    if "weight" not in message and "train" not in message:
        return message
    weight, train = message.get("weight", 1), message.get("train", True)
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise DataError(
            f"message {number}: weight must be 0 or 1, not {shown(weight)}",
            hint="0 makes the message context only; 1 supervises it as usual",
        )
    if not isinstance(train, bool):
        raise DataError(f"message {number}: train must be true or false, not {shown(train)}")
    rest = {name: value for name, value in message.items() if name not in ("weight", "train")}
    return rest if weight and train else {**rest, "train": False}


def _joined(parts: list[Any], number: int) -> str:  # Any: JSON values
    """The text of content that is given in parts."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"message {number} has a part that is no text ({kind})", hint="whet trains on text only"
            )
    return "".join(part["text"] for part in parts)


def without_fields(fields: MessageFields, names: Collection[str]) -> MessageFields:
    """A record without some fields, neither in itself nor in its messages."""

    def kept(given: MessageFields) -> MessageFields:
        return {name: value for name, value in given.items() if name not in names}

    return {
        name: [kept(each) if isinstance(each, dict) else each for each in value]
        if name in (*MESSAGE_LISTS, "conversations") and isinstance(value, list)
        else value
        for name, value in kept(fields).items()
    }


def turns_of(fields: MessageFields) -> list[Message]:
    """The messages of `conversations`: ShareGPT's from and value, or messages under another name."""
    turns = fields["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError("conversations must be a list of at least one turn")
    if isinstance(turns[0], dict) and "role" in turns[0]:
        messages = messages_of(fields, "conversations")
    else:
        messages = [_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    system = fields.get("system")
    if isinstance(system, str) and system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _turn(turn: Any, number: int) -> Message:  # Any: a JSON value
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f"turn {number} of conversations must be an object with from and value")
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise DataError(
            f"turn {number} of conversations is from {str(speaker)[:40]!r}",
            hint=f"known speakers: {', '.join(_SPEAKERS)}; anything else is written as messages",
        )
    others = {
        name: value for name, value in turn.items() if value is not None and name not in ("from", "value")
    }
    return _with_mask({**others, "role": _SPEAKERS[speaker], "content": turn["value"]}, number)


def tools_of(fields: MessageFields) -> MessageFields:
    """The `tools` of a conversation, where there are any; tables often hold them as JSON text."""
    tools = fields.get("tools")
    if isinstance(tools, str):
        tools = parse_text(tools, "tools") if tools.strip() else None
    if tools is None:  # none at all, or an empty text, which must not stay
        return {} if fields.get("tools") is None else {"tools": []}
    if not isinstance(tools, list):
        raise DataError(f"tools must be a list, not {type(tools).__name__}")
    return {"tools": tools}


def split_pair(
    prompt: list[Message] | None, chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt and the two answers of a preference; answers may begin with the messages of the prompt.

    Without a prompt, or where they hold it, it is what both conversations begin with, up to the last message
    of the shorter.
    """
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if prompt is None and not shared:
        raise DataError("chosen and rejected have no message in common, and there is no prompt beside them")
    begin = chosen[:shared]
    if prompt is None or any(begin[place : place + len(prompt)] == prompt for place in range(shared)):
        return begin, chosen[shared:], rejected[shared:]
    return prompt, _after(prompt, chosen), _after(prompt, rejected)


def _after(prompt: list[Message], answer: list[Message]) -> list[Message]:
    repeats = len(answer) > len(prompt) and answer[: len(prompt)] == prompt
    return answer[len(prompt) :] if repeats else answer
