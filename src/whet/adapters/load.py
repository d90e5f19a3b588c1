"""`whet.load` and `whet.save`: any model a person can name, adapters and finished runs included."""

from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import adapted
from whet.adapters.files import CONFIG, load_adapter
from whet.adapters.lora import merge
from whet.errors import ModelError
from whet.models.hub import resolve
from whet.models.language_model import LanguageModel
from whet.models.load import has_tokenizer, load_model, load_tokenizer, save_model
from whet.models.weights import read_json


def load(
    name_or_path: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[LanguageModel, Any]:  # Any: a transformers tokenizer, or None where the directory has none
    """A model and its tokenizer: by name, or from a model directory, GGUF file, adapter or finished run."""
    target = usable_directory(name_or_path)
    if (base := _base_of(target)) is None:
        return load_model(target, dtype=dtype, device=device), tokenizer_of(target)
    model, _ = load_base(base, dtype=dtype, device=device)
    load_adapter(model, target)
    return model.eval(), tokenizer_of(target)


def _base_of(target: str | Path) -> str | None:
    """What an adapter directory is an adapter of; None for anything else."""
    if not (isinstance(target, Path) and (target / CONFIG).is_file()):
        return None
    config = read_json(target / CONFIG)
    base: str | None = config.get("base_model_name_or_path") or config.get("model")  # PEFT's key; mlx-lm's
    if not base:
        raise ModelError(f"{target / CONFIG} does not name its base model")
    return base


def tokenizer_of(name_or_path: str | Path) -> Any:  # Any: a transformers tokenizer or None
    """The tokenizer that `load` would give, without the weights; None where there is none."""
    target = usable_directory(name_or_path)
    if (base := _base_of(target)) is not None and not has_tokenizer(Path(target)):
        return tokenizer_of(base)
    directory = target if isinstance(target, Path) else resolve(target)
    if not has_tokenizer(directory):
        directory = resolve(str(directory))  # a GGUF file, say
    return load_tokenizer(directory) if has_tokenizer(directory) else None


def load_base(
    name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> tuple[LanguageModel, Any]:  # Any: as in `load`
    """Like `load`, with adapters folded in: something to train on top of, a finished run included."""
    model, tokenizer = load(name_or_path, dtype=dtype, device=device)
    path = Path(name_or_path)
    model.name = str(path.absolute()) if path.exists() else str(name_or_path)
    return merge(model), tokenizer


def usable_directory(name_or_path: str | Path) -> str | Path:
    """A run becomes its `final/`; anything else stays what it is."""
    path = Path(name_or_path)
    if (path / "final").is_dir():
        return path / "final"
    if (path / "config.yaml").is_file():
        raise ModelError(
            f"{path} is a run that has not finished: it has no final/", hint=f"go on with: whet resume {path}"
        )
    return path if path.is_dir() else str(name_or_path)


def save(
    model: LanguageModel, tokenizer: Any, directory: str | Path
) -> None:  # Any: a transformers tokenizer
    """Write a Hugging Face model directory; adapters are written merged, the model itself stays as it is."""
    changed = dict(adapted(model))
    inner = tuple(f"{name}." for name in changed)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inner)}
    for name, module in changed.items():
        state |= {f"{name}.{key}": tensor for key, tensor in module.merged().items()}
    save_model(model, tokenizer, directory, state=state)
