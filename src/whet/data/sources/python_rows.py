"""Records that are Python objects: lists of dicts, datasets, data frames, and functions that yield dicts."""

import datetime
import decimal
import hashlib
import inspect
import json
import math
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from whet.data.sources.hf_datasets import dataset_rows
from whet.data.sources.readers import Content, SourceRow
from whet.data.sources.strict_json import MAX_DEPTH, JsonFields
from whet.errors import DataError, shown
from whet.lazy_import import is_instance_of

_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)  # as in tables
_ACCEPTED = (
    "pass a list of dicts, a datasets.Dataset, a pandas DataFrame, or a function without arguments that "
    "yields dicts"
)


class PythonRows:
    """The records under one name of `whet.train(config, data={name: rows})`.

    Every complete pass is compared with the first one, since tokens are cached under the hash of the records.
    """

    def __init__(self, name: str, rows: object) -> None:
        self.name = name
        self._read = _reader(name, rows)
        self._digest: str | None = None

    def rows(self) -> Iterator[SourceRow]:
        """Yield each record with its origin, `name[index]`, as plain JSON values."""
        sha256 = hashlib.sha256()
        for row in self._read():
            checked, encoded = _encoded(row)
            sha256.update(encoded + b"\n")
            yield checked
        digest = sha256.hexdigest()
        if self._digest not in (None, digest):
            raise DataError(
                f"data {self.name!r} has other records than when it was read first",
                hint="do not change it while the run uses it; a function must yield the same at every call",
            )
        self._digest = digest

    def digest(self) -> str:
        """SHA-256 of all records as JSON, one per line, keys in their order."""
        if self._digest is None:
            for _ in self.rows():
                pass
        assert self._digest is not None
        return self._digest

    def content(self) -> Content:
        """Return the records as a source reads them."""
        return Content(rows=self.rows, digest=self.digest)


def _reader(name: str, rows: object) -> Callable[[], Iterator[SourceRow]]:
    """Return what reads the records anew at each call; an error for what is not readable, or only once."""
    if is_instance_of(rows, "pandas:DataFrame"):
        return lambda: _rows(name, _frame_rows(name, rows))
    if is_instance_of(rows, "datasets:Dataset") or is_instance_of(rows, "datasets:IterableDataset"):
        return lambda: _dataset_rows(name, rows)
    if isinstance(rows, Iterator):
        raise DataError(
            f"data {name!r} is {_a(rows)}, which can be read only once; a run reads records several times",
            hint="pass the function that makes it, without calling it, or a list of all records",
        )
    if isinstance(rows, str | bytes):
        raise DataError(
            f"data {name!r} is the text {shown(rows)}, not records",
            hint=f"name files in the config (data.train: PATH); here, {_ACCEPTED}",
        )
    if isinstance(rows, Mapping):
        raise DataError(f"data {name!r} is a mapping, not a list of records", hint=_ACCEPTED)
    if isinstance(rows, Iterable):
        return lambda: _rows(name, rows)
    if callable(rows) and not isinstance(rows, type):
        return lambda: _rows(name, _called(name, rows))
    raise DataError(f"data {name!r} is {_a(rows)}, not records", hint=_ACCEPTED)


def _called(name: str, function: Callable[[], object]) -> Iterable[object]:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise DataError(f"data {name!r} cannot be called without arguments: {error}") from error
    rows = function()
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise DataError(f"the function of data {name!r} returned {_a(rows)}", hint="let it yield dicts")
    return rows


def _rows(name: str, rows: Iterable[object]) -> Iterator[SourceRow]:
    for index, row in enumerate(rows):
        origin = f"{name}[{index}]"
        if isinstance(row, Mapping):
            try:
                yield origin, _fields(row)
            except ValueError as error:
                yield DataError(f"{origin}: {error}")
        else:
            yield DataError(f"{origin}: a record must be a dict, not {type(row).__name__}")


def _dataset_rows(name: str, dataset: Any) -> Iterator[SourceRow]:  # Any: an optional library
    transformed = isinstance(getattr(dataset, "format", None), dict) and dataset.format["type"] == "custom"
    if transformed:  # a function makes the rows, which Arrow would not call
        return _rows(name, dataset)
    return dataset_rows(dataset, name, origin=lambda number: f"{name}[{number - 1}]")


def _frame_rows(name: str, frame: Any) -> Iterator[JsonFields]:  # Any: an optional library
    """Yield the rows of a data frame; a missing value (NaN, NA, NaT, None) is a field that is not there."""
    names = list(frame.columns)
    if odd := [column for column in names if not isinstance(column, str)]:
        raise DataError(f"data {name!r}: the column {shown(odd[0])} has no name", hint="name it with a text")
    if twice := [column for column in names if names.count(column) > 1]:
        raise DataError(f"data {name!r}: two columns are called {twice[0]!r}")
    pandas = sys.modules["pandas"]
    for values in frame.itertuples(index=False, name=None):
        yield {
            column: value
            for column, value in zip(names, values, strict=True)
            if not (value is None or (pandas.api.types.is_scalar(value) and pandas.isna(value)))
        }


def _fields(row: Mapping[Any, Any]) -> JsonFields:  # Any: whatever somebody's record holds
    return {_key(key, "the record"): _plain(value, str(key)) for key, value in row.items()}


def _plain(value: Any, field: str, depth: int = 1) -> Any:  # Any: as above in, a JSON value out
    """Return a value as JSON has it; raise a ValueError that names the field for what JSON does not have."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested too deeply (more than {MAX_DEPTH} levels)")
    if isinstance(value, Mapping):
        return {_key(key, field): _plain(each, f"{field}.{key}", depth + 1) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        value = list(value)
    if isinstance(value, list | tuple):
        return [_plain(each, f"{field}[{index}]", depth + 1) for index, each in enumerate(value)]
    return _scalar(value, field)


def _scalar(value: Any, field: str) -> str | float | bool | None:  # Any: as above
    if isinstance(value, (*_AS_TEXT, np.datetime64, np.timedelta64)):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum, its value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{field} is {value}, which is not a number: leave out what is missing")
        return float(value)
    hint = "decode it" if isinstance(value, bytes | bytearray) else "make it texts, numbers, lists and dicts"
    raise ValueError(f"{field} is {_a(value)}, which is not a JSON value: {hint}")


def _key(key: Any, field: str) -> str:  # Any: as above
    if not isinstance(key, str):
        raise ValueError(f"{field} has the key {shown(key)}: keys must be texts")
    return str(key)


def _encoded(row: SourceRow) -> tuple[SourceRow, bytes]:
    """Return a row and the bytes that are hashed for it; one that no file could hold becomes an error."""
    if isinstance(row, DataError):
        return row, row.message.encode(errors="replace")
    origin, fields = row
    try:
        return row, json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        bad = DataError(f"{origin}: not UTF-8 text (half of a character: {error.reason})")
    except ValueError as error:  # an integer of thousands of digits, say
        bad = DataError(f"{origin}: not a JSON value ({error})")
    return bad, bad.message.encode(errors="replace")


def _a(value: object) -> str:
    return f"an object of type {type(value).__name__}"
