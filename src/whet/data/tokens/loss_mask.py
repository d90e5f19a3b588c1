"""Where a template puts the turns of a conversation, learned once for each sequence of roles."""

from collections.abc import Sequence
from dataclasses import dataclass

from whet.data.sources.chat_messages import Message
from whet.data.tokens.turn_spans import Render, Span, find_turns
from whet.errors import DataError

_KEPT = 512  # sequences of roles remembered


@dataclass(frozen=True)
class Skeleton:
    """The literal text around the contents; for each answer, how much of it is before it and at its end."""

    literals: tuple[str, ...]
    turns: dict[int, Span]

    def spans(self, contents: Sequence[str], text: str) -> dict[int, Span] | None:
        """The answers' places in a rendered text, or None where the template wrote something else."""
        parts = [self.literals[0]]
        for content, literal in zip(contents, self.literals[1:], strict=True):
            parts += (content, literal)
        if "".join(parts) != text:
            return None
        before = [0]
        for content in contents:
            before.append(before[-1] + len(content))
        return {
            index: (start + before[index], end + before[index + 1])
            for index, (start, end) in self.turns.items()
        }


class Skeletons:
    """Skeletons by the roles of a conversation: a text that follows its own needs no prefixes rendered."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Skeleton | None] = {}

    def spans(self, messages: Sequence[Message], text: str, render: Render) -> dict[int, Span] | None:
        """Where the answers stand in the text, or None where only rendering prefixes can tell."""
        if any(message.keys() != {"role", "content"} for message in messages):
            return None
        roles = tuple(message["role"] for message in messages)
        if roles not in self._known and len(self._known) < _KEPT:
            self._known[roles] = _learn(roles, render)
        skeleton = self._known.get(roles)
        return None if skeleton is None else skeleton.spans([m["content"] for m in messages], text)


def _learn(roles: Sequence[str], render: Render) -> Skeleton | None:
    """Render stand-ins for the contents; None when the template does not write each once, in order."""
    stand_ins = [f"qx{index}xq" for index in range(len(roles))]
    messages: list[Message] = [
        {"role": role, "content": stand_in} for role, stand_in in zip(roles, stand_ins, strict=True)
    ]
    try:
        text = render(messages, False)
        literals, rest = [], str(text)
        for stand_in in stand_ins:
            if rest.count(stand_in) != 1:
                return None
            literal, _, rest = rest.partition(stand_in)
            literals.append(literal)
        indices = [index for index, role in enumerate(roles) if role == "assistant" and index > 0]
        turns = {}
        for index, span in zip(indices, find_turns(messages, indices, text, render), strict=True):
            if span is None:
                return None
            sizes = [len(stand_in) for stand_in in stand_ins]
            turns[index] = (span[0] - sum(sizes[:index]), span[1] - sum(sizes[: index + 1]))
    except DataError:  # the template refuses something: the conversation itself will tell what
        return None
    return Skeleton((*literals, rest), turns)
