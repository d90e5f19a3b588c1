"""Parse conversations in common chat formats into one form: messages with a role and text content."""

from collections.abc import Collection
from itertools import takewhile
from typing import Any

from whet.data.sources.message_weights import PART_WEIGHTS, normalize_weight, part_weights
from whet.data.sources.strict_json import parse_json_text
from whet.errors import DataError

Message = dict[str, Any]  # Any: templates may read arbitrary fields
MessageFields = dict[str, Any]  # Any: JSON values

MESSAGE_LISTS = ("messages", "prompt", "chosen", "rejected")  # fields that may contain messages after parsing

# speaker names of ShareGPT and of data sets in the same format
_ROLE_OF_SPEAKER = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_CALL_SPEAKERS = ("function_call", "tool_call")  # turns of the assistant whose value is a call as JSON
_MEDIA_FIELDS = ("images", "videos", "audios")  # columns of other tools for media beside the text


def parse_messages(fields: MessageFields, name: str) -> list[Message]:
    """Return the validated messages in the field `name`: objects with `role`, or ShareGPT turns."""
    for media in _MEDIA_FIELDS:
        if fields.get(media):
            raise DataError(
                f"the field {media} belongs to a multimodal model, and whet trains text models only",
                hint=f"set data.ignore to [{media}] to train on the text alone",
            )
    messages = fields[name]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{name} must be a list with at least one message")
    parse = _parse_turn if _is_turn(messages[0]) else _parse_message
    return [parse(message, number) for number, message in enumerate(messages, start=1)]


def _is_turn(message: Any) -> bool:  # Any: a JSON value
    """Return whether a message is written as a ShareGPT turn."""
    return isinstance(message, dict) and "from" in message and "role" not in message


def _parse_message(message: Any, number: int) -> Message:  # Any: a JSON value
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"message {number} must be an object with a role")
    content = message.get("content")
    weights = None
    if isinstance(content, list):
        parts, content = content, _join_text_parts(content, number)
        weights = part_weights(parts, number)
    # tables add the fields of all messages to each message, as nulls
    fields = {name: value for name, value in message.items() if value is not None or name == "content"}
    if isinstance(content, str):
        fields["content"] = content
        fields |= {} if weights is None else {PART_WEIGHTS: weights}
    elif content is not None or "tool_calls" not in fields:
        kind = "null" if content is None else type(content).__name__
        raise DataError(
            f"message {number} ({message['role']}) has no text content: it is {kind}",
            hint='write "" for empty text; only a message with tool_calls may omit its content',
        )
    return normalize_weight(fields, number)


def _join_text_parts(parts: list[Any], number: int) -> str:  # Any: JSON values
    """Return the text of content that is a list of parts."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"message {number} has a content part of type {kind}: that needs a multimodal model, and "
                "whet trains text models only",
                hint="remove the part, or set data.on_bad_record: skip to leave such records out",
            )
    return "".join(part["text"] for part in parts)


def without_fields(fields: MessageFields, names: Collection[str]) -> MessageFields:
    """Return a record without the fields in `names`, neither in the record nor in its messages."""

    def without(mapping: MessageFields) -> MessageFields:
        return {name: value for name, value in mapping.items() if name not in names}

    return {
        name: [without(item) if isinstance(item, dict) else item for item in value]
        if name in (*MESSAGE_LISTS, "conversations") and isinstance(value, list)
        else value
        for name, value in without(fields).items()
    }


def parse_conversations(fields: MessageFields) -> list[Message]:
    """Return the messages of `conversations`, after the system message in `system`, if there is one."""
    messages = parse_messages(fields, "conversations")
    system = fields.get("system")
    if isinstance(system, str) and system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _parse_turn(turn: Any, number: int) -> Message:  # Any: a JSON value
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f"turn {number} must be an object with from and value")
    extra = {
        name: value for name, value in turn.items() if value is not None and name not in ("from", "value")
    }
    return normalize_weight({**extra, **_speech(turn, number)}, number)


def _speech(turn: MessageFields, number: int) -> Message:
    """Return the role and content of a ShareGPT turn, or the tool calls in it."""
    speaker, value = turn.get("from"), turn["value"]
    if speaker in _CALL_SPEAKERS:
        return {"role": "assistant", "content": "", "tool_calls": _parse_calls(value, number)}
    if not isinstance(speaker, str) or speaker not in _ROLE_OF_SPEAKER:
        known = ", ".join((*_ROLE_OF_SPEAKER, *_CALL_SPEAKERS))
        raise DataError(
            f"turn {number} has the unknown speaker {str(speaker)[:40]!r}",
            hint=f"known speakers: {known}; write records with other roles as messages",
        )
    return {"role": _ROLE_OF_SPEAKER[speaker], "content": value}


def _parse_calls(value: str, number: int) -> list[Message]:
    """Return the tool calls of a `function_call` turn: a JSON object with name and arguments, or a list."""
    parsed = parse_json_text(value, f"turn {number} (function_call)")
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f"turn {number} (function_call) must be a JSON object with name and arguments, or a list of them"
        )
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": _parse_arguments(call, number)}}
        for call in calls
    ]


def _parse_arguments(call: MessageFields, number: int) -> Any:  # Any: a JSON value
    arguments = call.get("arguments", {})
    is_text = isinstance(arguments, str) and arguments.lstrip().startswith("{")
    return parse_json_text(arguments, f"turn {number}: arguments") if is_text else arguments


def parse_tools(fields: MessageFields) -> MessageFields:
    """Return the `tools` of a conversation, if it has any. Tables often store them as JSON text."""
    tools = fields.get("tools")
    if isinstance(tools, str):
        tools = parse_json_text(tools, "tools") if tools.strip() else None
    if tools is None:  # no tools, or an empty string, which must be replaced
        return {} if fields.get("tools") is None else {"tools": []}
    if not isinstance(tools, list):
        raise DataError(f"tools must be a list, not {type(tools).__name__}")
    return {"tools": tools}


def parse_bare_tools(fields: MessageFields) -> MessageFields:
    """Return `tools` in OpenAI's form: ShareGPT records often describe functions without the wrapper."""
    return {
        name: [
            {"type": "function", "function": tool} if isinstance(tool, dict) and "name" in tool else tool
            for tool in tools
        ]
        for name, tools in parse_tools(fields).items()
    }


def split_pair(
    prompt: list[Message] | None, chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split a preference pair into the prompt, the chosen completion and the rejected completion.

    The completions may start with the messages of the prompt. Without a separate prompt, or if both
    conversations contain it, the prompt is their longest shared prefix, excluding the last message of the
    shorter one.
    """
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if prompt is None and not shared:
        raise DataError("chosen and rejected share no message, and the record has no prompt")
    prefix = chosen[:shared]
    if prompt is None or any(prefix[index : index + len(prompt)] == prompt for index in range(shared)):
        return prefix, chosen[shared:], rejected[shared:]
    return prompt, _strip_prompt(prompt, chosen), _strip_prompt(prompt, rejected)


def _strip_prompt(prompt: list[Message], completion: list[Message]) -> list[Message]:
    has_prompt = len(completion) > len(prompt) and completion[: len(prompt)] == prompt
    return completion[len(prompt) :] if has_prompt else completion
