"""One reader a file format: rows in the order of the file, with their places, nothing held in memory."""

import csv
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.data.sources.compressed_files import (
    COMPRESSIONS,
    MAX_RECORD_BYTES,
    Lines,
    missing_extra,
    opened,
    without_bom,
)
from whet.data.sources.json_array import CHUNK, elements
from whet.data.sources.record_formats import fits_a_shape
from whet.data.sources.strict_json import JsonFields, parse, record
from whet.data.sources.tables import from_cells, from_table
from whet.error_boundary import wrong_input
from whet.errors import DataError

SourceRow = (
    tuple[str, JsonFields] | DataError
)  # its origin and its fields, or why it is bad: the reader goes on after it
Reader = Callable[[Path], Iterator[SourceRow]]

PIECE_BYTES = 2**20  # of a plain text: a longer one is cut between lines
MAX_OBJECT_BYTES = 2**28  # of a .json file that is no list and no JSON Lines: it is read whole


def read_jsonl(path: Path) -> Iterator[SourceRow]:
    """JSON Lines: an object a line; empty lines are passed over."""
    with opened(path) as file:
        lines = Lines(file, path)
        while True:
            try:
                line = next(lines, None)
                if line is None:
                    return
                if line.strip():
                    origin = f"{path}:{lines.number}"
                    yield origin, _object(line, origin)
            except DataError as error:
                yield error


def _object(line: bytes, origin: str) -> JsonFields:
    value = parse(line, origin)
    if isinstance(value, list):
        raise DataError(
            f"{origin}: a record must be a JSON object, not list",
            hint="one object a line; a file that is one JSON list is called .json",
        )
    return record(value, origin)


def read_json(path: Path) -> Iterator[SourceRow]:
    """A list of objects, an object with one such list in it, one record, or JSON Lines under another name."""
    with opened(path) as file:
        start = without_bom(file.read(CHUNK), path).lstrip()
    if start.startswith(b"["):
        yield from _read_list(path)
    elif start and _is_lines(path):
        yield from read_jsonl(path)
    elif start:
        yield from _read_object(path)


def _is_lines(path: Path) -> bool:
    """Whether the first line is an object and others follow."""
    with opened(path) as file:
        lines = (line for line in Lines(file, path) if line.strip())
        try:
            return isinstance(parse(next(lines, b""), ""), dict) and next(lines, None) is not None
        except DataError:
            return False


def _read_list(path: Path) -> Iterator[SourceRow]:
    with opened(path) as file:
        for element in elements(file, path):
            try:
                yield (
                    element
                    if isinstance(element, DataError)
                    else (element[0], record(element[1], element[0]))
                )
            except DataError as error:
                yield error


def _read_object(path: Path) -> Iterator[SourceRow]:
    with opened(path) as file:
        raw = without_bom(file.read(MAX_OBJECT_BYTES + 1), path)
    if len(raw) > MAX_OBJECT_BYTES:
        raise DataError(
            f"{path} is one JSON object of more than {MAX_OBJECT_BYTES:,} bytes",
            hint="write its records as JSON Lines, one a line",
        )
    whole = record(parse(raw, str(path)), str(path))
    lists = [value for value in whole.values() if isinstance(value, list) and value]
    inner = [value for value in lists if all(isinstance(item, dict) for item in value)]
    records = inner[0] if len(inner) == 1 and not fits_a_shape(whole) else [whole]
    for number, fields in enumerate(records, start=1):
        yield f"{path}#{number}", fields


def read_csv(path: Path) -> Iterator[SourceRow]:
    """Comma-separated values under a header; what the cells mean is told in `tables`."""
    return _read_cells(path, ",")


def read_tsv(path: Path) -> Iterator[SourceRow]:
    """The same, separated by tabs."""
    return _read_cells(path, "\t")


def _read_cells(path: Path, delimiter: str) -> Iterator[SourceRow]:
    csv.field_size_limit(MAX_RECORD_BYTES)  # the csv module keeps one limit for all its readers
    with opened(path) as file:
        lines = Lines(file, path)
        # bytes that are not UTF-8 become half characters, which are refused where their row is
        rows = csv.reader(map(_lenient, lines), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            origin = f"{path}:{lines.number + 1}"
            try:
                row = next(rows, None)
                if row is None:
                    return
                if header is None:
                    header = _header(row, origin) if row else None
                elif row:
                    yield origin, from_cells(header, row, origin)
            except csv.Error as error:
                bad = DataError(f"{origin}: not valid CSV ({error})")
            except DataError as error:
                bad = error
            else:
                continue
            if header is None:  # without it no row can be read
                raise bad
            yield bad


def _lenient(line: bytes) -> str:
    return line.decode(errors="surrogateescape")


def _header(row: list[str], origin: str) -> list[str]:
    names = [name.strip() for name in row]
    if not all(names) or len(set(names)) < len(names):
        raise DataError(
            f"{origin}: the first line must name each column once, and says {', '.join(row)!r}"[:500]
        )
    return names


def read_text(path: Path) -> Iterator[SourceRow]:
    """Plain text: one record, or of a long text pieces of whole lines, so that memory stays flat."""
    with opened(path) as file:
        lines = Lines(file, path)
        piece: list[bytes] = []
        size, first = 0, 1
        for line in lines:
            if piece and size + len(line) > PIECE_BYTES:
                yield from _text_piece(piece, f"{path}:{first}")
                piece, size, first = [], 0, lines.number
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


def read_parquet(path: Path) -> Iterator[SourceRow]:
    """Parquet, a batch of rows at a time."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra(str(path), error) from error
    unreadable = wrong_input(f"{path} cannot be read", kind=DataError, hint="write the file again")
    with opened(path) as file, unreadable:
        # in small reads: else whole columns of a row group, or of the file, are held at once
        opened_file = parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        number = 0
        for batch in opened_file.iter_batches(batch_size=256):
            yield from from_table(batch, str(path), start=number + 1)
            number += batch.num_rows


READERS: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".txt": read_text,
    ".parquet": read_parquet,
}


def split_name(path: Path) -> tuple[str, str]:
    """A file name without its format, and the format: `train.jsonl.gz` gives `train` and `.jsonl`."""
    name = path.name
    if path.suffix.lower() in COMPRESSIONS:
        name = path.stem
    return Path(name).stem, Path(name).suffix.lower()


def reader_of(path: Path) -> Reader:
    """The reader for a file, by its name."""
    _, suffix = split_name(path)
    if suffix == ".parquet" and path.suffix.lower() == ".zst":
        raise DataError(f"{path}: Parquet inside .zst cannot be read", hint="decompress it: zstd -d")
    if suffix not in READERS:
        raise DataError(
            f"{path}: whet reads no {suffix + ' files' if suffix else 'files without a suffix'}",
            hint=f"known: {', '.join(READERS)}, each also with .gz or .zst after it",
        )
    return READERS[suffix]


@dataclass(frozen=True)
class Content:
    """What a source's name stands for: rows, read anew at each call, and what tells them from others."""

    rows: Callable[[], Iterator[SourceRow]]
    digest: Callable[[], str]


def files_content(paths: Sequence[Path]) -> Content:
    """The rows of some files, one after the other."""
    readers = [(reader_of(path), path) for path in paths]
    return Content(
        rows=lambda: (row for read, path in readers for row in read(path)), digest=lambda: digest_files(paths)
    )


def digest_files(paths: Sequence[Path]) -> str:
    """SHA-256 of a file, or of the digests of several."""
    found = []
    for path in paths:
        try:
            with path.open("rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    return found[0] if len(found) == 1 else digest_text("\n".join(found))


def digest_text(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
