"""Top-k log-probabilities of a teacher at each supervised target, stored with the tokens."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.storage import replace_chunks, replace_text


class TeacherTargets(NamedTuple):
    """Log-probabilities of a teacher at some targets.

    The last one is that of all tokens outside the top k combined.
    """

    ids: np.ndarray  # [targets, k]
    logprobs: np.ndarray  # [targets, k + 1]


class TeacherLogprobs:
    """The log-probabilities of a teacher for all examples, at temperature 1, memory-mapped from disk."""

    def __init__(self, path: Path, ends: np.ndarray, facts: Mapping[str, Any]) -> None:  # Any: JSON values
        self.facts = facts
        self._ends = ends  # [examples]: end of the targets of each example
        kind = target_dtype(facts["top_k"])
        if path.stat().st_size != kind.itemsize * int(ends[-1]):
            raise ValueError(f"{path} is incomplete")
        self._rows = np.memmap(path, dtype=kind, mode="r")

    def __getitem__(self, index: int) -> TeacherTargets:
        rows = self._rows[self._ends[index - 1] if index else 0 : self._ends[index]]
        return TeacherTargets(rows["ids"].astype(np.int32), np.array(rows["logprobs"]))


def target_dtype(top_k: int) -> np.dtype[np.void]:
    """Return the dtype of one stored target."""
    return np.dtype([("ids", "<u4", (top_k,)), ("logprobs", "<f4", (top_k + 1,))])


def targets_to_bytes(taught: TeacherTargets) -> bytes:
    """Return targets in their stored form."""
    rows = np.empty(len(taught.ids), dtype=target_dtype(taught.ids.shape[1]))
    rows["ids"], rows["logprobs"] = taught.ids, taught.logprobs
    return rows.tobytes()


def write_teacher_logprobs(
    path: Path, chunks: Iterable[bytes], facts: Mapping[str, Any]
) -> None:  # Any: JSON values
    """Write the log-probabilities, then a JSON file with facts about them, which marks them as complete."""
    facts_path = path.with_suffix(".json")
    facts_path.unlink(missing_ok=True)
    replace_chunks(path, chunks)
    replace_text(facts_path, json.dumps(dict(facts)))


def open_teacher_logprobs(path: Path, counts: np.ndarray) -> TeacherLogprobs | None:
    """Return stored log-probabilities for examples with these target counts, or None if incomplete."""
    try:
        facts = json.loads(path.with_suffix(".json").read_text())
        return TeacherLogprobs(path, np.cumsum(counts), facts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
