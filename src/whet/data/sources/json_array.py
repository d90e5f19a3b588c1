"""One JSON array of any size, an element at a time."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from whet.data.sources.compressed_files import MAX_RECORD_BYTES, without_bom
from whet.data.sources.strict_json import DECODER, check, explained
from whet.errors import DataError

CHUNK = 2**18
_SPACE = " \t\r\n"


def elements(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any] | DataError]:
    """Each element with its origin, `path#1` and so on; one that cannot be used is an error in its place."""
    # Any: a JSON value
    text = _Window(file, path)
    text.expect("[")
    number = 0
    if text.next_is("]"):
        text.expect("]")
    else:
        while True:
            number += 1
            yield _checked(*text.value(), f"{path}#{number}")
            if text.next_is("]"):
                text.expect("]")
                break
            text.expect(",")
    text.expect_end()


def _checked(source: str, value: Any, origin: str) -> tuple[str, Any] | DataError:  # Any: a JSON value
    try:
        check(source, value, origin)
    except DataError as error:
        return error
    return origin, value


class _Window:
    """The part of a long text that is being read."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        # bytes that are not UTF-8 become half characters, which are refused where their element is
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._text, self._at, self._line = "", 0, 1
        self._ended = False
        self._read(CHUNK, first=True)

    def _read(self, size: int, *, first: bool = False) -> None:
        """Forget what has been used, and read on."""
        chunk = self._file.read(size)
        self._ended = not chunk
        if first:
            chunk = without_bom(chunk, self._path)
        self._line += self._text.count("\n", 0, self._at)
        self._text = self._text[self._at :] + self._decoder.decode(chunk, final=self._ended)
        self._at = 0

    def _peek(self) -> str:
        """The next character that is no space, or nothing at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read(CHUNK)

    def next_is(self, character: str) -> bool:
        return self._peek() == character

    def expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._wrong(f"{character!r} is expected", self._at)
        self._at += 1

    def expect_end(self) -> None:
        if self._peek():
            raise self._wrong("the text goes on after the end of the list", self._at)

    def value(self) -> tuple[str, Any]:  # Any: a JSON value
        """The next value and its text."""
        self._peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > MAX_RECORD_BYTES:
                    raise self._wrong(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise explained(error, f"{self._path}:{self._line_at(self._at)}", text="") from error
            else:
                if end < len(self._text) or self._ended:  # else it may be a number that goes on
                    source, self._at = self._text[self._at : end], end
                    return source, value
            self._read(max(CHUNK, len(self._text) - self._at))  # twice as much each time: linear in all

    def _line_at(self, position: int) -> int:
        return self._line + self._text.count("\n", 0, position)

    def _wrong(self, reason: str, position: int) -> DataError:
        return DataError(f"{self._path}:{self._line_at(position)}: not valid JSON ({reason})")
