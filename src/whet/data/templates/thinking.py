"""Thinking in answers: find it in a turn, and complete turns whose prompt has already opened it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# how models mark their thinking: the opening and the closing tag
_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
_EMPTY = "|".join(rf"{re.escape(start)}\s*{re.escape(end)}\s*" for start, end in _TAGS.items())
_EMPTY_AT_START, _EMPTY_AT_END = re.compile(_EMPTY), re.compile(rf"(?:{_EMPTY})\Z")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # message fields


def open_tag(prompt: str) -> str:
    """Return the tag with which a generation prompt ends, and the white space after it; empty if none."""
    stripped = prompt.rstrip()
    tag = next((tag for tag in _TAGS if stripped.endswith(tag)), None)
    return "" if tag is None else prompt[len(stripped) - len(tag) :]


def thinking_spans(text: str, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the thinking in a turn: its tags, what they enclose, and white space after them."""
    opened = open_tag(text[:low])
    turn = text[low:high]
    if opened:
        closing = turn.find(_TAGS[opened.strip()])
        end = closing + len(_TAGS[opened.strip()]) if closing >= 0 else len(turn)
        end += len(turn[end:]) - len(turn[end:].lstrip())
        yield low, low + end
        low, turn = low + end, turn[end:]
    pattern = "|".join(rf"{re.escape(start)}.*?{re.escape(end)}\s*" for start, end in _TAGS.items())
    for match in re.finditer(pattern, turn, flags=re.DOTALL):
        yield low + match.start(), low + match.end()


def complete_opened_turn(prompt: str, text: str, message: Mapping[str, Any]) -> str | None:
    """Return a conversation whose last turn continues a prompt with a thinking block, or None.

    Templates whose prompt opens a block leave it out of finished turns, or write it with other white space.
    The model has to write the rest of the block, though: the thoughts of the message, if it has any, and
    the closing tag. After a prompt with an empty block, it writes the answer only; messages with thoughts
    do not fit such a prompt.

    Args:
        prompt: The conversation before the turn, with the generation prompt.
        text: The conversation with the turn, as the template writes it.
        message: The message of the turn. Any: JSON values.
    """
    if (block := _EMPTY_AT_END.search(prompt)) is not None:
        return _complete_closed_turn(prompt, text, prompt[: block.start()])
    opened = open_tag(prompt)
    head = prompt.removesuffix(opened)
    if not opened or not text.startswith(head):
        return None
    tag, closing = opened.strip(), _TAGS[opened.strip()]
    turn = text[len(head) :]
    if turn.startswith(tag):
        return prompt + turn.removeprefix(tag).lstrip("\n")
    if closing in turn:  # thoughts without an opening tag, as models of this kind write them
        return prompt + turn
    thoughts = message_thinking(message, tag, closing)
    answer = turn.lstrip("\n")
    return f"{prompt}{thoughts}\n{closing}\n\n{answer}" if thoughts else f"{prompt}{closing}\n\n{answer}"


def _complete_closed_turn(prompt: str, text: str, head: str) -> str | None:
    if not text.startswith(head):
        return None
    turn = text[len(head) :]
    if (block := _EMPTY_AT_START.match(turn)) is not None:  # with other white space
        turn = turn[block.end() :]
    return None if turn.startswith(tuple(_TAGS)) else prompt + turn


def message_thinking(message: Mapping[str, Any], tag: str, closing: str) -> str:
    """Return the thoughts of a message, from its fields or from its content. Any: JSON values."""
    for name in _REASONING:
        if isinstance(message.get(name), str) and message[name].strip():
            return str(message[name]).strip("\n")
    content = message.get("content") or ""
    if closing not in content:
        return ""
    return str(content.split(closing)[0].rpartition(tag)[2]).strip("\n")
