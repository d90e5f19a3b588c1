"""Open data files, decompress them, and read them line by line; read failures become a DataError."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from whet.errors import DataError

MAX_RECORD_BYTES = 64 * 2**20  # of one record: a file without line breaks must not exhaust memory
COMPRESSIONS = (".gz", ".zst")
ARCHIVES = (".tar", ".tgz", ".zip")


@dataclass(frozen=True)
class ArchiveMember:
    """A data file inside an archive. Readers use it like a path."""

    name: str  # such as shards.tar/part-0.jsonl
    open: Callable[[], BinaryIO]

    def __str__(self) -> str:
        return self.name


class VirtualFile(Protocol):
    """A data file that is not a path: inside an archive, or remote. `str` gives its name for messages."""

    def open(self) -> BinaryIO:
        """Open the file for reading, decompressed."""


DataFile = Path | VirtualFile


def missing_extra_error(source: str, error: ImportError) -> DataError:
    """Return the error for a source that needs an optional package that is not installed."""
    return DataError(f"{source} needs {error.name or error}", hint='pip install "whet[data]"')


@contextmanager
def open_data_file(path: DataFile) -> Iterator[BinaryIO]:
    """Open a file and decompress it according to its suffix. Any read failure is raised as a DataError."""
    try:
        with _open(path) if isinstance(path, Path) else path.open() as file:
            yield file
    except FileNotFoundError as error:
        raise missing_path_error(Path(str(path))) from error
    except (OSError, EOFError, zlib.error) as error:  # EOFError: a truncated .gz file
        raise DataError(f"{path} cannot be read: {error}") from error


def missing_path_error(path: Path) -> DataError:
    """Return the error for a path that does not exist, with similar names from the same directory."""
    similar: list[str] = []
    if path.parent.is_dir():
        # compare without suffixes, which many names in a directory share
        stems: dict[str, list[str]] = {}
        for entry in sorted(path.parent.iterdir()):
            stems.setdefault(_stem(entry), []).append(entry.name)
        similar = [name for stem in get_close_matches(_stem(path), stems) for name in stems[stem]][:3]
    suggestion = (
        f"did you mean {' or '.join(str(path.parent / name) for name in similar)}? " if similar else ""
    )
    return DataError(
        f"{path} does not exist",
        hint=f"{suggestion}relative data paths are resolved against the working directory",
    )


def _stem(path: Path) -> str:
    return path.name.removesuffix("".join(path.suffixes))


def _open(path: Path) -> BinaryIO:
    return open_compressed(path, path.suffix, str(path)) or path.open("rb")


def open_compressed(source: Path | BinaryIO, suffix: str, name: str) -> BinaryIO | None:
    """Open a path or a file for decompression, or return None if the suffix is not that of a compression.

    Args:
        source: The path, or an open file.
        suffix: The last suffix of its name.
        name: Its name, for messages.
    """
    if suffix.lower() in (".gz", ".tgz"):
        return cast(BinaryIO, gzip.open(source, "rb"))
    if suffix.lower() != ".zst":
        return None
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra_error(name, error) from error
    # the reader of zstandard does not detect a truncated file
    return io.BufferedReader(pyarrow.input_stream(source, compression="zstd"))


def split_file_name(path: Path) -> tuple[str, str]:
    """Return the stem and the format of a file name: `train.jsonl.gz` gives `train` and `.jsonl`."""
    name = path.name
    if path.suffix.lower() in COMPRESSIONS:
        name = path.stem
    return Path(name).stem, Path(name).suffix.lower()


def is_archive(path: Path) -> bool:
    """Return whether a file is a .tar archive, perhaps compressed, or a .zip archive, by its name."""
    suffix = split_file_name(path)[1]
    return suffix == ".tar" or (suffix in ARCHIVES and path.suffix.lower() == suffix)


def strip_bom(start: bytes, path: DataFile) -> bytes:
    """Return the start of a text file without a UTF-8 byte order mark; raise an error for UTF-16."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16 text", hint="convert it to UTF-8")
    return start.removeprefix(b"\xef\xbb\xbf")


def skip_bytes(file: BinaryIO, count: int, path: DataFile) -> None:
    """Move to a byte offset of a file that is at its start; a stream that cannot seek is read up to there."""
    if not count:
        return
    if file.seekable():
        file.seek(count)
        return
    while count:
        skipped = len(file.read(min(count, 2**20)))
        if not skipped:
            raise DataError(f"{path} is shorter than it was", hint="restore the file, or start a new run")
        count -= skipped


class LineReader:
    """Iterate over the lines of a file.

    A line that is too long raises a DataError, and the next call continues after it.

    Args:
        file: The file, at its start.
        path: Its path, for messages.
        start: Byte offset and line number after a line that was read earlier, to continue from there.
    """

    def __init__(self, file: BinaryIO, path: DataFile, *, start: tuple[int, int] = (0, 0)) -> None:
        self.offset, self.line_number = start  # after the most recent line; line numbers start from 1
        skip_bytes(file, self.offset, path)
        self._file = file
        self._path = path

    def __iter__(self) -> "LineReader":
        return self

    def __next__(self) -> bytes:
        line = self._file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            raise StopIteration
        self.line_number += 1
        self.offset += len(line)
        if len(line) > MAX_RECORD_BYTES:
            while not line.endswith(b"\n") and line:
                line = self._file.readline(2**20)
                self.offset += len(line)
            raise DataError(
                f"{self._path}:{self.line_number}: the line has more than {MAX_RECORD_BYTES:,} bytes"
            )
        return strip_bom(line, self._path) if self.line_number == 1 else line
