"""Convert table rows to records: CSV cells, and batches of Parquet files and Hugging Face datasets."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from whet.data.sources.strict_json import JsonFields, parse_json_text
from whet.errors import DataError

NUMBER_COLUMNS = ("auth_weight", "prov_entropy", "target")
JSON_COLUMNS = (
    "messages",
    "conversations",
    "tools",
    "features",
    "labels",
    "history",
    "input_ids",
    "attention_mask",
)
TEXT_OR_MESSAGES_COLUMNS = ("prompt", "completion", "chosen", "rejected")


def record_from_cells(header: list[str], row: list[str], origin: str) -> JsonFields:
    """Return a CSV row as a record. Cells are text, except in columns of numbers, lists or messages.

    Columns with an empty name are left out.
    """
    if len(row) != len(header):
        raise DataError(
            f"{origin}: the row has {len(row)} cells, but the header names {len(header)} columns",
            hint="put cells that contain a comma, a quote or a line break in double quotes",
        )
    for name, cell in zip(header, row, strict=True):
        if "\0" in cell:
            raise DataError(
                f"{origin}: column {name} contains a null byte", hint="the file is damaged, or not UTF-8 text"
            )
        if not cell.isascii() and any("\ud800" <= character <= "\udfff" for character in cell):
            raise DataError(f"{origin}: column {name} is not UTF-8 text")
    cells = ((name, _parse_cell(name, cell, origin)) for name, cell in zip(header, row, strict=True))
    return {name: value for name, value in cells if name and value is not None}


def _parse_cell(name: str, cell: str, origin: str) -> Any:  # Any: a JSON value
    if name in NUMBER_COLUMNS:
        return _parse_number(cell, f"{origin}: {name}") if cell.strip() else None
    if name in JSON_COLUMNS:
        return parse_json_text(cell, f"{origin}: {name}") if cell.strip() else None
    if name in TEXT_OR_MESSAGES_COLUMNS and cell.lstrip().startswith("["):
        return _parse_messages(cell)
    if name == "label" and cell.isdecimal() and str(int(cell[:20])) == cell:
        return int(cell)
    return cell


def _parse_number(cell: str, location: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{location} must be a number, not {cell[:50]!r}")
    return value


def _parse_messages(cell: str) -> Any:  # Any: a JSON value
    """Parse a cell that may contain messages; text such as `[1] Introduction` stays text."""
    try:
        value = parse_json_text(cell, "")
    except DataError:
        return cell
    return value if value and isinstance(value, list) and isinstance(value[0], dict) else cell


def iter_table_rows(
    table: Any,  # Any: pyarrow is an optional package
    table_name: str,
    *,
    start: int,
    origin: Callable[[int], str] | None = None,
) -> Iterator[tuple[str, JsonFields] | DataError]:
    """Yield the rows of an Arrow table or batch. Null fields and binary columns are left out."""
    from pyarrow import types

    table = table.select(
        [
            index
            for index, field in enumerate(table.schema)
            if not (types.is_binary(field.type) or types.is_large_binary(field.type))
        ]
    )
    column_names = table.schema.names
    if duplicates := [name for name in column_names if column_names.count(name) > 1]:
        raise DataError(f"{table_name}: two columns are named {duplicates[0]!r}")
    try:
        rows = table.to_pylist()
    except (ValueError, OverflowError):  # read row by row to find the invalid rows
        rows = [_read_row(table.slice(index, 1)) for index in range(table.num_rows)]
    for number, row in enumerate(rows, start=start):
        location = origin(number) if origin is not None else f"{table_name}#{number}"
        if isinstance(row, UnicodeDecodeError):
            yield DataError(f"{location}: not UTF-8 text ({row.reason})")
        elif isinstance(row, Exception):
            yield DataError(f"{location}: cannot be read ({row})")
        else:
            yield location, {name: _to_json_value(value) for name, value in row.items() if value is not None}


def _read_row(table: Any) -> JsonFields | Exception:  # Any: pyarrow is an optional package
    try:
        return {name: _read_value(table.column(name)) for name in table.schema.names}
    except (ValueError, OverflowError, NotImplementedError) as error:
        return error


def _read_value(column: Any) -> Any:  # Any: pyarrow is an optional package, and a value of it
    try:
        [value] = column.to_pylist()
    except OverflowError:  # a date after the year 9999
        [value] = column.cast("string").to_pylist()
    return value


def _to_json_value(value: Any) -> Any:  # Any: an Arrow value in, a JSON value out
    """Return an Arrow value as a JSON value: dates, decimals and similar types become text.

    Arrow adds the keys of all objects in a column to each object, as nulls; these nulls are removed.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    text = json.dumps(value, default=lambda other: None if isinstance(other, bytes) else str(other))
    return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
