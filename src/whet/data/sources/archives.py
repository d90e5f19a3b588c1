"""Data files inside .tar and .zip archives, read one after the other without unpacking them.

Archives are untrusted: nothing is extracted, links are not followed, and what an archive decompresses to is
limited.
"""

import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from whet.data.sources.compressed_files import (
    ARCHIVES,
    COMPRESSIONS,
    ArchiveMember,
    missing_extra_error,
    open_data_file,
    split_file_name,
)
from whet.error_boundary import error_text
from whet.errors import DataError

MAX_RATIO = 200  # of decompressed to compressed bytes; plain text reaches about 20
MIN_LIMIT = 2**26  # bytes that every archive may decompress to
MAX_BUFFERED = 2**28  # bytes of a member that is read at once
_BUFFERED = (".json", ".parquet")  # formats whose readers need more than one pass over a file
_BLOCK = 512  # of a tar archive
_OTHER_ARCHIVES = (*ARCHIVES, ".7z", ".rar")


@dataclass
class _Budget:
    """The bytes that may still be decompressed from an archive."""

    limit: int
    used: int = 0

    def spend(self, size: int) -> None:
        self.used += size
        if self.used > self.limit:  # an OSError ends the reader of a file; a DataError would be a bad record
            raise OSError(
                f"the archive decompresses to more than {self.limit:,} bytes, over {MAX_RATIO} times its "
                "size; unpack it if you trust it"
            )


class _BoundedReader(io.RawIOBase):
    """Reads a stream within a budget. Failures of libraries become an OSError."""

    def __init__(self, stream: BinaryIO, budget: _Budget) -> None:
        self._stream = stream
        self._budget = budget
        self.tail = b""  # the last bytes that were read, for the end mark of a tar archive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed has a wider type
        try:
            data = self._stream.read(len(buffer))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # damaged archives raise errors of many kinds
            raise OSError(error_text(error)) from error
        self._budget.spend(len(data))
        buffer[: len(data)] = data
        self.tail = (self.tail + data)[-_BLOCK:]
        return len(data)


def open_members(path: Path, select: Callable[[list[str]], list[str]]) -> Iterator[ArchiveMember]:
    """Yield the data files of an archive in its order; each must be read before the next is requested.

    Args:
        path: The archive.
        select: Returns the members to read, given the names of all data files.

    Raises:
        DataError: The archive is not safe, is truncated, or has no data files. A damaged one raises errors of
            other kinds, too, here and while a member is read.
    """
    is_zip = split_file_name(path)[1] == ".zip"
    names = _check_names(path, list(_zip_names(path) if is_zip else _tar_names(path)))
    budget = _Budget(max(MIN_LIMIT, MAX_RATIO * path.stat().st_size))
    selected = set(select(names))
    yield from (_zip_members if is_zip else _tar_members)(path, selected, budget)


def _check_names(path: Path, names: list[str]) -> list[str]:
    """Return the names of data files; raise an error if there are none, or for a name that occurs twice."""
    data_names = [name for name in names if _is_data(path, name)]
    if not data_names:
        contents = f"it holds {', '.join(names[:10])}" if names else "it is empty"
        raise DataError(f"{path} contains no data files", hint=contents)
    if len(set(data_names)) < len(data_names):
        repeated = next(name for name in data_names if data_names.count(name) > 1)
        raise DataError(f"{path} contains two files named {repeated}", hint="write the archive again")
    return data_names


def _is_data(path: Path, name: str) -> bool:
    """Return whether a member is a data file; hidden files, READMEs and other formats are not."""
    from whet.data.sources.readers import READERS
    from whet.data.sources.splits import NOT_DATA

    parts = PurePosixPath(name).parts
    suffix = split_file_name(Path(name))[1]
    if any(part.startswith((".", "__MACOSX")) for part in parts) or NOT_DATA.match(parts[-1]):
        return False
    if suffix in _OTHER_ARCHIVES:
        raise DataError(f"{path}/{name} is an archive inside an archive", hint="unpack the outer one")
    return suffix in READERS


def _safe_name(path: Path, name: str) -> str:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or parts[0] == "/" or ".." in parts or ":" in parts[0] or "\0" in name:
        raise DataError(
            f"{path} contains a file named {name!r}, outside of the archive",
            hint="write the archive again with relative names",
        )
    return "/".join(parts)


def _irregular_error(path: Path, name: str) -> DataError:
    return DataError(
        f"{path}/{name} is a link or a device, not a file", hint="write the archive with the files themselves"
    )


# --- tar


def _tar_names(path: Path) -> Iterator[str]:
    is_plain = path.suffix.lower() == ".tar"  # only the headers are read
    with open_data_file(path) as file:
        budget = _Budget(max(MIN_LIMIT, MAX_RATIO * path.stat().st_size))
        stream = file if is_plain else cast(BinaryIO, io.BufferedReader(_BoundedReader(file, budget)))
        with tarfile.open(fileobj=stream, mode="r:" if is_plain else "r|") as archive:
            yield from (name for name, _ in _tar_files(path, archive))


def _tar_files(path: Path, archive: Any) -> Iterator[tuple[str, tarfile.TarInfo]]:
    # Any: a TarFile, whose list of members is not in its type stubs
    while (info := archive.next()) is not None:
        archive.members = []  # tarfile keeps all headers, which a stream never uses again
        if info.isdir():
            continue
        name = _safe_name(path, info.name)
        if not info.isreg():
            raise _irregular_error(path, name)
        yield name, info


def _tar_members(path: Path, selected: set[str], budget: _Budget) -> Iterator[ArchiveMember]:
    with open_data_file(path) as file:
        reader = _BoundedReader(file, budget)
        stream = io.BufferedReader(reader)
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for name, info in _tar_files(path, archive):
                if name in selected:
                    content = archive.extractfile(info)
                    assert content is not None  # it is a regular file
                    yield _to_member(path, name, cast(BinaryIO, content), budget)
        while stream.read(2**20):
            pass
        if reader.tail.strip(b"\0") or len(reader.tail) < _BLOCK:
            raise DataError(f"{path} is truncated: its end is missing", hint="copy or download it again")


# --- zip


def _zip_names(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            name = _safe_name(path, info.filename)
            mode = info.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise _irregular_error(path, name)
            if info.flag_bits & 1:
                raise DataError(f"{path}/{name} is encrypted", hint="write the archive without a password")
            yield name


def _zip_members(path: Path, selected: set[str], budget: _Budget) -> Iterator[ArchiveMember]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.is_dir() and (name := _safe_name(path, info.filename)) in selected:
                with closing(archive.open(info)) as content:
                    stream = io.BufferedReader(_BoundedReader(cast(BinaryIO, content), budget))
                    yield _to_member(path, name, cast(BinaryIO, stream), budget)


# --- members


def _to_member(path: Path, name: str, content: BinaryIO, budget: _Budget) -> ArchiveMember:
    """Return a member that can be opened once as a stream, or any number of times if it is read at once."""
    stream = _decompress(f"{path}/{name}", content, budget)
    if split_file_name(Path(name))[1] not in _BUFFERED:
        return ArchiveMember(f"{path}/{name}", lambda: stream)
    data = stream.read(MAX_BUFFERED + 1)
    if len(data) > MAX_BUFFERED:
        raise DataError(
            f"{path}/{name} has more than {MAX_BUFFERED:,} bytes, too many for this format inside an archive",
            hint="unpack the archive, or write the records as JSON Lines",
        )
    return ArchiveMember(f"{path}/{name}", lambda: io.BytesIO(data))


def _decompress(name: str, content: BinaryIO, budget: _Budget) -> BinaryIO:
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in COMPRESSIONS:
        return content
    if suffix == ".gz":
        inner = cast(BinaryIO, gzip.GzipFile(fileobj=content))
    else:
        try:
            import pyarrow
        except ImportError as error:
            raise missing_extra_error(name, error) from error
        inner = cast(BinaryIO, pyarrow.CompressedInputStream(pyarrow.PythonFile(content, "r"), "zstd"))
    return cast(BinaryIO, io.BufferedReader(_BoundedReader(inner, budget)))
