"""The bytes of a data file: decompressed on the way, line by line, with one error when they cannot be had."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, cast

from whet.errors import DataError

MAX_RECORD_BYTES = 64 * 2**20  # of one record, so that a file without line breaks does not fill the memory
COMPRESSIONS = (".gz", ".zst")


def missing_extra(what: str, error: ImportError) -> DataError:
    """The error for a source that needs an optional package."""
    return DataError(f"{what} needs {error.name or error}", hint='pip install "whet[data]"')


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file, decompressed by its suffix; whatever goes wrong while it is read is a DataError."""
    try:
        with _open(path) as file:
            yield file
    except FileNotFoundError as error:
        raise not_found(path) from error
    except (OSError, EOFError, zlib.error) as error:  # EOFError: a .gz file that was cut off
        raise DataError(f"{path} cannot be read: {error}") from error


def not_found(path: Path) -> DataError:
    """The error for a path that is not there, with the names beside it that look like it."""
    near: list[str] = []
    if path.parent.is_dir():
        # without their suffixes, which many names in a directory share
        stems: dict[str, list[str]] = {}
        for entry in sorted(path.parent.iterdir()):
            stems.setdefault(_stem(entry), []).append(entry.name)
        near = [name for stem in get_close_matches(_stem(path), stems) for name in stems[stem]][:3]
    meant = f"did you mean {' or '.join(str(path.parent / name) for name in near)}? " if near else ""
    return DataError(f"{path} does not exist", hint=f"{meant}data paths are taken from where whet is run")


def _stem(path: Path) -> str:
    return path.name.removesuffix("".join(path.suffixes))


def _open(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix == ".zst":
        try:
            import pyarrow
        except ImportError as error:
            raise missing_extra(str(path), error) from error
        # not zstandard's own reader, which takes a file that was cut off for a whole one
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def without_bom(start: bytes, path: Path) -> bytes:
    """The start of a text file less its UTF-8 mark; other encodings are refused."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16 text", hint="convert it to UTF-8")
    return start.removeprefix(b"\xef\xbb\xbf")


class Lines:
    """A file's lines; one that is too long is raised as a DataError, and the next call goes on after it."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.number = 0  # of the line read last, from 1
        self._file = file
        self._path = path

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> bytes:
        line = self._file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > MAX_RECORD_BYTES:
            while not line.endswith(b"\n") and line:
                line = self._file.readline(2**20)
            raise DataError(f"{self._path}:{self.number}: a line of more than {MAX_RECORD_BYTES:,} bytes")
        return without_bom(line, self._path) if self.number == 1 else line
