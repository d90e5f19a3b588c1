"""Read records from Python objects: lists of dicts, datasets, data frames, and functions that yield dicts."""

import datetime
import decimal
import hashlib
import inspect
import itertools
import json
import logging
import math
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from whet.data.sources.hf_datasets import dataset_rows, dataset_shards
from whet.data.sources.readers import Columns, Shard, SourceContent, SourceRow, rename_row
from whet.data.sources.strict_json import MAX_DEPTH, JsonFields
from whet.errors import DataError, short_repr
from whet.lazy_import import is_instance_of

log = logging.getLogger("whet")

_MANY_RECORDS = 1_000_000
_IDENTITY_RECORDS = 1000
# converted to text, as in tables
_TEXT_TYPES = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
_ACCEPTED_HINT = (
    "pass a list of dicts, a datasets.Dataset, a pandas DataFrame, an object with __len__ and __getitem__, "
    "or a function without arguments that yields dicts"
)


@runtime_checkable
class _MapStyle(Protocol):
    """Records by index, such as a torch.utils.data.Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...


class PythonRows:
    """The records passed as `whet.train(config, data={name: rows})`.

    Every complete pass is compared with the first, because tokens are cached under the hash of the records.
    Records that are streamed may be endless: only the first of them are compared.
    """

    def __init__(self, name: str, rows: object) -> None:
        self.name = name
        self.is_streamed = False  # set for the records of data.stream
        self._rows = rows
        self._read = _make_reader(name, rows)
        self._digest: str | None = None
        self._identity: str | None = None

    def rows(self) -> Iterator[SourceRow]:
        """Yield each record with its origin, `name[index]`, as plain JSON values."""
        sha256 = hashlib.sha256()
        for number, row in enumerate(self._read(), start=1):
            checked, encoded = _encode(row)
            sha256.update(encoded + b"\n")
            if number == _MANY_RECORDS and self._digest is None:
                log.warning(
                    "data %r has more than %d records, and all are read before training: if it is endless, "
                    "set data.stream to true",
                    *(self.name, number),
                )
            yield checked
        digest = sha256.hexdigest()
        if self._digest not in (None, digest):
            raise DataError(
                f"the records of data {self.name!r} have changed since the first pass",
                hint="do not change them during a run; a function must yield the same records at each call",
            )
        self._digest = digest

    def digest(self) -> str:
        """Return the SHA-256 of all records as JSON, one per line, with keys in their original order."""
        if self.is_streamed:
            return self.identity()
        if self._digest is None:
            for _ in self.rows():
                pass
        assert self._digest is not None
        return self._digest

    def content(self) -> SourceContent:
        """Return the records in the form that a source reads."""
        return SourceContent(rows=self.rows, digest=self.digest, shards=self._shards, identity=self.identity)

    def identity(self) -> str:
        """Return the SHA-256 of the first records."""
        if self._identity is None:
            sha256 = hashlib.sha256()
            for row in itertools.islice(self._read(), _IDENTITY_RECORDS):
                sha256.update(_encode(row)[1] + b"\n")
            self._identity = sha256.hexdigest()
        return self._identity

    def _shards(self, columns: Columns) -> Sequence[Shard]:
        from whet.data.sources.shards import counted_shard

        if _is_dataset(self._rows) and not _is_transformed(self._rows):
            origin = (lambda number: f"{self.name}[{number - 1}]") if hasattr(self._rows, "__len__") else None
            return dataset_shards(self._rows, self.name, columns, origin=origin)
        return [counted_shard(lambda: (rename_row(_encode(row)[0], columns) for row in self._read()))]


def _make_reader(name: str, rows: object) -> Callable[[], Iterator[SourceRow]]:
    """Return a function that reads the records from the start; raise an error if that is not possible."""
    if is_instance_of(rows, "pandas:DataFrame"):
        return lambda: _rows(name, _frame_rows(name, rows))
    if _is_dataset(rows):
        return lambda: _dataset_rows(name, rows)
    if isinstance(rows, Iterator):
        raise DataError(
            f"data {name!r} is {_describe_type(rows)}, which can be read only once, but a run reads its "
            "records several times",
            hint="pass the function that creates it, without calling it, or a list of all records",
        )
    if isinstance(rows, str | bytes):
        raise DataError(
            f"data {name!r} is a string ({short_repr(rows)}), not records",
            hint=f"name files in the config (data.train: PATH); in Python, {_ACCEPTED_HINT}",
        )
    if isinstance(rows, Mapping):
        raise DataError(f"data {name!r} is a mapping, not a list of records", hint=_ACCEPTED_HINT)
    if isinstance(rows, Iterable):
        return lambda: _rows(name, rows)
    if isinstance(rows, _MapStyle) and not isinstance(rows, type):
        return lambda: _rows(name, (rows[index] for index in range(len(rows))))
    if callable(rows) and not isinstance(rows, type):
        return lambda: _rows(name, _call(name, rows))
    raise DataError(f"data {name!r} is {_describe_type(rows)}, not records", hint=_ACCEPTED_HINT)


def _call(name: str, function: Callable[[], object]) -> Iterable[object]:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise DataError(f"data {name!r} cannot be called without arguments: {error}") from error
    rows = function()
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise DataError(
            f"the function passed as data {name!r} returned {_describe_type(rows)}",
            hint="it must yield dicts",
        )
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


def _is_dataset(rows: object) -> bool:
    return is_instance_of(rows, "datasets:Dataset") or is_instance_of(rows, "datasets:IterableDataset")


def _is_transformed(dataset: Any) -> bool:  # Any: an optional library
    """Return whether a transform creates the rows, which Arrow would bypass."""
    return isinstance(getattr(dataset, "format", None), dict) and dataset.format["type"] == "custom"


def _dataset_rows(name: str, dataset: Any) -> Iterator[SourceRow]:  # Any: an optional library
    if _is_transformed(dataset):
        return _rows(name, dataset)
    return dataset_rows(dataset, name, origin=lambda number: f"{name}[{number - 1}]")


def _frame_rows(name: str, frame: Any) -> Iterator[JsonFields]:  # Any: an optional library
    """Yield the rows of a data frame, without missing values (NaN, NA, NaT, None)."""
    names = list(frame.columns)
    if unnamed := [column for column in names if not isinstance(column, str)]:
        raise DataError(
            f"data {name!r}: the column name {short_repr(unnamed[0])} is not a string",
            hint="rename the column",
        )
    if duplicates := [column for column in names if names.count(column) > 1]:
        raise DataError(f"data {name!r}: two columns are named {duplicates[0]!r}")
    pandas = sys.modules["pandas"]
    for values in frame.itertuples(index=False, name=None):
        yield {
            column: value
            for column, value in zip(names, values, strict=True)
            if not (value is None or (pandas.api.types.is_scalar(value) and pandas.isna(value)))
        }


def _fields(row: Mapping[Any, Any]) -> JsonFields:  # Any: values of user records
    return {_check_key(key, "the record"): _to_json_value(value, str(key)) for key, value in row.items()}


def _to_json_value(value: Any, field: str, depth: int = 1) -> Any:  # Any: a user value in, a JSON value out
    """Return a value as JSON; raise a ValueError that names the field if JSON has no such value."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested too deeply (more than {MAX_DEPTH} levels)")
    if isinstance(value, Mapping):
        return {
            _check_key(key, field): _to_json_value(item, f"{field}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, np.ndarray):
        value = list(value)
    if isinstance(value, list | tuple):
        return [_to_json_value(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(value)]
    return _to_json_scalar(value, field)


def _to_json_scalar(value: Any, field: str) -> str | float | bool | None:  # Any: a value of a user record
    if isinstance(value, (*_TEXT_TYPES, np.datetime64, np.timedelta64)):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the value of a string enum
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{field} is {value}, which is not a number: leave out what is missing")
        return float(value)
    hint = "decode it" if isinstance(value, bytes | bytearray) else "make it texts, numbers, lists and dicts"
    raise ValueError(f"{field} is {_describe_type(value)}, which is not a JSON value: {hint}")


def _check_key(key: Any, field: str) -> str:  # Any: a value of a user record
    if not isinstance(key, str):
        raise ValueError(f"{field} has the key {short_repr(key)}: keys must be texts")
    return str(key)


def _encode(row: SourceRow) -> tuple[SourceRow, bytes]:
    """Return a row and the bytes to hash for it. A row that JSON cannot represent becomes an error.

    The messages of bad rows enter the digest: rewording one would change the digests of existing data.
    """
    if isinstance(row, DataError):
        return row, row.message.encode(errors="replace")
    origin, fields = row
    try:
        return row, json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        bad = DataError(f"{origin}: not UTF-8 text (half of a character: {error.reason})")
    except ValueError as error:  # for example an integer with thousands of digits
        bad = DataError(f"{origin}: not a JSON value ({error})")
    return bad, bad.message.encode(errors="replace")


def _describe_type(value: object) -> str:
    return f"an object of type {type(value).__name__}"
