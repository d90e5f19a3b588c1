"""Where the turns of a conversation stand in its rendered text, learned once per sequence of roles."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whet.data.sources.chat_messages import Message
from whet.data.tokens.template_sandbox import Rendered
from whet.errors import DataError

Render = Callable[[list[Message], bool], Rendered]  # messages, and whether the prompt for an answer follows
Span = tuple[int, int]

_KEPT = 512  # sequences of roles remembered
MAX_EXACT = 16  # turns of which each is found by rendering what is before it and up to its end


@dataclass(frozen=True)
class _Frame:
    """What a kind of turn has around its text: before it since its message began, and at its end."""

    head: str
    tail: str
    after: int  # the turn's end, counted from where the next message begins


class _Turns:
    def __init__(self, messages: list[Message], text: Rendered, render: Render) -> None:
        self.messages, self.text, self.render = messages, text, render
        self.starts = [-1 if start is None else start for start in text.starts]
        self.starts.append(len(text))

    def exact(self, index: int) -> Span | None:
        """A turn's span, its end-of-turn mark included; None where the template rewrites what came before."""
        text, messages = self.text, self.messages
        answers = messages[index]["role"] == "assistant"
        before = self.render(messages[:index], answers) if index else ""
        after = text if index == len(messages) - 1 else self.render(messages[: index + 1], False)
        if not (text.startswith(before) and text.startswith(after)):
            return None
        return len(before), len(after)

    def kind(self, index: int) -> tuple[object, ...] | None:
        """What turns have in common that a template treats alike; None for one that is like no other."""
        message = self.messages[index]
        segment = self.text[self.starts[index] : self.starts[index + 1]]
        content = message.get("content")
        if not content:
            shape = "empty"
        elif not isinstance(content, str) or content.strip() not in segment:
            return None
        else:
            shape = "whole" if content in segment else "trimmed"
        neighbours = (self.messages[index + step]["role"] for step in (-1, 1))
        return (shape, *neighbours, *sorted(message))

    def frame(self, index: int, span: Span) -> _Frame | None:
        """What is around a turn that was found, if it begins after its message does."""
        start, end, following = self.starts[index], span[1], self.starts[index + 1]
        if not 0 <= start <= span[0] <= end:
            return None
        tail = self.text[min(end, following) : max(end, following)]
        return _Frame(self.text[start : span[0]], tail, end - following)

    def framed(self, index: int, frame: _Frame) -> Span | None:
        """The span of another turn of the same kind, if it has the same around it."""
        start, following = self.starts[index], self.starts[index + 1]
        span = start + len(frame.head), following + frame.after
        return span if span[0] <= span[1] and self.frame(index, span) == frame else None


def find_turns(
    messages: list[Message], indices: Sequence[int], text: Rendered, render: Render
) -> list[Span | None]:
    """Find the spans of turns in a conversation's text.

    A turn is what lies between the conversation rendered up to it, with the prompt for an answer, and up to
    its end. In a long conversation only some turns of each kind are found so, at distances that double: the
    rest follows where all of them are alike. Otherwise the time would grow with the square of the turns.

    Returns:
        One span per index. Where the template rewrites a turn, None for all but the last.
    """
    if not indices:
        return []
    turns = _Turns(messages, text, render)
    *earlier, last = indices
    spans = {last: turns.exact(last)}
    groups: dict[tuple[object, ...] | int, list[int]] = defaultdict(list)
    for index in earlier:
        kind = turns.kind(index) if len(indices) > MAX_EXACT else None
        groups[index if kind is None else kind].append(index)
    for group in groups.values():
        frames = set()
        for index in (group[position] for position in _doubling(len(group))):
            spans[index] = span = turns.exact(index)
            if span is None:
                return [*[None] * len(earlier), spans[last]]
            frames.add(turns.frame(index, span))
        [frame] = frames if len(frames) == 1 else [None]
        for index in (index for index in group if index not in spans):
            span = turns.framed(index, frame) if frame is not None else None
            spans[index] = span = span or turns.exact(index)
            if span is None:
                return [*[None] * len(earlier), spans[last]]
    return [spans[index] for index in indices]


def _doubling(size: int) -> Iterator[int]:
    """Positions 0, 1, 3, 7, ... below a size, and its last."""
    position = 0
    while position < size - 1:
        yield position
        position = 2 * position + 1
    yield size - 1


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
