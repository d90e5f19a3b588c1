"""Crash-safe file operations: all models, adapters and checkpoints are written through this module.

Files and directories are written under a temporary name, fsynced and renamed: a reader or a crash sees them
complete or not at all. The module also locates the caches and reads JSON files with a size limit.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.error_boundary import invalid_input_errors
from whet.errors import CheckpointError, ModelError, StorageError

if TYPE_CHECKING:
    import torch

MANIFEST = "MANIFEST.json"
LOCK = ".lock"
_MAX_MANIFEST_BYTES = 2**20
_TEMPORARY_NAME = re.compile(r"\.(?P<name>.+)\.(?P<kind>writing|old|removed)-(?P<pid>\d+)")

SAFETENSORS_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
_MAX_JSON_BYTES = 32 * 2**20  # the weight index of the largest models has about 10 MB


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file, computed while it was written: its entry in a manifest."""

    bytes: int
    sha256: str


def before_file_operation(operation: str, path: Path) -> None:
    """Do nothing; called before every file operation of a write, for tests to inject faults."""


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file from chunks and fsync it. All other writers use this function."""
    digest, size = hashlib.sha256(), 0
    before_file_operation("open", path)
    with path.open("wb") as file:
        for chunk in chunks:
            before_file_operation("write", path)
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            del chunk  # free it before the next one is created
        file.flush()
        before_file_operation("fsync", path)
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def write_text(path: Path, text: str) -> FileRecord:
    """Write a text file and fsync it."""
    return write_chunks(path, [text.encode()])


def replace_text(path: Path, text: str) -> None:
    """Replace a text file atomically: a reader or a crash sees either the old or the new content."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically with these bytes."""
    replace_chunks(path, [content])


def replace_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replace a file atomically with content that may be too large for memory."""
    staging = path.with_name(f".{path.name}.writing-{os.getpid()}")
    with _storage_errors(path):
        try:
            write_chunks(staging, chunks)
        except BaseException:
            staging.unlink(missing_ok=True)
            raise
        _rename(staging, path)
        _fsync_directory(path.parent)


def append_text(path: Path, text: str) -> None:
    """Append to a text file completely or not at all, because a partial row would corrupt the next one."""
    data = text.encode()
    with _storage_errors(path), path.open("ab") as file:
        end = file.tell()
        try:
            before_file_operation("append", path)
            file.write(data)
            file.flush()
        except OSError:
            file.truncate(end)
            raise


def fsync_jsonl_files(directory: Path) -> None:
    """Fsync the JSON Lines files of a run directory."""
    if not directory.is_dir():
        return
    for path in sorted(directory.glob("*.jsonl")):
        fsync_file(path)
    with _storage_errors(directory):
        _fsync_directory(directory)


def fsync_file(path: Path) -> None:
    """Fsync a file, if it exists."""
    with _storage_errors(path), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        before_file_operation("fsync", path)
        os.fsync(file.fileno())


def create_directory(path: Path) -> None:
    """Create a directory and its parents, and fsync each entry, or its contents could be lost in a crash."""
    if not path.is_dir():
        create_directory(path.parent)
        path.mkdir(exist_ok=True)
        _fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> FileRecord:  # Any: JSON values
    """Write indented JSON and fsync it."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_safetensors(
    path: Path,
    tensors: "Mapping[str, torch.Tensor]",
    *,
    metadata: Mapping[str, str] | None = None,
    create_tensor: "Callable[[str], torch.Tensor] | None" = None,
) -> FileRecord:
    """Write tensors in the safetensors format, one at a time, without a copy of the file in memory.

    Args:
        path: The file to write.
        tensors: The tensors by name. With `create_tensor`, only shapes and dtypes are used (meta tensors).
        metadata: Strings to add to the header.
        create_tensor: Creates the tensor of a name when it is written.
    """
    import torch  # not at the top: commands that only read metrics start faster without it

    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format requires an aligned data section

    def chunks() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(encoded))
        yield encoded
        for name, expected in tensors.items():
            tensor = expected if create_tensor is None else create_tensor(name)
            assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), name
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            if flat.numel():
                yield flat.view(torch.uint8).numpy().data
            del tensor, flat

    return write_chunks(path, chunks())


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Convert errors of the operating system to a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error
    except Exception as error:
        # the tokenizers library raises a plain Exception
        if type(error) is Exception and "(os error " in str(error):
            raise StorageError(f"{path} could not be written: {error}") from error
        raise


def _fsync_directory(path: Path) -> None:
    before_file_operation("fsync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(directory: Path) -> None:
    """Fsync all files and directories below a directory, including those written by other libraries."""
    for path in directory.rglob("*"):
        if path.is_dir():
            _fsync_directory(path)
        elif path.is_file():
            fsync_file(path)
    _fsync_directory(directory)


def _rename(source: Path, target: Path) -> None:
    before_file_operation("rename", target)
    source.rename(target)


@contextlib.contextmanager
def create_directory_atomically(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary directory to fill, which is renamed to `path` when it is complete.

    Args:
        path: The final name.
        replace: Replace an existing directory instead of raising an error.

    Raises:
        CheckpointError: `path` exists, is not an empty directory, and `replace` is not set.
        StorageError: A file could not be written.
    """
    if not replace and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise _already_exists(path)
    staging = path.parent / f".{path.name}.writing-{os.getpid()}"
    try:
        with _storage_errors(path):
            create_directory(path.parent)
            shutil.rmtree(staging, ignore_errors=True)
            before_file_operation("mkdir", staging)
            staging.mkdir()
            yield staging
            _fsync_tree(staging)
            if replace:
                replace_directory(staging, path)
            else:
                _rename_new(staging, path)
                _fsync_directory(path.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _rename_new(source: Path, target: Path) -> None:
    """Rename, or raise an error if another process has created the target in the meantime."""
    try:
        _rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _already_exists(target) from error
        raise


def _already_exists(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} already exists, and whet never overwrites existing files", hint="choose another name"
    )


@contextlib.contextmanager
def create_file_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary file name to write to, which is renamed to `path` when it is complete.

    Raises:
        CheckpointError: `path` exists.
    """
    if path.exists():
        raise _already_exists(path)
    create_directory(path.parent)
    staging = path.parent / f".{path.name}.writing-{os.getpid()}"
    try:
        yield staging
        fsync_file(staging)
        _rename_new(staging, path)
        _fsync_directory(path.parent)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`. An existing target is moved aside before and removed after."""
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        _rename(target, old)
    _rename(source, target)
    _fsync_directory(target.parent)  # a crash must not undo the rename but keep the removal
    shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory: a reader or a crash sees it complete or not at all."""
    removed = path.parent / f".{path.name}.removed-{os.getpid()}"
    with contextlib.suppress(OSError):  # a directory that cannot be removed only costs disk space
        _rename(path, removed)
        _fsync_directory(path.parent)
        shutil.rmtree(removed, ignore_errors=True)


def remove_temporary_files(directory: Path, *, only_name: str | None = None) -> None:
    """Remove the temporary files and directories of a killed process.

    A directory that the process had moved aside and not yet replaced is restored.

    Args:
        directory: A directory that no other process writes to, unless `only_name` is set.
        only_name: Only remove leftovers of this name whose process has ended. Other processes may then
            write to the directory at the same time.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match is None or (
            only_name is not None and (match["name"] != only_name or _is_alive(int(match["pid"])))
        ):
            continue
        target = path.with_name(match["name"])
        if match["kind"] == "old" and not target.exists():
            path.rename(target)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock a directory for this process. The kernel releases the lock when the process ends.

    Raises:
        CheckpointError: Another process has locked it.
    """
    with _storage_errors(directory / LOCK):
        file = (directory / LOCK).open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CheckpointError(
                f"{directory} is in use by process {file.read().strip() or 'unknown'}",
                hint="wait until that process has ended, or stop it",
            ) from None
        except OSError:  # some network file systems do not support locks: continue without one
            yield
            return
        with contextlib.suppress(OSError):  # if the disk is full, the lock file does not name the process
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


def write_manifest(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Write the manifest with the size and SHA-256 of every file. It is written last."""
    write_json(directory / MANIFEST, {"files": {name: vars(written) for name, written in files.items()}})


def check_manifest(directory: Path, *, share: slice = slice(None)) -> None:
    """Check that a directory contains exactly the files of its manifest.

    Args:
        directory: The directory with the manifest.
        share: The files to read, so that several processes can divide the work.

    Raises:
        CheckpointError: The manifest or a file is missing, unexpected or different.
    """
    manifest = directory / MANIFEST
    if not manifest.is_file() or manifest.is_symlink():
        raise CheckpointError(f"{directory} has no {MANIFEST}: it was not written completely")
    try:
        files = {
            str(name): FileRecord(int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in _read_manifest(manifest)["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest} cannot be read: {error}") from error
    unlisted = {path.name for path in directory.iterdir()} - {MANIFEST, *files}
    if unlisted:
        raise CheckpointError(f"{directory}: {min(unlisted)} is not in its {MANIFEST}")
    for name, expected in list(files.items())[share]:
        _check_file(directory, name, expected)


def _read_manifest(path: Path) -> Any:  # Any: JSON values, validated by the caller
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{path.stat().st_size} bytes is too large for a manifest")
    return json.loads(path.read_text())


def _check_file(directory: Path, name: str, expected: FileRecord) -> None:
    path = directory / name
    if Path(name).name != name or path.is_symlink():
        raise CheckpointError(f"{directory}: {name} is not a regular file in this directory")
    if not path.is_file():
        raise CheckpointError(f"{directory}: {name} is missing")
    if path.stat().st_size != expected.bytes:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes, but its manifest lists {expected.bytes}"
        )
    if file_sha256(path) != expected.sha256:
        raise CheckpointError(f"{path} does not match the SHA-256 in its manifest")


def cache_dir() -> Path:
    """Return the directory of downloaded and converted models: $WHET_CACHE, or the user's cache directory."""
    if configured := os.environ.get("WHET_CACHE"):
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "whet"


def tokens_dir() -> Path:
    """Return the directory of tokenized data: $WHET_TOKENS, or a directory in the cache.

    It can be deleted at any time.
    """
    configured = os.environ.get("WHET_TOKENS")
    return Path(configured).expanduser() if configured else cache_dir() / "tokens"


def read_json(path: Path, *, max_bytes: float = _MAX_JSON_BYTES) -> dict[str, Any]:  # Any: JSON values
    """Read a JSON object from a file.

    Args:
        path: The file.
        max_bytes: The maximum size in bytes.

    Raises:
        ModelError: The file does not exist, is too large, or is not a JSON object.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist") from error
    if size > max_bytes:
        raise ModelError(f"{path} has {size} bytes, which is too large for this file")
    with invalid_input_errors(f"{path} is not valid JSON"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains {type(value).__name__}, not a JSON object")
    return value
