"""Upload the final model or an export of a run to the Hugging Face hub, for `whet.push` and `whet push`.

Only the files of a model are uploaded, in one commit. Checkpoints, data, links, and paths of this machine are
never part of it.
"""

import fnmatch
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any  # everywhere below: JSON values

from whet.errors import ConfigError, ModelError, RunError, WhetError
from whet.model_io.base_models import expand_user
from whet.model_io.resolve_model import hub_id, is_offline
from whet.run_directory import ARCH_FILE, CARD_FILE, CONFIG_FILE, FINAL_DIRECTORY, METRICS_FILE
from whet.runs.card_text import BASE_PLACEHOLDER, PLACEHOLDER
from whet.storage import MANIFEST, read_json

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_ALLOWED = (
    *(CARD_FILE, "LICENSE*", "NOTICE*", "*.jinja", "*.gguf", "*.tkp1"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    *("adapter_model.safetensors", "adapters.safetensors", "adapter_config.json", "base_quantization.json"),
    *("config.json", "generation_config.json", "quant*.json", "hf_quant_config.json", ARCH_FILE),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("classifier.json", "classifier.safetensors", "class_weights.json"),
)
_LEFT_OUT = ("trained_on.json",)  # where the base model is on this machine
_ADAPTER_CONFIG = "adapter_config.json"
_LARGE_JSON = ("tokenizer.json", "vocab.json")  # vocabularies, which contain no paths
_TOKEN_HINT = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


@dataclass(frozen=True)
class UploadFile:
    """One file of an upload."""

    name: str
    path: Path
    size: int  # bytes
    content: bytes | None = None  # what is uploaded instead of the file, if it would name local paths


@dataclass(frozen=True)
class Push:
    """An upload: what it contains, and where it went."""

    repository: str
    folder: Path
    files: list[UploadFile]
    left_out: list[str]  # names of files in the folder that are not uploaded
    url: str | None = None  # of the commit; None: not uploaded

    @property
    def size(self) -> int:
        """The total size of the files, in bytes."""
        return sum(file.size for file in self.files)


def plan_push(
    run: str | Path, repository: str, *, what: str | Path = FINAL_DIRECTORY, base_model: str | None = None
) -> Push:
    """Return what would be uploaded. Uses no network.

    Args:
        run: A run, or a directory or GGUF file with a model.
        repository: The repository on the hub, "owner/name".
        what: "final", or the path of an export, absolute or in the run directory.
        base_model: For adapters of a local base: its repository on the hub.

    Raises:
        ConfigError: A name is invalid.
        ModelError: The folder contains something that must not be uploaded.
    """
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise ConfigError(f"{repository!r} is not a repository", hint="write it as OWNER/NAME")
    if base_model is not None and hub_id(base_model) is None:
        raise ConfigError(f"{base_model!r} is not a model on the hub", hint="write it as OWNER/NAME")
    folder = _folder(expand_user(run), what)
    files, left_out = _list_files(folder)
    public = [_public_file(file, repository, base_model) for file in files]
    return Push(repository, folder, public, left_out)


def _folder(run: Path, what: str | Path) -> Path:
    if not run.exists():
        raise ModelError(f"{run} does not exist", hint="list the existing runs with: whet runs")
    is_run = (run / CONFIG_FILE).is_file() and (run / METRICS_FILE).is_file()
    if not is_run:
        if str(what) != FINAL_DIRECTORY:
            raise ConfigError(f"{run} is not a run, so --what does not apply", hint="give the folder itself")
        return run
    folder = run / expand_user(what)  # an absolute path stays as it is
    if not folder.exists():
        hint = (
            f"finish it first: whet resume {run}"
            if str(what) == FINAL_DIRECTORY
            else f"export it first: whet export {run} --to hf"
        )
        raise ModelError(f"{folder} does not exist", hint=hint)
    return folder


def _list_files(folder: Path) -> tuple[list[UploadFile], list[str]]:
    """Return the files to upload and the names of those that are left out."""
    if folder.is_symlink():
        raise ModelError(f"{folder} is a link, and links are not uploaded", hint="give the directory itself")
    if folder.is_file():
        _check_files([folder])
        return [UploadFile(folder.name, folder, folder.stat().st_size)], []
    if (folder / MANIFEST).is_file():
        raise ModelError(
            f"{folder} is a checkpoint, with the state of the optimizer",
            hint=f"export it first: whet export {folder} --to hf --out DIR",
        )
    paths = sorted(folder.iterdir())
    left_out = [path.name for path in paths if path.name.startswith(".") or path.name in _LEFT_OUT]
    shown = [path for path in paths if path.name not in left_out]
    _check_files(shown)
    if not any(fnmatch.fnmatchcase(path.name, "*.safetensors") or path.suffix == ".gguf" for path in shown):
        raise ModelError(f"{folder} contains no weights, so it is not a model")
    return [UploadFile(path.name, path, path.stat().st_size) for path in shown], left_out


def _check_files(paths: list[Path]) -> None:
    """Raise an error for links, directories, and files that do not belong to a model."""
    for path in paths:
        if path.is_symlink():
            raise ModelError(f"{path} is a link, and links are not uploaded", hint="copy the file instead")
        if path.is_dir():
            raise ModelError(f"{path} is a directory, and only the files of a model are uploaded")
    unknown = [
        path.name for path in paths if not any(fnmatch.fnmatchcase(path.name, each) for each in _ALLOWED)
    ]
    if unknown:
        names = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise ModelError(
            f"{paths[0].parent} contains files that are not part of a model: {names}",
            hint="move them elsewhere, or export the model to a new directory with whet export",
        )


# --- nothing of this machine


def _public_file(file: UploadFile, repository: str, base_model: str | None) -> UploadFile:
    """Return a file whose content names no path of this machine."""
    if file.name == CARD_FILE:
        return _replace_content(file, _public_card(file.path, repository, base_model))
    if not file.name.endswith(".json") or file.name in _LARGE_JSON:
        return file
    values = read_json(file.path)
    public = {key: _public_json(value) for key, value in values.items()}
    if file.name == _ADAPTER_CONFIG:
        key = "model" if "model" in values else "base_model_name_or_path"
        public[key] = base_model or _public_base(values.get(key), file.path)
    if public == values:
        return file
    return _replace_content(file, json.dumps(public, indent=2) + "\n")


def _replace_content(file: UploadFile, text: str) -> UploadFile:
    content = text.encode()
    return replace(file, content=content, size=len(content))


def _public_card(path: Path, repository: str, base_model: str | None) -> str:
    """Return a card whose examples name the repository, and which names the base model."""
    text = path.read_text(encoding="utf-8").replace(PLACEHOLDER, repository)
    if base_model is not None:
        text = text.replace(BASE_PLACEHOLDER, base_model)
        if text.startswith("---\n") and not re.search(r"^base_model:", text, re.MULTILINE):
            text = f"---\nbase_model: {base_model}\n{text[4:]}"
    return text


def _public_base(base: object, path: Path) -> str:
    if isinstance(base, str) and hub_id(base) is not None and not expand_user(base).exists():
        return base
    raise ModelError(
        f"{path} names its base model by a path on this machine, so nobody else could load the adapter",
        hint="name it with --base-model OWNER/NAME, or push a merged model: whet export RUN --to hf, then "
        "whet push --what export/hf",
    )


def _public_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_public_json(inner) for inner in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~")) and "/" in value[1:]
    return Path(value).name if is_path else value


# --- upload


def push(plan: Push, *, private: bool = False) -> Push:
    """Upload the files in one commit, creating the repository if needed.

    Args:
        plan: What to upload, from `plan_push`.
        private: Create a private repository, and refuse to upload to an existing public one.

    Raises:
        ConfigError: The network must not be used.
        RunError: The hub rejected the upload, or could not be reached.
    """
    if is_offline():
        raise ConfigError(
            "nothing is uploaded, because WHET_OFFLINE or HF_HUB_OFFLINE is set",
            hint="unset both, or use --dry-run to see what would be uploaded",
        )
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        raise RunError("no token for the Hugging Face hub", hint=_TOKEN_HINT)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    operations = [
        CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file.content or str(file.path))
        for file in plan.files
    ]
    try:
        api.create_repo(plan.repository, private=private or None, exist_ok=True)
        if private and not api.model_info(plan.repository).private:
            raise RunError(
                f"{plan.repository} exists and is public, so nothing was uploaded",
                hint="make it private on its page, choose another name, or leave out --private",
            )
        message = f"Upload {plan.folder.name} with whet"
        commit = api.create_commit(plan.repository, operations, commit_message=message)
    except WhetError:
        raise
    except Exception as error:  # of the hub's library, of its HTTP library, or of its upload library
        raise _upload_error(error, plan.repository, str(api.endpoint)) from error
    return replace(plan, url=str(commit.commit_url))


def _upload_error(error: Exception, repository: str, endpoint: str) -> RunError:
    """Return the error of an upload: what the hub answered, or why there is no answer."""
    status = next((code for each in _causes(error) if (code := _status_of(each)) is not None), None)
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if status == 401:
        return RunError("the Hugging Face hub rejected the token (401)", hint=_TOKEN_HINT)
    if status == 403:
        return RunError(
            f"the token has no write access to {repository} (403)",
            hint="use a token with write access to this owner's models",
        )
    if status is not None:
        return RunError(
            f"{endpoint} answered {status}: {reason}", hint="nothing was committed; try again later"
        )
    if any(type(each).__name__ in ("ConnectError", "ConnectTimeout") for each in _causes(error)):
        return RunError(f"{endpoint} cannot be reached: {reason}", hint="check the network and HF_ENDPOINT")
    return RunError(
        f"the upload to {repository} was interrupted: {reason}",
        hint="the repository has no partial upload; run the command again",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _status_of(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
