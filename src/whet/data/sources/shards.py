"""The shards of a source: parts that a stream reads in any order, each from any position."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

from whet.data.sources.readers import (
    Columns,
    Position,
    Reader,
    Shard,
    SourceContent,
    SourceRow,
    read_jsonl,
    read_jsonl_from,
    read_parquet,
    read_parquet_from,
    read_renamed,
    rename_row,
    select_reader,
)
from whet.errors import DataError

_IDENTITY_BYTES = 2**16  # read at both ends of a file


def file_shards(paths: Sequence[Path], columns: Columns) -> list[Shard]:
    """Return one shard per file."""
    return [_file_shard(select_reader(path), path, columns) for path in paths]


def _file_shard(read: Reader, path: Path, columns: Columns) -> Shard:
    if read not in (read_jsonl, read_parquet):
        return counted_shard(lambda: read_renamed(read, path, columns))

    def rows(position: Position) -> Iterator[tuple[SourceRow, Position]]:
        offset, line = position if len(position) == 2 else (0, 0)
        located = (
            read_jsonl_from(path, (offset, line))
            if read is read_jsonl
            else read_parquet_from(path, *position)
        )
        return ((rename_row(row, columns), after) for row, after in located)

    return Shard(rows)


def counted_shard(read: Callable[[], Iterator[SourceRow]]) -> Shard:
    """Return the shard of rows that can only be read from the start: its position is their number."""

    def rows(position: Position) -> Iterator[tuple[SourceRow, Position]]:
        start = position[0] if position else 0
        for number, row in enumerate(itertools.islice(read(), start, None), start=start + 1):
            yield row, (number,)

    return Shard(rows)


def shards_of(content: SourceContent, columns: Columns = MappingProxyType({})) -> Sequence[Shard]:
    """Return the shards of a source, with renamed columns: its files, or all of it."""
    if content.shards is not None:
        return content.shards(columns)
    rename = content.rename
    if columns and rename is not None:
        return [counted_shard(lambda: rename(columns))]
    return [counted_shard(lambda: (rename_row(row, columns) for row in content.rows()))]


def identify(content: SourceContent) -> str:
    """Return a digest of a source that does not read all of it, if there is one."""
    return (content.identity or content.digest)()


def identify_files(paths: Sequence[Path]) -> str:
    """Return a digest of the sizes, the beginnings and the ends of files."""
    sha256 = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                sha256.update(f"{size} ".encode())
                for offset in (0, max(0, size - _IDENTITY_BYTES)):
                    file.seek(offset)
                    sha256.update(file.read(_IDENTITY_BYTES))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    return sha256.hexdigest()
