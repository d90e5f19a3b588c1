"""Read a JSON array of any size element by element."""

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from whet.data.sources.compressed_files import MAX_RECORD_BYTES, DataFile, strip_bom
from whet.data.sources.strict_json import DECODER, check_json_value, to_data_error
from whet.errors import DataError

CHUNK = 2**18
_SPACE = " \t\r\n"


def iter_elements(file: BinaryIO, path: DataFile) -> Iterator[tuple[str, Any] | DataError]:
    """Yield each element with its origin (`path#1`, `path#2`, ...).

    An element that cannot be used is yielded as a DataError.
    """
    # Any: a JSON value
    text = _TextWindow(file, path)
    text.expect("[")
    number = 0
    if text.next_is("]"):
        text.expect("]")
    else:
        while True:
            number += 1
            yield _check_element(*text.value(), f"{path}#{number}")
            if text.next_is("]"):
                text.expect("]")
                break
            text.expect(",")
    text.expect_end()


def _check_element(source: str, value: Any, origin: str) -> tuple[str, Any] | DataError:  # Any: a JSON value
    try:
        check_json_value(source, value, origin)
    except DataError as error:
        return error
    return origin, value


class _TextWindow:
    """The part of a long text that is in memory."""

    def __init__(self, file: BinaryIO, path: DataFile) -> None:
        self._file, self._path = file, path
        # invalid UTF-8 becomes lone surrogates, which are rejected when their element is checked
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._text, self._position, self._line = "", 0, 1
        self._at_end = False
        self._read(CHUNK, first=True)

    def _read(self, size: int, *, first: bool = False) -> None:
        """Drop the text already consumed, and read more."""
        chunk = self._file.read(size)
        self._at_end = not chunk
        if first:
            chunk = strip_bom(chunk, self._path)
        self._line += self._text.count("\n", 0, self._position)
        self._text = self._text[self._position :] + self._decoder.decode(chunk, final=self._at_end)
        self._position = 0

    def _peek(self) -> str:
        """Return the next non-space character, or an empty string at the end."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in _SPACE:
                    return self._text[self._position]
                self._position += 1
            if self._at_end:
                return ""
            self._read(CHUNK)

    def next_is(self, character: str) -> bool:
        return self._peek() == character

    def expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._syntax_error(f"expected {character!r}", self._position)
        self._position += 1

    def expect_end(self) -> None:
        if self._peek():
            raise self._syntax_error("extra data after the end of the array", self._position)

    def value(self) -> tuple[str, Any]:  # Any: a JSON value
        """Return the source text of the next value, and the value."""
        self._peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._at_end or len(self._text) - self._position > MAX_RECORD_BYTES:
                    raise self._syntax_error(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise to_data_error(
                    error, f"{self._path}:{self._line_at(self._position)}", text=""
                ) from error
            else:
                if end < len(self._text) or self._at_end:  # else a number may continue in the next chunk
                    source, self._position = self._text[self._position : end], end
                    return source, value
            self._read(max(CHUNK, len(self._text) - self._position))  # doubling keeps the total time linear

    def _line_at(self, position: int) -> int:
        return self._line + self._text.count("\n", 0, position)

    def _syntax_error(self, reason: str, position: int) -> DataError:
        return DataError(f"{self._path}:{self._line_at(position)}: not valid JSON ({reason})")
