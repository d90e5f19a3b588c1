"""The one writer: every byte of a model, adapter or checkpoint goes to disk through this file.

It also knows where caches are, and reads JSON objects back within limits.

Directories appear complete or not at all: they are filled under a temporary name, fsynced, and renamed.
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

from whet.error_boundary import wrong_input
from whet.errors import CheckpointError, ModelError, StorageError

if TYPE_CHECKING:
    import torch

MANIFEST = "MANIFEST.json"
LOCK = ".lock"
_MAX_MANIFEST_BYTES = 2**20
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>writing|old|removed)-(?P<pid>\d+)")

SAFETENSORS_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
_MAX_JSON_BYTES = 32 * 2**20  # the index of the largest models has ten million


@dataclass(frozen=True)
class Written:
    """What went into a file: its line of a manifest, computed while the bytes passed by."""

    bytes: int
    sha256: str


def boundary(operation: str, path: Path) -> None:
    """Passed before every file operation of a write and does nothing: tests put their faults here."""


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write a whole file and fsync it. All other writers end here."""
    digest, size = hashlib.sha256(), 0
    boundary("open", path)
    with path.open("wb") as file:
        for chunk in chunks:
            boundary("write", path)
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            del chunk  # a large one shall not stay while the next is made
        file.flush()
        boundary("fsync", path)
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def write_text(path: Path, text: str) -> Written:
    """Write a text file through the one writer."""
    return write_chunks(path, [text.encode()])


def replace_text(path: Path, text: str) -> None:
    """Change a text file all at once: a reader, or a crash, sees the old one or the new one."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """The same for any file."""
    replace_chunks(path, [content])


def replace_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """The same for a file that is too large to be held in memory."""
    staging = path.with_name(f".{path.name}.writing-{os.getpid()}")
    with _naming(path):
        try:
            write_chunks(staging, chunks)
        except BaseException:
            staging.unlink(missing_ok=True)
            raise
        _rename(staging, path)
        _fsync_directory(path.parent)


def append_text(path: Path, text: str) -> None:
    """Add to a text file, all of it or nothing: a half-written row would spoil the one after it."""
    data = text.encode()
    with _naming(path), path.open("ab") as file:
        before = file.tell()
        try:
            boundary("append", path)
            file.write(data)
            file.flush()
        except OSError:
            file.truncate(before)
            raise


def sync_rows(directory: Path) -> None:
    """Put the rows that were appended to a run's files on the disk: what comes after may count on them."""
    if not directory.is_dir():
        return
    for path in sorted(directory.glob("*.jsonl")):
        sync_file(path)
    with _naming(directory):
        _fsync_directory(directory)


def sync_file(path: Path) -> None:
    """Put what was appended to a file on the disk."""
    with _naming(path), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        boundary("fsync", path)
        os.fsync(file.fileno())


def make_directory(path: Path) -> None:
    """Make a directory and its parents; a name that is not on the disk would take all inside with it."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> Written:  # Any: whatever json.dumps takes
    """Write readable JSON through the one writer."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_safetensors(
    path: Path,
    tensors: "Mapping[str, torch.Tensor]",
    *,
    metadata: Mapping[str, str] | None = None,
    make: "Callable[[str], torch.Tensor] | None" = None,
) -> Written:
    """Write tensors in the safetensors format, streaming: no second copy of the whole file in memory.

    With `make` the tensors only say their shapes and dtypes (on the meta device), and each is made when its
    turn comes.
    """
    import torch  # here: what lists runs or reads their rows starts without it

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

    return write_chunks(path, chunks())


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what the operating system says into an error that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error
    except Exception as error:
        # the tokenizers library has no kind of its own for it
        if type(error) is Exception and "(os error " in str(error):
            raise StorageError(f"{path} could not be written: {error}") from error
        raise


def _fsync_directory(path: Path) -> None:
    boundary("fsync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(directory: Path) -> None:
    """Files that a library wrote (a tokenizer's) are on the disk, too, before the directory gets its name."""
    for path in directory.rglob("*"):
        if path.is_dir():
            _fsync_directory(path)
        elif path.is_file():
            sync_file(path)
    _fsync_directory(directory)


def _rename(source: Path, target: Path) -> None:
    boundary("rename", target)
    source.rename(target)


@contextlib.contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Fill a directory that appears under its name only when it is complete.

    What is there already is replaced only when the caller says so: it may be somebody's work.
    """
    if not replace and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise _taken(path)
    staging = path.parent / f".{path.name}.writing-{os.getpid()}"
    try:
        with _naming(path):
            make_directory(path.parent)
            shutil.rmtree(staging, ignore_errors=True)
            boundary("mkdir", staging)
            staging.mkdir()
            yield staging
            _fsync_tree(staging)
            if replace:
                replace_directory(staging, path)
            else:
                _take_name(staging, path)
                _fsync_directory(path.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _take_name(source: Path, target: Path) -> None:
    """Rename, unless somebody else has put something there meanwhile: then the system refuses."""
    try:
        _rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _taken(target) from error
        raise


def _taken(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} exists already, and whet overwrites nothing", hint="choose another name")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Write a file that appears under its name only when it is complete; what is there already stays."""
    if path.exists():
        raise _taken(path)
    make_directory(path.parent)
    staging = path.parent / f".{path.name}.writing-{os.getpid()}"
    try:
        yield staging
        sync_file(staging)
        _take_name(staging, path)
        _fsync_directory(path.parent)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`; an older `target` is moved aside first and removed last."""
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        _rename(target, old)
    _rename(source, target)
    _fsync_directory(target.parent)  # else a power cut could undo the renaming and not the removal
    shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory that a reader, or a crash, sees whole or not at all."""
    doomed = path.parent / f".{path.name}.removed-{os.getpid()}"
    with contextlib.suppress(OSError):  # what cannot be removed costs room, and nothing else
        _rename(path, doomed)
        _fsync_directory(path.parent)
        shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(directory: Path, *, of: str | None = None) -> None:
    """Remove what a killed process left half-written in a directory that nobody else is writing to.

    What it had moved aside and not yet replaced comes back under its name. In a directory that others may be
    writing to, `of` limits it to one name, and to processes that have ended.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        found = _LEFTOVER.fullmatch(path.name)
        if found is None or (of is not None and (found["name"] != of or _is_alive(int(found["pid"])))):
            continue
        target = path.with_name(found["name"])
        if found["kind"] == "old" and not target.exists():
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
def locked(directory: Path) -> Iterator[None]:
    """Keep a directory for one process; the kernel ends that with the process, however it ends."""
    with _naming(directory / LOCK):
        file = (directory / LOCK).open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CheckpointError(
                f"{directory} is in use by process {file.read().strip() or 'unknown'}",
                hint="wait until it has ended, or stop it first",
            ) from None
        except OSError:  # some network file systems have no locks: a run there is better than none
            yield
            return
        with contextlib.suppress(OSError):  # a full disk: then the holder has no name
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


def write_manifest(directory: Path, files: Mapping[str, Written]) -> None:
    """Record size and SHA-256 of every file; written last, so it vouches for the rest."""
    write_json(directory / MANIFEST, {"files": {name: vars(written) for name, written in files.items()}})


def check_manifest(directory: Path, *, share: slice = slice(None)) -> None:
    """Raise a CheckpointError that says what is wrong unless every file is as the manifest says.

    Several processes may each read a share of the files.
    """
    manifest = directory / MANIFEST
    if not manifest.is_file() or manifest.is_symlink():
        raise CheckpointError(f"{directory} has no {MANIFEST}: it was not written to the end")
    try:
        files = {
            str(name): Written(int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in _small_json(manifest)["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest} cannot be read: {error}") from error
    unlisted = {path.name for path in directory.iterdir()} - {MANIFEST, *files}
    if unlisted:
        raise CheckpointError(f"{directory}: {min(unlisted)} is not in its {MANIFEST}")
    for name, expected in list(files.items())[share]:
        _check_file(directory, name, expected)


def _small_json(path: Path) -> Any:  # Any: JSON values, checked by the caller
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{path.stat().st_size} bytes are too many for a manifest")
    return json.loads(path.read_text())


def _check_file(directory: Path, name: str, expected: Written) -> None:
    path = directory / name
    if Path(name).name != name or path.is_symlink():
        raise CheckpointError(f"{directory}: {name} is not a file of this directory")
    if not path.is_file():
        raise CheckpointError(f"{directory}: {name} is missing")
    if path.stat().st_size != expected.bytes:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; its manifest says {expected.bytes}")
    if sha256_of(path) != expected.sha256:
        raise CheckpointError(f"{path} does not match its sha256")


def cache_dir() -> Path:
    """Where fetched and converted models are kept: $WHET_CACHE, or the user's cache directory."""
    if given := os.environ.get("WHET_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "whet"


def tokens_dir() -> Path:
    """Where tokenised data is kept: $WHET_TOKENS, or a place in the cache. It can be removed at any time."""
    given = os.environ.get("WHET_TOKENS")
    return Path(given).expanduser() if given else cache_dir() / "tokens"


def read_json(path: Path, *, most: float = _MAX_JSON_BYTES) -> dict[str, Any]:  # Any: JSON values
    """Read a JSON object of at most so many bytes, or say which file is broken."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist") from error
    if size > most:
        raise ModelError(f"{path} has {size} bytes: too many to be what its name says")
    with wrong_input(f"{path} is not valid JSON"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not an object")
    return value
