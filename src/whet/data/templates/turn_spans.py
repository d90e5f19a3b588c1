"""Find the character spans of turns in a rendered conversation, cached per sequence of roles."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whet.data.sources.chat_messages import Message
from whet.data.templates.sandbox import Rendered
from whet.errors import DataError

Render = Callable[[list[Message], bool], Rendered]  # messages, and whether to add the generation prompt
Span = tuple[int, int]

_MAX_CACHED = 512  # sequences of roles
MAX_EXACT = 16  # up to this many turns, each is located by rendering its prefixes


@dataclass(frozen=True)
class _Frame:
    """The literal text that a template writes before and after the content of a kind of turn."""

    head: str
    tail: str
    after: int  # end of the turn, relative to the start of the next message


class _TurnFinder:
    def __init__(self, messages: list[Message], text: Rendered, render: Render) -> None:
        self.messages, self.text, self.render = messages, text, render
        self.starts = [-1 if start is None else start for start in text.starts]
        self.starts.append(len(text))

    def locate_exactly(self, index: int) -> Span | None:
        """Return the span of a turn with its end token; None if the template rewrites earlier text."""
        text, messages = self.text, self.messages
        is_assistant = messages[index]["role"] == "assistant"
        before = self.render(messages[:index], is_assistant) if index else ""
        after = text if index == len(messages) - 1 else self.render(messages[: index + 1], False)
        if not (text.startswith(before) and text.startswith(after)):
            return None
        return len(before), len(after)

    def kind(self, index: int) -> tuple[object, ...] | None:
        """Return the properties that determine the frame of a turn; None if its text lacks its content."""
        message = self.messages[index]
        segment = self.text[self.starts[index] : self.starts[index + 1]]
        content = message.get("content")
        if not content:
            content_kind = "empty"
        elif not isinstance(content, str) or content.strip() not in segment:
            return None
        else:
            content_kind = "unchanged" if content in segment else "trimmed"
        neighbor_roles = (self.messages[index + step]["role"] for step in (-1, 1))
        return (content_kind, message["role"], *neighbor_roles, *sorted(message))

    def frame(self, index: int, span: Span) -> _Frame | None:
        """Return the frame of a turn with a known span, or None if the span starts before its message."""
        start, end, following = self.starts[index], span[1], self.starts[index + 1]
        if not 0 <= start <= span[0] <= end:
            return None
        tail = self.text[min(end, following) : max(end, following)]
        return _Frame(self.text[start : span[0]], tail, end - following)

    def locate_by_frame(self, index: int, frame: _Frame) -> Span | None:
        """Return the span of another turn of the same kind, if it has the same frame."""
        start, following = self.starts[index], self.starts[index + 1]
        span = start + len(frame.head), following + frame.after
        return span if span[0] <= span[1] and self.frame(index, span) == frame else None


def find_turns(
    messages: list[Message], indices: Sequence[int], text: Rendered, render: Render
) -> list[Span | None]:
    """Find the spans of turns in the text of a conversation.

    A turn starts where the conversation before it ends, rendered with the generation prompt, and ends where
    the conversation rendered up to it ends. In a long conversation, only some turns of each kind are located
    this way, at doubling distances, because the time would grow quadratically. If their frames are all equal,
    the frame locates the remaining turns.

    Returns:
        One span per index. If the template rewrites a turn, all spans but the last are None.
    """
    if not indices:
        return []
    turns = _TurnFinder(messages, text, render)
    *earlier, last = indices
    spans = {last: turns.locate_exactly(last)}
    groups: dict[tuple[object, ...] | int, list[int]] = defaultdict(list)
    for index in earlier:
        kind = turns.kind(index) if len(indices) > MAX_EXACT else None
        groups[index if kind is None else kind].append(index)
    for group in groups.values():
        frames = set()
        for index in (group[position] for position in _doubling_positions(len(group))):
            spans[index] = span = turns.locate_exactly(index)
            if span is None:
                return [*[None] * len(earlier), spans[last]]
            frames.add(turns.frame(index, span))
        [frame] = frames if len(frames) == 1 else [None]
        for index in (index for index in group if index not in spans):
            span = turns.locate_by_frame(index, frame) if frame is not None else None
            spans[index] = span = span or turns.locate_exactly(index)
            if span is None:
                return [*[None] * len(earlier), spans[last]]
    return [spans[index] for index in indices]


def _doubling_positions(size: int) -> Iterator[int]:
    """Yield the positions 0, 1, 3, 7, ... below a size, and the last position."""
    position = 0
    while position < size - 1:
        yield position
        position = 2 * position + 1
    yield size - 1


@dataclass(frozen=True)
class Skeleton:
    """The literal text of a template around the contents of a sequence of roles.

    `turns` maps each assistant turn to its span, measured in literal characters only.
    """

    literals: tuple[str, ...]
    turns: dict[int, Span]

    def spans(self, contents: Sequence[str], text: str) -> dict[int, Span] | None:
        """Return the spans of the assistant turns in a text, or None if the text deviates."""
        parts = [self.literals[0]]
        for content, literal in zip(contents, self.literals[1:], strict=True):
            parts += (content, literal)
        if "".join(parts) != text:
            return None
        content_before = [0]
        for content in contents:
            content_before.append(content_before[-1] + len(content))
        return {
            index: (start + content_before[index], end + content_before[index + 1])
            for index, (start, end) in self.turns.items()
        }


class Skeletons:
    """A cache of skeletons by roles: a text that matches its skeleton needs no further renderings."""

    def __init__(self) -> None:
        self._by_roles: dict[tuple[str, ...], Skeleton | None] = {}

    def spans(self, messages: Sequence[Message], text: str, render: Render) -> dict[int, Span] | None:
        """Return the spans of the assistant turns, or None if only rendering prefixes can find them."""
        if any(message.keys() != {"role", "content"} for message in messages):
            return None
        roles = tuple(message["role"] for message in messages)
        if roles not in self._by_roles and len(self._by_roles) < _MAX_CACHED:
            self._by_roles[roles] = _build_skeleton(roles, render)
        skeleton = self._by_roles.get(roles)
        return None if skeleton is None else skeleton.spans([m["content"] for m in messages], text)


def _build_skeleton(roles: Sequence[str], render: Render) -> Skeleton | None:
    """Render placeholder contents; return None if the template does not write each once, in order."""
    placeholders = [f"qx{index}xq" for index in range(len(roles))]
    messages: list[Message] = [
        {"role": role, "content": placeholder} for role, placeholder in zip(roles, placeholders, strict=True)
    ]
    try:
        text = render(messages, False)
        literals, rest = [], str(text)
        for placeholder in placeholders:
            if rest.count(placeholder) != 1:
                return None
            literal, _, rest = rest.partition(placeholder)
            literals.append(literal)
        indices = [index for index, role in enumerate(roles) if role == "assistant" and index > 0]
        turns = {}
        for index, span in zip(indices, find_turns(messages, indices, text, render), strict=True):
            if span is None:
                return None
            sizes = [len(placeholder) for placeholder in placeholders]
            turns[index] = (span[0] - sum(sizes[:index]), span[1] - sum(sizes[: index + 1]))
    except DataError:  # the error is raised again when the conversation itself is rendered
        return None
    return Skeleton((*literals, rest), turns)
