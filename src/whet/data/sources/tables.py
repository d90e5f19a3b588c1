"""Rows of tables as records: cells of CSV files, batches of Parquet files and Hugging Face datasets."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from whet.data.sources.strict_json import JsonFields, parse_text
from whet.errors import DataError

NUMBERS = ("auth_weight", "prov_entropy", "target")
LISTS = ("messages", "conversations", "tools", "features", "labels")
TEXT_OR_MESSAGES = ("prompt", "chosen", "rejected")


def from_cells(header: list[str], row: list[str], origin: str) -> JsonFields:
    """A row of a CSV file: cells are text, but for the columns above, which shapes need as something else."""
    if len(row) != len(header):
        raise DataError(
            f"{origin}: {len(row)} cells, and the header names {len(header)} columns",
            hint="a cell with a comma, a quote or a line break in it is put in double quotes",
        )
    for name, cell in zip(header, row, strict=True):
        if "\0" in cell:
            raise DataError(f"{origin}: a null byte in {name}", hint="the file is damaged, or not UTF-8 text")
        if not cell.isascii() and any("\ud800" <= character <= "\udfff" for character in cell):
            raise DataError(f"{origin}: not UTF-8 text in {name}")
    cells = ((name, _cell(name, cell, origin)) for name, cell in zip(header, row, strict=True))
    return {name: value for name, value in cells if value is not None}


def _cell(name: str, cell: str, origin: str) -> Any:  # Any: a JSON value
    if name in NUMBERS:
        return _number(cell, f"{origin}: {name}") if cell.strip() else None
    if name in LISTS:
        return parse_text(cell, f"{origin}: {name}") if cell.strip() else None
    if name in TEXT_OR_MESSAGES and cell.lstrip().startswith("["):
        return _messages(cell)
    if name == "label" and cell.isdecimal() and str(int(cell[:20])) == cell:
        return int(cell)
    return cell


def _number(cell: str, place: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{place} must be a number, not {cell[:50]!r}")
    return value


def _messages(cell: str) -> Any:  # Any: a JSON value
    """A cell that may be messages; text such as `[1] Introduction` stays text."""
    try:
        value = parse_text(cell, "")
    except DataError:
        return cell
    return value if value and isinstance(value, list) and isinstance(value[0], dict) else cell


def from_table(
    table: Any,  # Any: pyarrow is an optional package
    place: str,
    *,
    start: int,
    origin: Callable[[int], str] | None = None,
) -> Iterator[tuple[str, JsonFields] | DataError]:
    """The rows of an Arrow table or batch; a null is a field that is not there, and bytes are left out."""
    from pyarrow import types

    table = table.select(
        [
            index
            for index, field in enumerate(table.schema)
            if not (types.is_binary(field.type) or types.is_large_binary(field.type))
        ]
    )
    names = table.schema.names
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{place}: two columns are called {twice[0]!r}")
    try:
        rows = table.to_pylist()
    except (ValueError, OverflowError):  # find the rows that are to blame
        rows = [_row(table.slice(index, 1)) for index in range(table.num_rows)]
    for number, row in enumerate(rows, start=start):
        where = origin(number) if origin is not None else f"{place}#{number}"
        if isinstance(row, UnicodeDecodeError):
            yield DataError(f"{where}: not UTF-8 text ({row.reason})")
        elif isinstance(row, Exception):
            yield DataError(f"{where}: cannot be read ({row})")
        else:
            yield where, {name: _plain(value) for name, value in row.items() if value is not None}


def _row(table: Any) -> JsonFields | Exception:  # Any: pyarrow is an optional package
    try:
        return {name: _value(table.column(name)) for name in table.schema.names}
    except (ValueError, OverflowError, NotImplementedError) as error:
        return error


def _value(column: Any) -> Any:  # Any: pyarrow is an optional package, and a value of it
    try:
        [value] = column.to_pylist()
    except OverflowError:  # a date after the year 9999
        [value] = column.cast("string").to_pylist()
    return value


def _plain(value: Any) -> Any:  # Any: an Arrow value in, a JSON value out
    """Dates, decimals and the like as text, so that a record is JSON wherever it came from.

    A table gives each of its objects the keys of all others: those that are null are not there.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    text = json.dumps(value, default=lambda odd: None if isinstance(odd, bytes) else str(odd))
    return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
