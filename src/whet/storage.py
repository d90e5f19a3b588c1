"""The one writer: every byte of a model, adapter or checkpoint goes to disk through this file.

Directories appear complete or not at all: they are filled under a temporary name, fsynced, and renamed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from whet.errors import CheckpointError

MANIFEST = "MANIFEST.json"

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a whole file and fsync it. All other writers end here, so faults can be injected here."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            del chunk  # a large one shall not stay while the next is made
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file through the one writer."""
    write_chunks(path, [text.encode()])


def replace_text(path: Path, text: str) -> None:
    """Change a text file all at once: a reader, or a crash, sees the old one or the new one."""
    staging = path.with_name(f".{path.name}.writing-{os.getpid()}")
    write_text(staging, text)
    staging.replace(path)


def write_json(path: Path, value: Any) -> None:  # Any: whatever json.dumps takes
    """Write readable JSON through the one writer."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    make: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write tensors in the safetensors format, streaming: no second copy of the whole file in memory.

    With `make` the tensors only say their shapes and dtypes (on the meta device), and each is made when its
    turn comes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format asks for an aligned data section

    def chunks() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(encoded))
        yield encoded
        for name, described in tensors.items():
            tensor = described if make is None else make(name)
            assert (tensor.shape, tensor.dtype) == (described.shape, described.dtype), name
            plain = tensor.detach().to("cpu").contiguous().reshape(-1)
            if plain.numel():
                yield plain.view(torch.uint8).numpy().data
            del tensor, plain

    write_chunks(path, chunks())


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(path: Path, *, manifest: bool = False, replace: bool = False) -> Iterator[Path]:
    """Fill a directory that appears under its name only when it is complete.

    What is there already is replaced only when the caller says so: it may be somebody's work.
    """
    if not replace and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists already, and whet overwrites nothing", hint="choose another name"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".{path.name}.writing-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        if manifest:
            write_manifest(staging)
        _fsync_directory(staging)
        replace_directory(staging, path)
        _fsync_directory(path.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Write a file that appears under its name only when it is complete; what is there already stays."""
    if path.exists():
        raise CheckpointError(
            f"{path} exists already, and whet overwrites nothing", hint="choose another name"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".{path.name}.writing-{os.getpid()}"
    try:
        yield staging
        staging.rename(path)
        _fsync_directory(path.parent)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`; an older `target` is moved aside first and removed last."""
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def write_manifest(directory: Path) -> None:
    """Record size and SHA-256 of every file in a directory; written last, so it vouches for the rest."""
    files = {
        str(file.relative_to(directory)): {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
    write_json(directory / MANIFEST, {"files": files})


def check_manifest(directory: Path) -> None:
    """Raise a CheckpointError that says what is wrong unless every file is as the manifest says."""
    manifest = directory / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"{directory} has no {MANIFEST}: it was not written to the end")
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{manifest} cannot be read: {error}") from error
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{directory}: {name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes; its manifest says {expected['bytes']}"
            )
        if sha256_of(path) != expected["sha256"]:
            raise CheckpointError(f"{path} does not match its sha256")
