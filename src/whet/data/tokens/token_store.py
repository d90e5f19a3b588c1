"""The token store: tokenized records on disk, under a hash of everything they depend on."""

import array
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from whet.errors import CheckpointError, StorageError
from whet.storage import create_directory_atomically, replace_bytes, write_chunks, write_json

_WEIGHTS = "weights.bin"
_BACKFILLED = 2**20  # weights that are written at a time

SUPERVISED_BIT = np.uint32(1 << 31)  # set for supervised tokens; token ids are smaller
_OPEN_ATTEMPTS = 50


class TokenizedRecord(Protocol):
    """The attributes of an Example that are stored."""

    @property
    def tokens(self) -> Any:  # Any: a list or an array
        """The token ids."""

    @property
    def supervised(self) -> Any:  # Any: a list or an array
        """The loss mask over the tokens."""

    @property
    def weights(self) -> Any:  # Any: a list, an array or None
        """The loss weight of each token, or None if it is 1 for all supervised tokens."""

    @property
    def origin(self) -> str:
        """The location of the record, for messages."""

    @property
    def values(self) -> tuple[float, ...]:
        """The numeric columns of the record."""


class TokenArrays:
    """Tokenized records as arrays, on disk (`TokenStore`) or in memory (`TokenBuffer`)."""

    largest: int  # largest token id
    digest: str  # SHA-256 of all tokens and loss masks
    notes: dict[str, Any]  # Any: JSON values
    bounds: np.ndarray  # [records + 1] start of each record in `_tokens`
    supervised_counts: np.ndarray  # [records] number of supervised targets
    values: np.ndarray  # [records, columns] numeric columns of each record
    _tokens: np.ndarray
    _weights: np.ndarray | None  # [tokens] loss weights, if any record has weights
    _origins: np.ndarray
    _origin_bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.supervised_counts)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and loss mask of a range of tokens."""
        packed = np.asarray(self._tokens[start:stop])
        return (packed & ~SUPERVISED_BIT).astype(np.int64), (packed & SUPERVISED_BIT) != 0

    @property
    def has_weights(self) -> bool:
        """Whether any supervised token has a loss weight other than 1."""
        return self._weights is not None

    def read_weights(self, start: int, stop: int) -> np.ndarray | None:
        """Return the loss weights of a range of tokens, or None if the store has none."""
        return None if self._weights is None else np.array(self._weights[start:stop])

    def origin(self, record: int) -> str:
        """Return the origin of a record."""
        start, stop = self._origin_bounds[record : record + 2]
        return bytes(self._origins[start:stop]).decode()

    def column_values(self, record: int) -> tuple[float, ...]:
        """Return the numeric columns of a record."""
        return tuple(self.values[record].tolist()) if self.values.size else ()

    def record_with(self, token: int) -> int:
        """Return the index of the first record that contains a token."""
        for record in range(len(self)):
            if token in self.read(int(self.bounds[record]), int(self.bounds[record + 1]))[0]:
                return record
        raise ValueError(f"no record contains token {token}")

    def count_supervised(self, record: int, windows: np.ndarray) -> np.ndarray:
        """Return the number of supervised targets in each window [windows, 2] of a record."""
        targets = windows[:, 1] - windows[:, 0] - 1
        if self.supervised_counts[record] == self.bounds[record + 1] - self.bounds[record] - 1:
            return targets  # all targets are supervised, as in plain text
        return np.array([np.count_nonzero(self.read(start + 1, stop)[1]) for start, stop in windows.tolist()])


class TokenStore(TokenArrays):
    """Tokenized records, memory-mapped from disk. Memory does not grow with their number."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        meta = json.loads((directory / "meta.json").read_text())
        self.largest, self.digest, self.notes = meta["largest"], meta["digest"], meta["notes"]
        for name, size in meta["sizes"].items():
            if (directory / name).stat().st_size != size:
                raise ValueError(f"{directory / name} is incomplete")
        self.bounds = self._memmap("bounds.bin", np.int64)
        self.supervised_counts = self._memmap("learned.bin", np.int32)
        self.values = self._memmap("values.bin", np.float64).reshape(-1, max(1, meta["columns"]))
        self._tokens = self._memmap("tokens.bin", np.uint32)
        self._weights = self._memmap(_WEIGHTS, np.float32) if _WEIGHTS in meta["sizes"] else None
        self._origins = self._memmap("origins.bin", np.uint8)
        self._origin_bounds = self._memmap("origin_bounds.bin", np.int64)

    def _memmap(self, name: str, dtype: type) -> np.ndarray:
        path = self.directory / name
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.zeros(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r")

    def write_sidecar(self, name: str, values: np.ndarray) -> None:
        """Write values computed from the tokens to a file in the store, atomically."""
        replace_bytes(self.directory / name, values.tobytes())


class TokenBuffer(TokenArrays):
    """Tokenized records in memory: one block of a stream."""

    def __init__(self, examples: Iterable[TokenizedRecord], *, notes: Callable[[], dict[str, Any]] = dict):
        # Any: JSON values; `notes` is called after the last example
        tokens, masks, weights = list[np.ndarray](), list[np.ndarray](), list[np.ndarray | None]()
        origins, values = list[bytes](), list[tuple[float, ...]]()
        for example in examples:
            tokens.append(np.asarray(example.tokens, dtype=np.uint32))
            masks.append(np.asarray(example.supervised, dtype=bool))
            weights.append(None if example.weights is None else np.asarray(example.weights, np.float32))
            origins.append(example.origin.encode())
            values.append(example.values)
        self.notes = notes()
        self.bounds = _bounds(tokens)
        self.supervised_counts = np.array([np.count_nonzero(mask[1:]) for mask in masks], dtype=np.int32)
        columns = len(values[0]) if values else 0
        self.values = np.array(values, dtype=np.float64).reshape(len(values), columns)
        ids = np.concatenate(tokens) if tokens else np.zeros(0, np.uint32)
        self._tokens = ids | (np.concatenate(masks) * SUPERVISED_BIT if masks else ids)
        self._weights = None
        if any(each is not None for each in weights):
            filled = [
                mask.astype(np.float32) if each is None else each
                for each, mask in zip(weights, masks, strict=True)
            ]
            self._weights = np.concatenate(filled)
        self._origins = np.frombuffer(b"".join(origins), dtype=np.uint8)
        self._origin_bounds = _bounds(origins)
        self.largest = int(ids.max()) if len(ids) else 0
        content = self._tokens.tobytes() + (b"" if self._weights is None else self._weights.tobytes())
        self.digest = hashlib.sha256(content).hexdigest()


def _bounds(parts: Sequence[np.ndarray] | Sequence[bytes]) -> np.ndarray:
    """Return where each part starts when they are joined, and the end of the last."""
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def write_store(
    directory: Path,
    examples: Iterable[TokenizedRecord],
    *,
    notes: Callable[[], dict[str, Any]] = dict,  # Any: JSON values
) -> TokenStore:
    """Write a store. It appears in `directory` once it is complete.

    If another process has written the same store in the meantime, that store is used: it may already be open.

    Args:
        directory: The directory of the store.
        examples: The tokenized records.
        notes: Called after the last example; returns JSON values to save with the store.
    """
    is_new = open_store(directory) is None
    try:
        with create_directory_atomically(directory, replace=directory.exists()) as staging:
            _write_files(staging, examples, notes)
    except (CheckpointError, StorageError):
        if not is_new or (store := _wait_for_store(directory)) is None:
            raise
        return store
    return _wait_for_store(directory) or TokenStore(directory)


def _write_files(
    staging: Path, examples: Iterable[TokenizedRecord], notes: Callable[[], dict[str, Any]]
) -> None:
    # Any: JSON values
    bounds, origin_bounds = array.array("q", [0]), array.array("q", [0])
    supervised_counts, values = array.array("i"), array.array("d")
    largest = columns = 0
    digest = hashlib.sha256()
    weights = _WeightWriter(staging / _WEIGHTS)
    with (
        (staging / "tokens.bin").open("wb") as tokens,
        (staging / "origins.bin").open("wb") as origins,
        contextlib.closing(weights),
    ):
        for example in examples:
            ids = np.asarray(example.tokens, dtype=np.uint32)
            mask = np.asarray(example.supervised, dtype=bool)
            packed = (ids | (mask * SUPERVISED_BIT)).tobytes()
            tokens.write(packed)
            digest.update(packed)
            weights.add(mask, example.weights)
            origin = example.origin.encode()
            origins.write(origin)
            bounds.append(bounds[-1] + len(ids))
            origin_bounds.append(origin_bounds[-1] + len(origin))
            largest = max(largest, int(ids.max()))
            supervised_counts.append(int(np.count_nonzero(mask[1:])))
            values.extend(example.values)
            columns = len(example.values)
    write_chunks(staging / "bounds.bin", [np.asarray(bounds, dtype=np.int64).tobytes()])
    write_chunks(staging / "origin_bounds.bin", [np.asarray(origin_bounds, dtype=np.int64).tobytes()])
    write_chunks(staging / "learned.bin", [np.asarray(supervised_counts, dtype=np.int32).tobytes()])
    write_chunks(staging / "values.bin", [np.asarray(values, dtype=np.float64).tobytes()])
    sizes = {path.name: path.stat().st_size for path in sorted(staging.glob("*.bin"))}
    digest.update(weights.digest())
    meta = {"sizes": sizes, "largest": largest, "columns": columns, "digest": digest.hexdigest()}
    write_json(staging / "meta.json", meta | {"notes": notes()})


class _WeightWriter:
    """Writes the weight of each token to a file, which is created by the first weight other than 1."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._before = 0  # number of tokens before the first weight

    def add(self, mask: np.ndarray, weights: Any) -> None:  # Any: a list, an array or None
        if weights is None and self._file is None:
            self._before += len(mask)
            return
        if self._file is None:
            self._file = self._path.open("wb")
            self._backfill()
        values = mask if weights is None else np.asarray(weights)
        self._write(values.astype(np.float32))

    def _backfill(self) -> None:
        """Write ones for the records before the first weight; those of unsupervised tokens are not read."""
        remaining = self._before
        while remaining:
            count = min(remaining, _BACKFILLED)
            self._write(np.ones(count, dtype=np.float32))
            remaining -= count

    def _write(self, weights: np.ndarray) -> None:
        assert self._file is not None
        data = weights.tobytes()
        self._file.write(data)
        self._digest.update(data)

    def digest(self) -> bytes:
        """Return a hash of the weights, which is empty if there are none."""
        return b"" if self._file is None else self._digest.digest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _wait_for_store(directory: Path) -> TokenStore | None:
    """Return a store that another process is about to complete, or None if it does not appear."""
    for _ in range(_OPEN_ATTEMPTS):
        if (store := open_store(directory)) is not None:
            return store
        time.sleep(0.02)
    return None


def open_store(directory: Path) -> TokenStore | None:
    """Return an existing store, or None if there is no complete one."""
    try:
        return TokenStore(directory)
    except (OSError, ValueError, KeyError, TypeError):
        return None
