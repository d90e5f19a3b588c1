"""`whet.load` and `whet.save`: any model a person can name, adapters and finished runs included."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from whet.adapters.files import CONFIG, load_adapter
from whet.adapters.lora import adapted, attach_configured, merge
from whet.config.load import load_config
from whet.config.preset import Preset
from whet.errors import CheckpointError, ModelError
from whet.hardware import choose_device, choose_precision
from whet.models.hub import resolve
from whet.models.language_model import LanguageModel
from whet.models.load import has_tokenizer, load_model, load_tokenizer, save_model
from whet.models.scratch import new_model
from whet.models.weights import read_json
from whet.storage import MANIFEST, check_manifest

CHECKPOINT_WEIGHTS = "weights.safetensors"


def load(
    name_or_path: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[LanguageModel, Any]:  # Any: a transformers tokenizer, or None where the directory has none
    """A model and its tokenizer: by name, or from a model, GGUF file, adapter, finished run or checkpoint."""
    if (Path(name_or_path) / MANIFEST).is_file():
        return _load_checkpointed(Path(name_or_path), dtype=dtype, device=device)
    target = usable_directory(name_or_path)
    if (base := base_of(target)) is None:
        return load_model(target, dtype=dtype, device=device), tokenizer_of(target)
    model, _ = load_base(base, dtype=dtype, device=device)
    load_adapter(model, target)
    return model.eval(), tokenizer_of(target)


def base_of(target: str | Path) -> str | None:
    """What an adapter directory is an adapter of; None for anything else."""
    if not (isinstance(target, Path) and (target / CONFIG).is_file()):
        return None
    base: str | None = read_json(target / CONFIG).get("base_model_name_or_path")
    if not base:
        raise ModelError(f"{target / CONFIG} does not name its base model")
    return base


def tokenizer_of(name_or_path: str | Path) -> Any:  # Any: a transformers tokenizer or None
    """The tokenizer that `load` would give, without the weights; None where there is none."""
    target = usable_directory(name_or_path)
    if (base := base_of(target)) is not None and not has_tokenizer(Path(target)):
        return tokenizer_of(base)
    directory = target if isinstance(target, Path) else resolve(target)
    if not has_tokenizer(directory):
        directory = resolve(str(directory))  # a GGUF file, say
    return load_tokenizer(directory) if has_tokenizer(directory) else None


def _load_checkpointed(
    checkpoint: Path, *, dtype: torch.dtype | None, device: str | torch.device | None
) -> tuple[LanguageModel, Any]:  # Any: as in `load`
    """A run as it was at a checkpoint: its base, built as its config says, with the weights stored there."""
    config_file = run_of(checkpoint) / "config.yaml"
    if not config_file.is_file():
        raise ModelError(
            f"{checkpoint} is a checkpoint outside of its run, so nothing says which model it belongs to",
            hint="build the model, then whet.load_checkpoint(path, model)",
        )
    config = load_config(config_file)
    check_manifest(checkpoint)
    if isinstance(config.model, Preset):
        tokenizer = load_tokenizer(run_of(checkpoint) / "tokenizer")
        model = new_model(config.model, tokenizer, seed=config.run.seed)
        where = choose_device(str(device or "auto"))
        model.to(where, dtype or choose_precision("auto", where).frozen)
    else:
        model, tokenizer = load_base(config.model, dtype=dtype, device=device)
    if config.method.kind == "full":
        model.requires_grad_(True)
    else:
        attach_configured(model, config.method)
    put_trained(model, read_trained(model, checkpoint / CHECKPOINT_WEIGHTS))
    return model.eval(), tokenizer


def run_of(checkpoint: Path) -> Path:
    """The run a checkpoint belongs to, by where it is."""
    return checkpoint.absolute().parent.parent


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: the weights that train, or all where none does."""
    every: dict[str, torch.Tensor] = dict(model.named_parameters())
    return {name: p for name, p in every.items() if p.requires_grad} or every


def read_trained(model: torch.nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, which must be exactly those this model trains."""
    try:
        found: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    expected = trained_parameters(model)
    odd = sorted(found.keys() ^ expected.keys())
    odd += [name for name in found.keys() & expected.keys() if found[name].shape != expected[name].shape]
    if odd:
        raise CheckpointError(f"{path} does not fit this model: {', '.join(odd[:4])}")
    return found


def put_trained(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy what `read_trained` returned into the model."""
    with torch.no_grad():
        for name, tensor in trained_parameters(model).items():
            tensor.copy_(weights[name])


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
            f"{path} is a run that has not finished: it has no final/",
            hint=f"go on with: whet resume {path}; or name a checkpoint: {path}/checkpoints/step-...",
        )
    return path if path.is_dir() else str(name_or_path)


def save(
    model: LanguageModel, tokenizer: Any, directory: str | Path
) -> None:  # Any: a transformers tokenizer
    """Write a Hugging Face model directory; adapters are written merged, the model itself stays as it is."""
    merged = {f"{name}.weight": module.merged_weight() for name, module in adapted(model)}
    biases = {f"{name}.bias": module.base.bias for name, module in adapted(model)}
    inner = tuple(f"{name}." for name, _ in adapted(model))
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inner)}
    state |= merged | {name: bias for name, bias in biases.items() if bias is not None}
    save_model(model, tokenizer, directory, state=state)
