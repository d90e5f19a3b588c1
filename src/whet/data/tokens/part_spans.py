"""Locate the parts of a message's content in the rendered conversation."""

from collections.abc import Callable, Sequence

from whet.data.sources.chat_messages import Message
from whet.data.tokens.turn_spans import Render, Span
from whet.errors import DataError

Mark = Callable[[Sequence[int]], list[int] | None]

_FIRST_MARKER = 0xE000  # private use: any character that the text does not contain


def part_boundaries(
    messages: list[Message], index: int, lengths: Sequence[int], *, text: str, span: Span, render: Render
) -> list[int] | None:
    """Return where each part starts in the text and where the last one ends, or None if it cannot be found.

    A marker character is put between the parts. Where the text is the same without it, its position is the
    boundary. Where it is not, because the template trims white space there, the marker moves over the white
    space around it.

    Args:
        messages: The conversation.
        index: The message whose content is in parts.
        lengths: The number of characters of each part.
        text: The rendered conversation.
        span: The turn of the message in it. If the start of its content cannot be found, it is that of the
            turn: templates may move what a content begins with.
        render: Renders a conversation.
    """
    content = messages[index]["content"]
    marker = _unused_character(text, content)
    cuts = [0]
    for length in lengths:
        cuts.append(cuts[-1] + length)

    def mark(positions: Sequence[int]) -> list[int] | None:
        """Return the positions in the text of markers at these positions of the content."""
        pieces = [content[low:high] for low, high in zip([0, *positions], [*positions, None], strict=True)]
        changed = [*messages]
        changed[index] = {**messages[index], "content": marker.join(pieces)}
        try:
            marked = render(changed, False)
        except DataError:  # the template reads the content
            return None
        pieces = marked.split(marker)
        if len(pieces) != len(positions) + 1 or "".join(pieces) != text:
            return None
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        return ends[1:-1]

    boundaries = mark(cuts)
    if boundaries is None:
        located = [_first_located(mark, _around_white_space(content, cut)) for cut in cuts]
        located[0] = span[0] if located[0] is None else located[0]
        boundaries = [position for position in located if position is not None]
        if len(boundaries) < len(cuts):
            return None
    is_ordered = boundaries == sorted(boundaries)
    return boundaries if is_ordered and span[0] <= boundaries[0] and boundaries[-1] <= span[1] else None


def _first_located(mark: Mark, cuts: Sequence[int]) -> int | None:
    return next((positions[0] for cut in cuts if (positions := mark([cut])) is not None), None)


def _around_white_space(content: str, cut: int) -> list[int]:
    """Return a position, and the ends of the white space after and before it."""
    after = len(content) - len(content[cut:].lstrip())
    before = len(content[:cut].rstrip())
    return [cut, after, before]


def _unused_character(*texts: str) -> str:
    code = _FIRST_MARKER
    while any(chr(code) in text for text in texts):
        code += 1
    return chr(code)
