"""Tools and tool calls in the form that a chat template reads."""

import json
from collections.abc import Sequence
from typing import Any

from whet.data.sources.chat_messages import Message
from whet.data.templates.probe import ToolArguments

Json = Any  # Any: JSON values


def normalize_tools(tools: Json) -> Json:
    """Return tools as {"type": "function", "function": ...}, without the nulls that tables add."""
    if not isinstance(tools, list):
        return tools
    return [_wrap(without_nulls(tool)) for tool in tools]


def _wrap(tool: Json) -> Json:
    is_bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    if not is_bare or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def without_nulls(value: Json) -> Json:
    """Return a value without null fields of its objects, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def normalize_calls(messages: Sequence[Message], form: ToolArguments | None) -> list[Message]:
    """Return messages whose tool calls have arguments in the form that the template reads, without nulls."""
    return [
        {**message, "tool_calls": [_call(call, form) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _call(call: Json, form: ToolArguments | None) -> Json:
    if not isinstance(call, dict):
        return call
    clean = without_nulls(call)
    if isinstance(clean.get("function"), dict):
        return {**clean, "function": _with_arguments(clean["function"], form)}
    return _with_arguments(clean, form)


def _with_arguments(function: Json, form: ToolArguments | None) -> Json:
    arguments = function.get("arguments")
    if form == "object" and isinstance(arguments, str):
        return {**function, "arguments": _parsed(arguments)}
    if form == "json" and isinstance(arguments, dict):
        return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return function


def _parsed(text: str) -> Json:
    """Return the object that a text holds, or the text if it is not one."""
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
