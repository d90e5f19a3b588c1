"""What a teacher said of each supervised target, kept beside the tokens."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.storage import replace_chunks, replace_text


class Taught(NamedTuple):
    """Of some targets: the k likeliest tokens, and log-probabilities of those and of all others together."""

    ids: np.ndarray  # [targets, k]
    logprobs: np.ndarray  # [targets, k + 1]


class Teaching:
    """What a teacher said of every example, at temperature 1; read from disk as it is used."""

    def __init__(self, path: Path, ends: np.ndarray, facts: Mapping[str, Any]) -> None:  # Any: JSON values
        self.facts = facts
        self._ends = ends  # [examples]: where the targets of each end
        kind = row_type(facts["top_k"])
        if path.stat().st_size != kind.itemsize * int(ends[-1]):
            raise ValueError(f"{path} was not written to the end")
        self._rows = np.memmap(path, dtype=kind, mode="r")

    def __getitem__(self, index: int) -> Taught:
        rows = self._rows[self._ends[index - 1] if index else 0 : self._ends[index]]
        return Taught(rows["ids"].astype(np.int32), np.array(rows["logprobs"]))


def row_type(top_k: int) -> np.dtype[np.void]:
    """What is stored of one target."""
    return np.dtype([("ids", "<u4", (top_k,)), ("logprobs", "<f4", (top_k + 1,))])


def as_bytes(taught: Taught) -> bytes:
    """Targets as they are stored."""
    rows = np.empty(len(taught.ids), dtype=row_type(taught.ids.shape[1]))
    rows["ids"], rows["logprobs"] = taught.ids, taught.logprobs
    return rows.tobytes()


def write_teaching(path: Path, chunks: Iterable[bytes], facts: Mapping[str, Any]) -> None:  # Any: JSON values
    """Write what was said, then the facts that vouch for it: `top_k`, and where it came from."""
    about = path.with_suffix(".json")
    about.unlink(missing_ok=True)
    replace_chunks(path, chunks)
    replace_text(about, json.dumps(dict(facts)))


def open_teaching(path: Path, counts: np.ndarray) -> Teaching | None:
    """What was written before for examples with so many targets each, or None where it is not whole."""
    try:
        facts = json.loads(path.with_suffix(".json").read_text())
        return Teaching(path, np.cumsum(counts), facts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
