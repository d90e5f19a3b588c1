"""One reader per file format. Readers stream rows in file order, each with its location."""

import csv
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from whet.data.sources.compressed_files import (
    ARCHIVES,
    MAX_RECORD_BYTES,
    DataFile,
    LineReader,
    is_archive,
    missing_extra_error,
    open_data_file,
    split_file_name,
    strip_bom,
)
from whet.data.sources.record_formats import is_record
from whet.data.sources.strict_json import JsonFields, parse_json_bytes, require_object
from whet.error_boundary import invalid_input_errors
from whet.errors import DataError
from whet.lazy_import import load_object

if TYPE_CHECKING:
    from whet.data.sources.splits import Split

# origin and fields of a row, or the error that makes it unusable; the reader continues after an error
SourceRow = tuple[str, JsonFields] | DataError
Reader = Callable[[DataFile], Iterator[SourceRow]]

Position = tuple[int, ...]  # in a shard, after a row: a byte offset and a line, or a count of rows
Columns = Mapping[str, str]  # whet's name of a field -> its name in the file
_NO_COLUMNS: Columns = MappingProxyType({})

_START_BYTES = 2**18  # of a .json file, to see what it contains
PIECE_BYTES = 2**20  # of one plain-text record: longer files are split between lines
# only streams use them
_FILE_SHARDS, _IDENTITY = (f"whet.data.sources.shards:{name}" for name in ("file_shards", "identify_files"))
MAX_OBJECT_BYTES = 2**28  # of a .json file with a single object, which is read at once


def read_jsonl(path: DataFile) -> Iterator[SourceRow]:
    """Read JSON Lines: one object per line; empty lines are skipped."""
    return (row for row, _ in read_jsonl_from(path))


def read_jsonl_from(path: DataFile, start: tuple[int, int] = (0, 0)) -> Iterator[tuple[SourceRow, Position]]:
    """Read JSON Lines from a position: the byte offset and number of a line, which come with every row."""
    with open_data_file(path) as file:
        lines = LineReader(file, path, start=start)
        while True:
            row: SourceRow
            try:
                line = next(lines, None)
                if line is None:
                    return
                if not line.strip():
                    continue
                origin = f"{path}:{lines.line_number}"
                row = origin, _parse_line(line, origin)
            except DataError as error:
                row = error
            yield row, (lines.offset, lines.line_number)


def _parse_line(line: bytes, origin: str) -> JsonFields:
    value = parse_json_bytes(line, origin)
    if isinstance(value, list):
        raise DataError(
            f"{origin}: a record must be a JSON object, not list",
            hint="write one object per line; a file with one JSON array needs the suffix .json",
        )
    return require_object(value, origin)


def read_json(path: DataFile) -> Iterator[SourceRow]:
    """Read a JSON array of objects, an object that contains one, a single record, or JSON Lines."""
    with open_data_file(path) as file:
        start = strip_bom(file.read(_START_BYTES), path).lstrip()
    if start.startswith(b"["):
        yield from _read_list(path)
    elif start and _is_lines(path):
        yield from read_jsonl(path)
    elif start:
        yield from _read_object(path)


def _is_lines(path: DataFile) -> bool:
    """Return whether the first line is an object and more lines follow."""
    with open_data_file(path) as file:
        lines = (line for line in LineReader(file, path) if line.strip())
        try:
            return isinstance(parse_json_bytes(next(lines, b""), ""), dict) and next(lines, None) is not None
        except DataError:
            return False


def _read_list(path: DataFile) -> Iterator[SourceRow]:
    from whet.data.sources.json_array import iter_elements

    with open_data_file(path) as file:
        for element in iter_elements(file, path):
            try:
                yield (
                    element
                    if isinstance(element, DataError)
                    else (element[0], require_object(element[1], element[0]))
                )
            except DataError as error:
                yield error


def _read_object(path: DataFile) -> Iterator[SourceRow]:
    with open_data_file(path) as file:
        raw = strip_bom(file.read(MAX_OBJECT_BYTES + 1), path)
    if len(raw) > MAX_OBJECT_BYTES:
        raise DataError(
            f"{path} is one JSON object of more than {MAX_OBJECT_BYTES:,} bytes",
            hint="write the records as JSON Lines, one per line",
        )
    root = require_object(parse_json_bytes(raw, str(path)), str(path))
    lists = [value for value in root.values() if isinstance(value, list) and value]
    record_lists = [value for value in lists if all(isinstance(item, dict) for item in value)]
    records = record_lists[0] if len(record_lists) == 1 and not is_record(root) else [root]
    for number, fields in enumerate(records, start=1):
        yield f"{path}#{number}", fields


def read_csv(path: DataFile, columns: Columns = _NO_COLUMNS) -> Iterator[SourceRow]:
    """Read comma-separated values with a header row. `tables` converts the cells.

    `columns` renames columns in the header, because the name of a column decides how its cells are read.
    """
    return _read_delimited(path, ",", columns)


def read_tsv(path: DataFile, columns: Columns = _NO_COLUMNS) -> Iterator[SourceRow]:
    """Read tab-separated values with a header row."""
    return _read_delimited(path, "\t", columns)


def _read_delimited(path: DataFile, delimiter: str, columns: Columns) -> Iterator[SourceRow]:
    from whet.data.sources.tables import record_from_cells

    csv.field_size_limit(MAX_RECORD_BYTES)  # a global setting of the csv module
    with open_data_file(path) as file:
        lines = LineReader(file, path)
        # invalid UTF-8 becomes lone surrogates, which are rejected when their row is converted
        rows = csv.reader(map(_decode_lenient, lines), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            origin = f"{path}:{lines.line_number + 1}"
            try:
                row = next(rows, None)
                if row is None:
                    return
                if header is None:
                    header = _rename_header(_parse_header(row, origin), columns) if row else None
                elif row:
                    yield origin, record_from_cells(header, row, origin)
            except csv.Error as error:
                bad = DataError(f"{origin}: not valid CSV ({error})")
            except DataError as error:
                bad = error
            else:
                continue
            if header is None:  # no row can be read without a header
                raise bad
            yield bad


def _decode_lenient(line: bytes) -> str:
    return line.decode(errors="surrogateescape")


def _parse_header(row: list[str], origin: str) -> list[str]:
    names = [name.strip() for name in row]
    if not all(names) or len(set(names)) < len(names):
        raise DataError(
            f"{origin}: the header must name each column exactly once, but is {', '.join(row)!r}"[:500]
        )
    return names


def _rename_header(header: list[str], columns: Columns) -> list[str]:
    """Return a header with whet's names; the name of a column that a renamed one replaces is empty."""
    targets = {column: target for target, column in columns.items() if column in header}
    replaced = set(targets.values()) - set(targets)
    return ["" if name in replaced else targets.get(name, name) for name in header]


def read_text(path: DataFile) -> Iterator[SourceRow]:
    """Read plain text as one record; a long file becomes several records of complete lines."""
    with open_data_file(path) as file:
        lines = LineReader(file, path)
        piece: list[bytes] = []
        size, first = 0, 1
        for line in lines:
            if piece and size + len(line) > PIECE_BYTES:
                yield from _text_piece(piece, f"{path}:{first}")
                piece, size, first = [], 0, lines.line_number
            piece.append(line)
            size += len(line)
        yield from _text_piece(piece, f"{path}:{first}" if first > 1 else str(path))


def _text_piece(lines: list[bytes], origin: str) -> Iterator[SourceRow]:
    try:
        text = b"".join(lines).decode()
    except UnicodeDecodeError as error:
        yield DataError(f"{origin}: not UTF-8 text ({error.reason} at byte {error.start + 1})")
        return
    if text.strip():
        yield origin, {"text": text}


def read_parquet(path: DataFile) -> Iterator[SourceRow]:
    """Read a Parquet file in batches of rows."""
    return (row for row, _ in read_parquet_from(path))


def read_parquet_from(path: DataFile, start: int = 0) -> Iterator[tuple[SourceRow, Position]]:
    """Read a Parquet file from a row, counted from 0. Row groups before it are not read."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra_error(str(path), error) from error
    from whet.data.sources.tables import iter_table_rows

    unreadable = invalid_input_errors(f"{path} cannot be read", kind=DataError, hint="write the file again")
    with open_data_file(path) as file, unreadable:
        # small reads: the defaults would load complete columns of a row group, or of the file
        parquet_file = parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        number = group = 0  # number: the rows before the next batch
        metadata = parquet_file.metadata
        while group < metadata.num_row_groups and number + metadata.row_group(group).num_rows <= start:
            number += metadata.row_group(group).num_rows
            group += 1
        groups = range(group, metadata.num_row_groups)
        for batch in parquet_file.iter_batches(batch_size=256, row_groups=groups):
            skipped = min(max(0, start - number), batch.num_rows)
            rows = iter_table_rows(batch.slice(skipped), str(path), start=number + skipped + 1)
            for count, row in enumerate(rows, start=number + skipped + 1):
                yield row, (count,)
            number += batch.num_rows


def read_archive(
    path: DataFile, columns: Columns = _NO_COLUMNS, split: "Split | None" = None
) -> Iterator[SourceRow]:
    """Read the data files of a .tar or .zip archive, in its order: those of a split, or all."""
    from whet.data.sources.archives import open_members
    from whet.data.sources.splits import select_members

    if not isinstance(path, Path):
        raise DataError(f"{path}: only local archives can be read", hint="download it first")
    with invalid_input_errors(f"{path} cannot be read", kind=DataError):
        for member in open_members(path, lambda names: select_members(names, split, path)):
            yield from read_renamed(select_reader(Path(member.name)), member, columns)


READERS: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".txt": read_text,
    ".parquet": read_parquet,
}


_UNREAD_ARCHIVES = (".7z", ".rar", ".bz2", ".xz")


def select_reader(path: Path) -> Reader:
    """Return the reader for a file, selected by its suffix."""
    _, suffix = split_file_name(path)
    if suffix == ".parquet" and path.suffix.lower() == ".zst":
        raise DataError(f"{path}: Parquet inside .zst cannot be read", hint="decompress it: zstd -d")
    if is_archive(path):
        return read_archive
    if suffix not in READERS:
        raise DataError(
            f"{path}: whet cannot read {suffix + ' files' if suffix else 'files without a suffix'}",
            hint="unpack it, and name the directory or a pattern such as 'data/*.jsonl'"
            if suffix in ARCHIVES or path.suffix.lower() in _UNREAD_ARCHIVES
            else f"supported: {', '.join(READERS)}, each optionally followed by .gz or .zst, and archives: "
            ".tar, .tar.gz, .zip",
        )
    return READERS[suffix]


@dataclass(frozen=True)
class SourceContent:
    """The content of a source: functions that return its rows, from the start, and its digest.

    `rename` returns the rows with renamed columns, where renaming the fields afterwards would be too late.
    `shards` returns the parts that a stream reads in any order, with renamed columns, and `identity` a digest
    that is cheap to compute. Without them, a stream reads `rows` and uses `digest`.
    """

    rows: Callable[[], Iterator[SourceRow]]
    digest: Callable[[], str]
    rename: Callable[[Columns], Iterator[SourceRow]] | None = None
    shards: "Callable[[Columns], Sequence[Shard]] | None" = None
    identity: Callable[[], str] | None = None


@dataclass(frozen=True)
class Shard:
    """A part of a source that can be read from any position.

    `rows` yields the rows after a position, each with the position after it; () is the start.
    """

    rows: Callable[[Position], Iterator[tuple[SourceRow, Position]]]


def files_content(paths: Sequence[Path]) -> SourceContent:
    """Return the rows of several files, one file after the other."""
    readers = [(select_reader(path), path) for path in paths]
    return SourceContent(
        rows=lambda: (row for read, path in readers for row in read(path)),
        digest=lambda: digest_files(paths),
        rename=lambda columns: (row for read, path in readers for row in read_renamed(read, path, columns)),
        shards=lambda columns: load_object(_FILE_SHARDS)(paths, columns),
        identity=lambda: load_object(_IDENTITY)(paths),
    )


def rename_row(row: SourceRow, columns: Columns) -> SourceRow:
    """Return a row with renamed fields; an error stays as it is."""
    if not columns or isinstance(row, DataError):
        return row
    return row[0], rename_fields(row[1], columns)


def read_renamed(read: Reader, path: DataFile, columns: Columns) -> Iterator[SourceRow]:
    """Read a file with renamed columns."""
    if read in (read_csv, read_tsv, read_archive):
        return functools.partial(read, columns=columns)(path)
    return (rename_row(row, columns) for row in read(path))


def rename_fields(fields: JsonFields, columns: Columns) -> JsonFields:
    """Return a record with renamed fields. A column that the record lacks changes nothing."""
    renamed = {target: fields[column] for target, column in columns.items() if fields.get(column) is not None}
    sources = {columns[target] for target in renamed}
    return {name: value for name, value in fields.items() if name not in sources} | renamed


def digest_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of a file, or of the digests of several files."""
    digests = []
    for path in paths:
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    return digests[0] if len(digests) == 1 else digest_text("\n".join(digests))


def digest_text(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
