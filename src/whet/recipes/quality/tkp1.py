"""TKP1 checkpoints of the quality models: weights, moments and step of every parameter in one file.

    "TKP1"  version u32 = 1  step u32  count u32  config_len u32  config (UTF-8 JSON)  then `count` records:
    name_len u32  name  |  weight, m, v: each a length u32 and so many f32  |  step u32  |  has_grad u8,
    and if it is 1 a length u32 and so many f32

All little-endian; lengths of numbers count numbers, not bytes. No shapes are stored: names tell them.
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
from whet.storage import Written, write_chunks

MAGIC, VERSION = b"TKP1", 1
_HEADER = struct.Struct("<4sIIII")
_SMALLEST_RECORD = 4 + 3 * 4 + 4 + 1
_LONGEST_NAME = 2**12


@dataclass(frozen=True)
class Tkp1Record:
    """One parameter: its numbers, flat, and how many updates it has seen."""

    name: str
    weight: np.ndarray
    m: np.ndarray
    v: np.ndarray
    step: int
    grad: np.ndarray | None = None


@dataclass(frozen=True)
class Tkp1:
    """What a file holds."""

    step: int
    config: dict[str, Any]  # Any: JSON values
    records: list[Tkp1Record]


def write_tkp1(
    path: Path, *, step: int, config: Mapping[str, Any], count: int, records: Iterable[Tkp1Record]
) -> Written:
    """Write a checkpoint, one record at a time. Any: JSON values."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()

    def chunks() -> Iterator[bytes | memoryview]:
        yield _HEADER.pack(MAGIC, VERSION, step, count, len(text))
        yield text
        written = 0
        for record in records:
            name = record.name.encode()
            yield struct.pack("<I", len(name)) + name
            for numbers in (record.weight, record.m, record.v):
                yield from _counted(numbers)
            yield struct.pack("<IB", record.step, record.grad is not None)
            if record.grad is not None:
                yield from _counted(record.grad)
            written += 1
        assert written == count

    return write_chunks(path, chunks())


def _counted(numbers: np.ndarray) -> Iterator[bytes | memoryview]:
    yield struct.pack("<I", numbers.size)
    if numbers.size:
        yield np.ascontiguousarray(numbers, dtype="<f4").reshape(-1).view(np.uint8).data


def read_tkp1(path: str | Path) -> Tkp1:
    """Read a checkpoint; every length is held against the file's size before anything of it is taken."""
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
    """A place in a file that may end at any byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.place = 0

    def read(self) -> Tkp1:
        magic, version, step, count, config_bytes = _HEADER.unpack(self._take(_HEADER.size, "its header"))
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is not a TKP1 checkpoint")
        if version != VERSION:
            raise CheckpointError(f"{self.path} is TKP1 of version {version}; whet reads version {VERSION}")
        config = self._config(config_bytes)
        if count * _SMALLEST_RECORD > len(self.data) - self.place:
            raise self._broken(f"{count} records do not fit into it")
        records = [self._record() for _ in range(count)]
        if self.place != len(self.data):
            raise self._broken(f"{len(self.data) - self.place} bytes follow its last record")
        if len({record.name for record in records}) < len(records):
            raise self._broken("a parameter is in it twice")
        return Tkp1(step, config, records)

    def _config(self, size: int) -> dict[str, Any]:  # Any: JSON values
        try:
            config = json.loads(self._take(size, "its config").decode())
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its config is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise self._broken("its config is not a JSON object")
        return config

    def _record(self) -> Tkp1Record:
        size = self._number("a name")
        if size > _LONGEST_NAME:
            raise self._broken(f"a name of {size} bytes")
        try:
            name = self._take(size, "a name").decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"a name is not UTF-8: {error}") from error
        weight, m, v = (self._floats(f"{part} of {name!r}") for part in ("weight", "m", "v"))
        if any(len(moment) not in (0, len(weight)) for moment in (m, v)):
            raise self._broken(f"{name!r} has {len(weight)} weights, and moments of {len(m)} and {len(v)}")
        step, has_grad = struct.unpack("<IB", self._take(5, f"step of {name!r}"))
        if has_grad > 1:
            raise self._broken(f"{name!r}: has_grad is {has_grad}")
        grad = self._floats(f"gradient of {name!r}") if has_grad else None
        return Tkp1Record(name, weight, m, v, step, grad)

    def _floats(self, what: str) -> np.ndarray:
        count = self._number(what)
        return np.frombuffer(self._take(4 * count, what), dtype="<f4")

    def _number(self, what: str) -> int:
        return int.from_bytes(self._take(4, what), "little")

    def _take(self, size: int, what: str) -> bytes:
        if size > len(self.data) - self.place:
            raise self._broken(f"it ends within {what}")
        self.place += size
        return self.data[self.place - size : self.place]

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is broken: {why}")


def tkp1_names(model: TabularModel) -> dict[str, str]:
    """A model's parameters under the names that TKP1 files give them: numbered within each part."""
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
    """A model's parameters and what its optimizer remembers of them; SGD's momentum is in m."""
    names = tkp1_names(model)
    for name, parameter in model.named_parameters():
        found = moments(parameter)
        m = found.get("exp_avg", found.get("momentum_buffer"))
        kept = (parameter, m, found.get("exp_avg_sq"))
        zeros = torch.zeros_like(parameter)
        weight, first, second = (_flat(zeros if tensor is None else tensor) for tensor in kept)
        yield Tkp1Record(names[name], weight, first, second, step)


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().reshape(-1).numpy()


def restore_tkp1(model: TabularModel, checkpoint: Tkp1) -> None:
    """Put a checkpoint's weights into a model, all of them by name, or none."""
    found = {record.name: record.weight for record in checkpoint.records}
    parameters = dict(model.named_parameters())
    wanted = {theirs: parameters[ours] for ours, theirs in tkp1_names(model).items()}
    odd = sorted(found.keys() ^ wanted.keys())
    odd += [name for name in found.keys() & wanted.keys() if found[name].size != wanted[name].numel()]
    if odd:
        raise CheckpointError(f"the checkpoint does not fit this model: {', '.join(odd[:4])}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(torch.from_numpy(found[name].copy()).view(parameter.shape))
