"""Read llama.cpp's importance matrices: the mean squared inputs of each weight, which guide its rounding."""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.gguf.reader import read_gguf

Importance = dict[str, NDArray[np.float32]]  # the importance of each input of a tensor, by GGUF name

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: str | Path) -> Importance:
    """Read a file of llama.cpp's imatrix tool, in its GGUF format or in its older binary format.

    Raises:
        ModelError: If the file cannot be read, or is not an importance matrix.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    with invalid_input_errors(f"{path} is not an importance matrix of llama.cpp"):
        importance = _read_gguf(path) if is_gguf else _read_binary(path.read_bytes())
    if not importance:
        raise ModelError(f"{path} is not an importance matrix of llama.cpp: it has no entries")
    for name, values in importance.items():
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ModelError(f"{path}: the importance of {name} has negative or non-finite values")
    return importance


def _read_gguf(path: Path) -> Importance:
    file = read_gguf(path)
    importance: Importance = {}
    for name in file.tensors:
        if not name.endswith(_SUMS):
            continue
        tensor = name.removesuffix(_SUMS)
        counts = file.array(tensor + _COUNTS).reshape(-1, 1)  # one per expert
        sums = file.array(name).reshape(len(counts), -1)
        # an expert without inputs has no importance, so all its weights count the same
        means = np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)
        importance[tensor] = means.reshape(-1)
    return importance


def _read_binary(content: bytes) -> Importance:
    """Read the older format: a number of entries, each a name, a number of calls, and a list of sums."""
    position = 0

    def read(size: int) -> bytes:
        nonlocal position
        if not 0 <= size <= len(content) - position:
            raise ValueError(f"the file ends within an entry at offset {position}")
        position += size
        return content[position - size : position]

    def integer() -> int:
        value: int = struct.unpack("<i", read(4))[0]
        return value

    importance: Importance = {}
    for _ in range(integer()):
        name = read(integer()).decode()
        calls, length = integer(), integer()
        sums = np.frombuffer(read(4 * length), np.float32)
        importance[name] = sums / np.float32(calls) if calls > 0 else np.ones_like(sums)
    return importance


def check_imatrix(importance: Importance, shapes: dict[str, tuple[int, ...]], path: str | Path) -> None:
    """Raise ModelError if an importance matrix belongs to another model."""
    matched = 0
    for name, values in importance.items():
        if name not in shapes:
            continue
        *rows, columns = shapes[name]
        expected = columns * (math.prod(rows[:-1]) if len(rows) > 1 else 1)  # one row per expert
        if values.size != expected:
            raise ModelError(
                f"{path} is of another model: {name} has {values.size} inputs there, and {expected} here"
            )
        matched += 1
    if not matched:
        raise ModelError(f"{path} is of another model: it has no tensor of this one")
