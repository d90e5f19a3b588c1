"""The token store: records tokenised once, kept on disk under a hash of everything they depend on."""

import array
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from whet.errors import CheckpointError, StorageError
from whet.storage import new_directory, replace_bytes, write_chunks, write_json

LEARNED = np.uint32(1 << 31)  # set in a token that is supervised: ids are smaller
_TRIES = 50


class Tokenised(Protocol):
    """What is stored: an Example, without a need to know it here."""

    @property
    def tokens(self) -> Any:  # Any: a list or an array
        """Ids."""

    @property
    def supervised(self) -> Any:  # Any: a list or an array
        """A mark on each that is learned."""

    @property
    def origin(self) -> str:
        """Where it came from."""

    @property
    def values(self) -> tuple[float, ...]:
        """Numbers that came with it."""


class TokenStore:
    """Records as token ids, read from disk as they are used: memory stays flat however many there are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        meta = json.loads((directory / "meta.json").read_text())
        self.largest: int = meta["largest"]  # of all token ids
        self.digest: str = meta["digest"]  # SHA-256 of all tokens and marks
        self.notes: dict[str, Any] = meta["notes"]  # Any: JSON values
        for name, size in meta["sizes"].items():
            if (directory / name).stat().st_size != size:
                raise ValueError(f"{directory / name} was not written to the end")
        self.bounds = self._map("bounds.bin", np.int64)  # [records + 1] where each starts in `_tokens`
        self.learned = self._map("learned.bin", np.int32)  # [records] how many of its targets are supervised
        # [records, columns] numbers that came with each record
        self.values = self._map("values.bin", np.float64).reshape(-1, max(1, meta["columns"]))
        self._tokens = self._map("tokens.bin", np.uint32)
        self._origins = self._map("origins.bin", np.uint8)
        self._origin_bounds = self._map("origin_bounds.bin", np.int64)

    def _map(self, name: str, kind: type) -> np.ndarray:
        path = self.directory / name
        if not path.stat().st_size:  # nothing can be mapped
            return np.zeros(0, dtype=kind)
        return np.memmap(path, dtype=kind, mode="r")

    def __len__(self) -> int:
        return len(self.learned)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and marks of a range of tokens."""
        found = np.asarray(self._tokens[start:stop])
        return (found & ~LEARNED).astype(np.int64), (found & LEARNED) != 0

    def origin(self, record: int) -> str:
        """Where a record came from."""
        start, stop = self._origin_bounds[record : record + 2]
        return bytes(self._origins[start:stop]).decode()

    def values_of(self, record: int) -> tuple[float, ...]:
        """The numbers that came with a record."""
        return tuple(self.values[record].tolist()) if self.values.size else ()

    def record_with(self, token: int) -> int:
        """The first record that has this token."""
        for record in range(len(self)):
            if token in self.read(int(self.bounds[record]), int(self.bounds[record + 1]))[0]:
                return record
        raise ValueError(f"no record has the token {token}")

    def keep_beside(self, name: str, values: np.ndarray) -> None:
        """Keep numbers that were computed from the tokens, all of them or none."""
        replace_bytes(self.directory / name, values.tobytes())

    def count_learned(self, record: int, windows: np.ndarray) -> np.ndarray:
        """Supervised targets in each window [windows, 2] of a record."""
        targets = windows[:, 1] - windows[:, 0] - 1
        if self.learned[record] == self.bounds[record + 1] - self.bounds[record] - 1:
            return targets  # all of them, as in plain text: nothing needs to be read
        return np.array([np.count_nonzero(self.read(start + 1, stop)[1]) for start, stop in windows.tolist()])


def write_store(
    directory: Path,
    examples: Iterable[Tokenised],
    *,
    notes: Callable[[], dict[str, Any]] = dict,  # Any: JSON values
) -> TokenStore:
    """Write a store, which appears when it is complete; `notes` is asked after the last example.

    Where another process has written the same meanwhile, its store stays: it may be reading it already.
    """
    is_new = open_store(directory) is None
    try:
        with new_directory(directory, replace=directory.exists()) as staging:
            _fill(staging, examples, notes)
    except (CheckpointError, StorageError):
        if not is_new or (found := _arriving(directory)) is None:
            raise
        return found
    return _arriving(directory) or TokenStore(directory)


def _fill(staging: Path, examples: Iterable[Tokenised], notes: Callable[[], dict[str, Any]]) -> None:
    # Any: JSON values
    bounds, origin_bounds = array.array("q", [0]), array.array("q", [0])
    learned, values = array.array("i"), array.array("d")
    largest = columns = 0
    digest = hashlib.sha256()
    with (staging / "tokens.bin").open("wb") as tokens, (staging / "origins.bin").open("wb") as origins:
        for example in examples:
            ids = np.asarray(example.tokens, dtype=np.uint32)
            marks = np.asarray(example.supervised, dtype=bool)
            marked = (ids | (marks * LEARNED)).tobytes()
            tokens.write(marked)
            digest.update(marked)
            origin = example.origin.encode()
            origins.write(origin)
            bounds.append(bounds[-1] + len(ids))
            origin_bounds.append(origin_bounds[-1] + len(origin))
            largest = max(largest, int(ids.max()))
            learned.append(int(np.count_nonzero(marks[1:])))
            values.extend(example.values)
            columns = len(example.values)
    write_chunks(staging / "bounds.bin", [np.asarray(bounds, dtype=np.int64).tobytes()])
    write_chunks(staging / "origin_bounds.bin", [np.asarray(origin_bounds, dtype=np.int64).tobytes()])
    write_chunks(staging / "learned.bin", [np.asarray(learned, dtype=np.int32).tobytes()])
    write_chunks(staging / "values.bin", [np.asarray(values, dtype=np.float64).tobytes()])
    sizes = {path.name: path.stat().st_size for path in sorted(staging.glob("*.bin"))}
    meta = {"sizes": sizes, "largest": largest, "columns": columns, "digest": digest.hexdigest()}
    write_json(staging / "meta.json", meta | {"notes": notes()})


def _arriving(directory: Path) -> TokenStore | None:
    """A store that some process puts there right now."""
    for _ in range(_TRIES):
        if (found := open_store(directory)) is not None:
            return found
        time.sleep(0.02)
    return None


def open_store(directory: Path) -> TokenStore | None:
    """A store that was written before, or None when there is none that is whole."""
    try:
        return TokenStore(directory)
    except (OSError, ValueError, KeyError, TypeError):
        return None
