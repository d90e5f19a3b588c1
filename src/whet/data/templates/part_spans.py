"""Locate the parts of a message's content in the rendered conversation."""

import itertools
from collections.abc import Callable, Sequence

from whet.data.sources.chat_messages import Message
from whet.data.templates.turn_spans import Render, Span
from whet.errors import DataError

Mark = Callable[[Sequence[int]], list[int] | None]

_FIRST_MARKER, _LAST_MARKER = 0xF0000, 0x110000  # characters for private use, which texts rarely contain


def part_boundaries(
    messages: list[Message], index: int, lengths: Sequence[int], *, text: str, span: Span, render: Render
) -> list[int] | None:
    """Return where each part starts in the text and where the last one ends, or None if it cannot be found.

    Marker characters are put between the parts. Where the text is the same without them, their positions are
    the boundaries. Where it is not, because the template trims white space there, a marker moves over
    the white space around it.

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
    cuts = [0]
    for length in lengths:
        cuts.append(cuts[-1] + length)
    markers = _unused_characters(len(cuts), text, content)

    def mark(positions: Sequence[int]) -> list[int] | None:
        """Return the positions in the text of markers at these positions of the content."""
        used = markers[: len(positions)]
        pieces = [content[: positions[0]]]
        for marker, low, high in zip(used, positions, [*positions[1:], None], strict=True):
            pieces += (marker, content[low:high])
        changed = [*messages]
        changed[index] = {**messages[index], "content": "".join(pieces)}
        try:
            return _marker_positions(render(changed, False), used, text)
        except DataError:  # the template reads the content
            return None

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


def _marker_positions(marked: str, markers: str, text: str) -> list[int] | None:
    """Return where the markers are, or None if the text is not the same without them, or in another order."""
    positions: list[int] = []
    pieces, start = [], 0
    for marker in markers:
        end = marked.find(marker, start)
        if end < 0:
            return None
        pieces.append(marked[start:end])
        positions.append(end - len(positions))
        start = end + 1
    return positions if "".join([*pieces, marked[start:]]) == text else None


def _unused_characters(count: int, *texts: str) -> str:
    """Return different characters that the texts do not contain."""
    used = set().union(*texts)
    codes = (code for code in range(_FIRST_MARKER, _LAST_MARKER) if chr(code) not in used)
    return "".join(map(chr, itertools.islice(codes, count)))
