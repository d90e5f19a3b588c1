"""TKP1 checkpoints of the quality models: weights, moments and step of every parameter in one file.

    "TKP1"  version u32 = 1  step u32  count u32  config_len u32  config (UTF-8 JSON)  then `count` records:
    name_len u32  name  |  weight, m, v: each a length u32 and as many f32  |  step u32  |  has_grad u8,
    and if it is 1 a length u32 and as many f32

All values are little-endian. The lengths of arrays count values, not bytes. Shapes are not stored, because
the names determine them.
"""

import json
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.errors import CheckpointError
from whet.recipes.quality.tabular_model import TabularModel
from whet.storage import FileRecord, write_chunks

MAGIC, VERSION = b"TKP1", 1
_HEADER = struct.Struct("<4sIIII")
_MIN_RECORD_BYTES = 4 + 3 * 4 + 4 + 1
_MAX_NAME_BYTES = 2**12


@dataclass(frozen=True)
class Tkp1Record:
    """One parameter: its flat weight and moments, its number of updates, and its gradient if it is stored."""

    name: str
    weight: np.ndarray
    m: np.ndarray
    v: np.ndarray
    step: int
    grad: np.ndarray | None = None


@dataclass(frozen=True)
class Tkp1:
    """The contents of a TKP1 checkpoint."""

    step: int
    config: dict[str, Any]  # Any: JSON values
    records: list[Tkp1Record]


def write_tkp1(
    path: Path, *, step: int, config: Mapping[str, Any], count: int, records: Iterable[Tkp1Record]
) -> FileRecord:
    """Write a TKP1 checkpoint, one record at a time.

    Args:
        path: The file to write.
        step: The step of the run.
        config: Stored in the header as JSON. Any: JSON values.
        count: The number of records.
        records: The parameters.
    """
    text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()

    def chunks() -> Iterator[bytes | memoryview]:
        yield _HEADER.pack(MAGIC, VERSION, step, count, len(text))
        yield text
        written = 0
        for record in records:
            name = record.name.encode()
            yield struct.pack("<I", len(name)) + name
            for values in (record.weight, record.m, record.v):
                yield from _encode_array(values)
            yield struct.pack("<IB", record.step, record.grad is not None)
            if record.grad is not None:
                yield from _encode_array(record.grad)
            written += 1
        assert written == count

    return write_chunks(path, chunks())


def _encode_array(values: np.ndarray) -> Iterator[bytes | memoryview]:
    yield struct.pack("<I", values.size)
    if values.size:
        yield np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8).data


def read_tkp1(path: str | Path) -> Tkp1:
    """Read a TKP1 checkpoint.

    Every length is checked against the size of the file before anything is allocated for it.

    Raises:
        CheckpointError: The file cannot be read, or is not a valid TKP1 checkpoint.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < _HEADER.size:
                raise CheckpointError(f"{path} is too short to be a TKP1 checkpoint: {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Reader(path, mapped).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """Parses a file that may be truncated at any byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def read(self) -> Tkp1:
        magic, version, step, count, config_bytes = _HEADER.unpack(self._bytes(_HEADER.size, "its header"))
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is not a TKP1 checkpoint")
        if version != VERSION:
            raise CheckpointError(
                f"{self.path} has TKP1 version {version}, but whet only reads version {VERSION}"
            )
        config = self._config(config_bytes)
        if count * _MIN_RECORD_BYTES > len(self.data) - self.offset:
            raise self._invalid(f"it is too short for {count} records")
        records = [self._record() for _ in range(count)]
        if self.offset != len(self.data):
            raise self._invalid(f"{len(self.data) - self.offset} bytes follow its last record")
        if len({record.name for record in records}) < len(records):
            raise self._invalid("it contains a parameter twice")
        return Tkp1(step, config, records)

    def _config(self, size: int) -> dict[str, Any]:  # Any: JSON values
        try:
            config = json.loads(self._bytes(size, "its config").decode())
        except (ValueError, RecursionError) as error:
            raise self._invalid(f"its config is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise self._invalid("its config is not a JSON object")
        return config

    def _record(self) -> Tkp1Record:
        size = self._length("a name")
        if size > _MAX_NAME_BYTES:
            raise self._invalid(f"a name has {size} bytes, and at most {_MAX_NAME_BYTES} are allowed")
        try:
            name = self._bytes(size, "a name").decode()
        except UnicodeDecodeError as error:
            raise self._invalid(f"a name is not UTF-8: {error}") from error
        weight, m, v = (self._floats(f"{part} of {name!r}") for part in ("weight", "m", "v"))
        if any(len(moment) not in (0, len(weight)) for moment in (m, v)):
            raise self._invalid(
                f"{name!r} has {len(weight)} weights, but its moments have {len(m)} and {len(v)} values"
            )
        step, has_grad = struct.unpack("<IB", self._bytes(5, f"step of {name!r}"))
        if has_grad > 1:
            raise self._invalid(f"{name!r}: has_grad is {has_grad}, not 0 or 1")
        grad = self._floats(f"gradient of {name!r}") if has_grad else None
        return Tkp1Record(name, weight, m, v, step, grad)

    def _floats(self, field: str) -> np.ndarray:
        count = self._length(field)
        return np.frombuffer(self._bytes(4 * count, field), dtype="<f4")

    def _length(self, field: str) -> int:
        return int.from_bytes(self._bytes(4, field), "little")

    def _bytes(self, size: int, field: str) -> bytes:
        if size > len(self.data) - self.offset:
            raise self._invalid(f"it ends within {field}")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def _invalid(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a valid TKP1 checkpoint: {reason}")


def tkp1_names(model: TabularModel) -> dict[str, str]:
    """Return the TKP1 name of each of a model's parameters: numbered within the router and each expert."""
    names, counts = {}, dict[str, int]()
    for name, _ in model.named_parameters():
        first, second, *_ = name.split(".")
        part = f"expert_{second}" if first == "experts" else first
        counts[part] = counts.get(part, -1) + 1
        names[name] = f"{part}.param_{counts[part]}"
    return names


def tkp1_records(
    model: TabularModel, moments: Callable[[torch.Tensor], Mapping[str, torch.Tensor]], *, step: int
) -> Iterator[Tkp1Record]:
    """Yield a model's parameters with their optimizer state; the momentum of SGD is stored in m.

    Args:
        model: The model.
        moments: Returns the optimizer state of a parameter.
        step: The step of the run.
    """
    names = tkp1_names(model)
    for name, parameter in model.named_parameters():
        state = moments(parameter)
        first_moment = state.get("exp_avg", state.get("momentum_buffer"))
        tensors = (parameter, first_moment, state.get("exp_avg_sq"))
        zeros = torch.zeros_like(parameter)
        weight, m, v = (_flat(zeros if tensor is None else tensor) for tensor in tensors)
        yield Tkp1Record(names[name], weight, m, v, step)


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().reshape(-1).numpy()


def restore_tkp1(model: TabularModel, checkpoint: Tkp1) -> None:
    """Copy a checkpoint's weights into a model.

    Raises:
        CheckpointError: The names or sizes do not match. The model is unchanged.
    """
    stored = {record.name: record.weight for record in checkpoint.records}
    parameters = dict(model.named_parameters())
    by_tkp1_name = {tkp1_name: parameters[name] for name, tkp1_name in tkp1_names(model).items()}
    mismatches = sorted(stored.keys() ^ by_tkp1_name.keys())
    mismatches += [
        name
        for name in stored.keys() & by_tkp1_name.keys()
        if stored[name].size != by_tkp1_name[name].numel()
    ]
    if mismatches:
        raise CheckpointError(f"the checkpoint does not fit this model: {', '.join(mismatches[:4])}")
    with torch.no_grad():
        for name, parameter in by_tkp1_name.items():
            parameter.copy_(torch.from_numpy(stored[name].copy()).view(parameter.shape))
