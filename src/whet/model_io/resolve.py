"""From the name of a model, adapter, checkpoint or run to its directory and its base model."""

from pathlib import Path

from whet.config.load_config import load_config
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.errors import ModelError, WhetError
from whet.model_io.file_checks import check_links
from whet.model_io.formats.adapter_files import CONFIG
from whet.run_directory import BASE, CONFIG_FILE, FINAL, run_of
from whet.storage import MANIFEST, read_json


def base_of(target: str | Path) -> str | None:
    """What an adapter, in a directory or a checkpoint, is an adapter of; None for anything else."""
    first = _named_base(target)
    below, passed = first, {str(at_home(target).resolve())}
    while below is not None:
        try:
            inner = usable_directory(below)
            name = str(at_home(inner).resolve()) if isinstance(inner, Path) else inner
            below = _named_base(inner)
        except WhetError:  # said when it is opened
            return first
        if name in passed:
            raise ModelError(
                f"the adapter {target} is its own base model, by way of {first}",
                hint=f"{CONFIG} must name the model that the adapter was trained on",
            )
        passed.add(name)
    return first


def _named_base(target: str | Path) -> str | None:
    if (trained := config_of_checkpoint(target)) is not None:
        kept = run_of(at_home(target)) / BASE
        if trained.method.kind == "full":
            return None
        return str(kept if (kept / "config.json").is_file() else trained.language_model)
    if not (isinstance(target, Path) and (target / CONFIG).is_file()):
        return None
    run = target.parent
    if target.name == FINAL and (run / CONFIG_FILE).is_file() and (run / BASE / "config.json").is_file():
        return str(run / BASE)  # wherever the run has been moved to
    check_links(target)
    config = read_json(target / CONFIG)
    base = config.get("base_model_name_or_path") or config.get("model")  # PEFT's key; mlx-lm's
    if not isinstance(base, str) or not base or "\0" in base:
        raise ModelError(f"{target / CONFIG} does not name its base model")
    return base


def config_of_checkpoint(name_or_path: str | Path) -> RunConfig | None:
    """The config of the run that a checkpoint belongs to; None for anything else."""
    path = at_home(name_or_path)
    config = run_of(path) / CONFIG_FILE
    return load_config(config) if (path / MANIFEST).is_file() and config.is_file() else None


def below_checkpoint(name_or_path: str | Path) -> str | Preset | None:
    """The model that the run of a checkpoint began with; None for anything that is no checkpoint."""
    config = config_of_checkpoint(name_or_path)
    return None if config is None else base_of(name_or_path) or config.language_model


def full_name(name_or_path: str | Path) -> str:
    """Return the absolute path of what is on this machine, or the name as it is."""
    path = at_home(name_or_path)
    return str(path.absolute()) if path.exists() else str(name_or_path)


def at_home(name_or_path: str | Path) -> Path:
    """A path, with ~ for the user's directory."""
    try:
        return Path(name_or_path).expanduser()
    except RuntimeError:  # of nobody
        return Path(name_or_path)


def usable_directory(name_or_path: str | Path) -> str | Path:
    """A run becomes its `final/`; what is no directory of a model, adapter or checkpoint stays a name."""
    path = at_home(name_or_path)
    if (path / FINAL).is_dir():
        return path / FINAL
    if (path / CONFIG_FILE).is_file():
        raise ModelError(
            f"{path} is a run that has not finished: it has no final/",
            hint=f"go on with: whet resume {path}; or name a checkpoint: {path}/checkpoints/step-...",
        )
    usable = any((path / name).is_file() for name in ("config.json", CONFIG, MANIFEST))
    return path if usable else str(name_or_path)
