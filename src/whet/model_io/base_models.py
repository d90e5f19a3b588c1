"""Resolve the name of a model, adapter, checkpoint or run to its directory and its base model."""

from pathlib import Path

from whet.config.load_config import load_config
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.errors import ModelError, WhetError
from whet.model_io.file_checks import check_links
from whet.model_io.formats.adapter_files import CONFIG
from whet.run_directory import BASE_DIRECTORY, CONFIG_FILE, FINAL_DIRECTORY, run_directory_of
from whet.storage import MANIFEST, read_json


def base_model_of(target: str | Path) -> str | None:
    """Return the base model of an adapter directory or checkpoint, or None for anything else.

    Raises:
        ModelError: If the chain of base models is circular.
    """
    first = _named_base(target)
    base, visited = first, {str(expand_user(target).resolve())}
    while base is not None:
        try:
            directory = local_model_directory(base)
            name = str(expand_user(directory).resolve()) if isinstance(directory, Path) else directory
            base = _named_base(directory)
        except WhetError:  # reported when the base is loaded
            return first
        if name in visited:
            raise ModelError(
                f"the adapter {target} is its own base model, through {first}",
                hint=f"{CONFIG} must name the model that the adapter was trained on",
            )
        visited.add(name)
    return first


def _named_base(target: str | Path) -> str | None:
    if (config := config_of_checkpoint(target)) is not None:
        if config.method.kind == "full":
            return None
        if config.method.continues:
            return base_model_of(local_model_directory(str(config.language_model)))
        return str(stored_base(target) or config.language_model)
    if not (isinstance(target, Path) and (target / CONFIG).is_file()):
        return None
    run = target.parent
    if (
        target.name == FINAL_DIRECTORY
        and (run / CONFIG_FILE).is_file()
        and (run / BASE_DIRECTORY / "config.json").is_file()
    ):
        return str(run / BASE_DIRECTORY)  # also if the run directory was moved
    check_links(target)
    adapter_config = read_json(target / CONFIG)
    # the key of PEFT, or that of mlx-lm
    base = adapter_config.get("base_model_name_or_path") or adapter_config.get("model")
    if not isinstance(base, str) or not base or "\0" in base:
        raise ModelError(f"{target / CONFIG} does not name its base model")
    return base


def stored_base(checkpoint: str | Path) -> Path | None:
    """Return the base weights that the run of a checkpoint stores, or None if it stores none."""
    directory = run_directory_of(expand_user(checkpoint)) / BASE_DIRECTORY
    return directory if (directory / "config.json").is_file() else None


def config_of_checkpoint(name_or_path: str | Path) -> RunConfig | None:
    """Return the config of the run that a checkpoint belongs to, or None for anything else."""
    path = expand_user(name_or_path)
    config = run_directory_of(path) / CONFIG_FILE
    return load_config(config) if (path / MANIFEST).is_file() and config.is_file() else None


def starting_model(name_or_path: str | Path) -> str | Preset | None:
    """Return the model that the run of a checkpoint started from, or None if it is not a checkpoint."""
    config = config_of_checkpoint(name_or_path)
    return None if config is None else base_model_of(name_or_path) or config.language_model


def absolute_path_or_name(name_or_path: str | Path) -> str:
    """Return the absolute path if it exists, else the name unchanged."""
    path = expand_user(name_or_path)
    return str(path.absolute()) if path.exists() else str(name_or_path)


def expand_user(name_or_path: str | Path) -> Path:
    """Return the path with ~ expanded to the user's home directory."""
    try:
        return Path(name_or_path).expanduser()
    except RuntimeError:  # there is no such user
        return Path(name_or_path)


def local_model_directory(name_or_path: str | Path) -> str | Path:
    """Return the directory of a local model, adapter or checkpoint, or `final/` of a finished run.

    Anything else is returned unchanged as a name.
    """
    path = expand_user(name_or_path)
    if (path / FINAL_DIRECTORY).is_dir():
        return path / FINAL_DIRECTORY
    if (path / CONFIG_FILE).is_file():
        raise ModelError(
            f"{path} is a run that has not finished: it has no final/",
            hint=f"resume it: whet resume {path}; or use a checkpoint: {path}/checkpoints/step-...",
        )
    is_local = any((path / name).is_file() for name in ("config.json", CONFIG, MANIFEST))
    return path if is_local else str(name_or_path)
