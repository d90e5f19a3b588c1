"""`whet.load` and `whet.save`: any model a person can name, adapters and finished runs included."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from whet.adapters.adapter import Adapter, adapted
from whet.adapters.classifier_files import SCORE, StoredHead, is_classifier
from whet.adapters.files import CONFIG, NF4_BASE, QUANTISED, load_adapter
from whet.adapters.lora import attach_configured, merge
from whet.adapters.nf4 import NF4Linear
from whet.adapters.qlora import quantise_base
from whet.config.classify import ClassifyObjective
from whet.config.load import load_config
from whet.config.preset import Preset
from whet.config.sections import RunConfig
from whet.errors import CheckpointError, ModelError, WhetError
from whet.hardware import choose_device, choose_precision
from whet.models.checks import check_links, check_weight
from whet.models.experts import balance_biases
from whet.models.heads import HEADS
from whet.models.hub import resolve
from whet.models.language_model import LanguageModel
from whet.models.load import has_tokenizer, load_model, load_tokenizer, save_model
from whet.models.scratch import new_model
from whet.models.shards import MOMENT, fill_like, has_shards, is_cut, stored_tensors, whole_tensors
from whet.models.weights import read_json
from whet.storage import MANIFEST, check_manifest

CHECKPOINT_WEIGHTS = "weights.safetensors"

BASE = "base"  # in a run: the weights its adapter was trained on, where nobody else has them


def load(
    name_or_path: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[LanguageModel, Any]:  # Any: a transformers tokenizer, or None where the directory has none
    """A model and its tokenizer: by name, or from a model, GGUF file, adapter, finished run or checkpoint."""
    refuse_classifier(name_or_path)
    return load_body(name_or_path, dtype=dtype, device=device)


def refuse_classifier(name_or_path: str | Path) -> None:
    """A classifier has no next token: its model was trained for its head."""
    config = config_of_checkpoint(name_or_path)
    if config is not None and not isinstance(config.objective, ClassifyObjective):
        return
    if config is not None or is_classifier(usable_directory(name_or_path)):
        raise ModelError(
            f"{name_or_path} is a classifier, not a language model",
            hint=f'whet classify {name_or_path} "some text", or whet.Classifier.load',
        )


def load_body(
    name_or_path: str | Path, *, dtype: torch.dtype | None, device: str | torch.device | None
) -> tuple[LanguageModel, Any]:  # Any: as in `load`
    """The same, and of a classifier the model under its head."""
    if ((path := at_home(name_or_path)) / MANIFEST).is_file():
        return _load_checkpointed(path, dtype=dtype, device=device)
    target = usable_directory(name_or_path)
    if (base := base_of(target)) is None:
        besides = {SCORE} if is_classifier(target) else ()
        return load_model(target, dtype=dtype, device=device, besides=besides), tokenizer_of(target)
    assert isinstance(target, Path)
    if not (target / QUANTISED).is_file():
        model, _ = load_base(base, dtype=dtype, device=device)
    else:
        if (kind := read_json(target / QUANTISED)) != NF4_BASE:
            raise ModelError(f"{target / QUANTISED}: whet does not know a base of {kind}")
        model = _load_quantised(base, dtype=dtype, device=device)
    model.name = full_name(base)  # also where that is an adapter itself
    load_adapter(model, target)
    return model.eval(), tokenizer_of(target)


def _load_quantised(
    name: str, *, dtype: torch.dtype | None, device: str | torch.device | None
) -> LanguageModel:
    where = choose_device(str(device or "auto"))
    return load_quantised(name, dtype=dtype or choose_precision("auto", where).frozen, device=where)


def load_quantised(name_or_path: str | Path, *, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """Like `load_base`, in 4 bits: the model without its tokenizer."""
    # from float32, which holds what any file holds: the codes then do not depend on the run's precision
    model, _ = load_base(name_or_path, dtype=torch.float32, device="cpu")
    return quantise_base(model, device=device, dtype=dtype)


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
    if target.name == "final" and (run / "config.yaml").is_file() and (run / BASE / "config.json").is_file():
        return str(run / BASE)  # wherever the run has been moved to
    check_links(target)
    config = read_json(target / CONFIG)
    base = config.get("base_model_name_or_path") or config.get("model")  # PEFT's key; mlx-lm's
    if not isinstance(base, str) or not base or "\0" in base:
        raise ModelError(f"{target / CONFIG} does not name its base model")
    return base


def tokenizer_of(name_or_path: str | Path) -> Any:  # Any: a transformers tokenizer or None
    """The tokenizer that `load` would give, without the weights; None where there is none."""
    if (below := below_checkpoint(name_or_path)) is not None:
        in_run = run_of(at_home(name_or_path)) / "tokenizer"
        return load_tokenizer(in_run) if isinstance(below, Preset) else tokenizer_of(below)
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
    config = config_of_checkpoint(checkpoint)
    if config is None:
        raise ModelError(
            f"{checkpoint} is a checkpoint outside of its run, so nothing says which model it belongs to",
            hint="build the model, then whet.load_checkpoint(path, model)",
        )
    check_manifest(checkpoint)
    tokenizer, base = tokenizer_of(checkpoint), below_checkpoint(checkpoint)
    assert base is not None
    if isinstance(base, Preset):
        model = new_model(base, tokenizer, seed=config.run.seed, mup=config.optim.mup)
        where = choose_device(str(device or "auto"))
        model.to(where, dtype or choose_precision("auto", where).frozen)
    elif config.method.kind == "qlora" and base == config.language_model:  # what a run keeps is unpacked
        model = _load_quantised(base, dtype=dtype, device=device)
    else:
        model, _ = load_base(base, dtype=dtype, device=device)
    model.name = full_name(base_of(checkpoint) or checkpoint)
    if config.method.kind == "full":
        model.requires_grad_(True)
    else:
        attach_configured(model, config.method)
    weights = read_trained(model, checkpoint, besides=HEADS)
    for name, tensor in weights.items():
        check_weight(tensor, name, checkpoint)
    put_trained(model, weights)
    return model.eval(), tokenizer


def config_of_checkpoint(name_or_path: str | Path) -> RunConfig | None:
    """The config of the run that a checkpoint belongs to; None for anything else."""
    path = at_home(name_or_path)
    config = run_of(path) / "config.yaml"
    return load_config(config) if (path / MANIFEST).is_file() and config.is_file() else None


def below_checkpoint(name_or_path: str | Path) -> str | Preset | None:
    """The model that the run of a checkpoint began with; None for anything that is no checkpoint."""
    config = config_of_checkpoint(name_or_path)
    return None if config is None else base_of(name_or_path) or config.language_model


def run_of(checkpoint: Path) -> Path:
    """The run a checkpoint belongs to, by where it is."""
    return checkpoint.absolute().parent.parent


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: the weights that train, or all where none does.

    And the biases of experts, which their load changes.
    """
    every: dict[str, torch.Tensor] = dict(model.named_parameters())
    return ({name: p for name, p in every.items() if p.requires_grad} or every) | balance_biases(model)


def read_trained(
    model: torch.nn.Module, checkpoint: Path, *, besides: str | None = None
) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, which must be exactly those this model trains, and any whose names begin so.

    Of a model in shards, those of this rank.
    """
    expected = trained_parameters(model)
    in_shards = any(is_cut(tensor) for tensor in expected.values())
    whole = {} if in_shards else checkpoint_weights(checkpoint)
    shapes = {name: stored.shape for name, stored in (whole or stored_tensors(checkpoint)).items()}
    odd = [name for name in expected if shapes.pop(name, None) != expected[name].shape]
    odd += [name for name in shapes if MOMENT not in name and not (besides and name.startswith(besides))]
    if odd:
        raise CheckpointError(f"{checkpoint} does not fit this model: {', '.join(sorted(odd)[:4])}")
    return fill_like(expected, checkpoint) if in_shards else {name: whole[name] for name in expected}


def checkpoint_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint in one piece, whoever wrote it."""
    if has_shards(checkpoint):
        return whole_tensors(checkpoint, lambda name: MOMENT not in name)
    try:
        found: dict[str, torch.Tensor] = load_file(checkpoint / CHECKPOINT_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint / CHECKPOINT_WEIGHTS} cannot be read: {error}") from error
    return found


def put_trained(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy what `read_trained` returned into the model."""
    with torch.no_grad():
        for name, tensor in trained_parameters(model).items():
            tensor.copy_(weights[name])


def load_base(
    name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> tuple[LanguageModel, Any]:  # Any: as in `load`
    """Like `load`, with adapters folded in: something to train on top of, a finished run included.

    What was folded has no name: nobody else has these weights. Nor has a checkpoint, which may be gone soon.
    """
    model, tokenizer = load(name_or_path, dtype=dtype, device=device)
    passing = config_of_checkpoint(name_or_path) is not None
    model.name = None if passing else full_name(name_or_path)
    return merge(model), tokenizer


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
    if (path / "final").is_dir():
        return path / "final"
    if (path / "config.yaml").is_file():
        raise ModelError(
            f"{path} is a run that has not finished: it has no final/",
            hint=f"go on with: whet resume {path}; or name a checkpoint: {path}/checkpoints/step-...",
        )
    usable = any((path / name).is_file() for name in ("config.json", CONFIG, MANIFEST))
    return path if usable else str(name_or_path)


def save(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    directory: str | Path,
    *,
    classifier: StoredHead | None = None,
) -> None:
    """Write a Hugging Face model directory; adapters are written merged, the model itself stays as it is.

    The head of a classifier goes with it.
    """
    plain = {name: module.merged() for name, module in adapted(model)}
    plain |= {name: layer.merged() for name, layer in _quantised(model) if not name.endswith(".base")}
    save_model(
        model,
        tokenizer,
        directory,
        state=_state(model, plain),
        more=None if classifier is None else classifier.tensors(model),
        config=None if classifier is None else classifier.config(model, tokenizer),
        beside=None if classifier is None else classifier.write,
    )


def save_base(
    model: LanguageModel, tokenizer: Any, directory: str | Path
) -> None:  # Any: a transformers tokenizer
    """Write what a model's adapters were trained on, as a Hugging Face model directory."""
    plain: dict[str, Mapping[str, torch.Tensor]] = {
        name: dict(module.base.named_parameters()) for name, module in adapted(model)
    }
    plain |= {name.removesuffix(".base"): layer.merged() for name, layer in _quantised(model)}
    save_model(model, tokenizer, directory, state=_state(model, plain))


def _quantised(model: LanguageModel) -> Iterator[tuple[str, NF4Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, NF4Linear))


def _state(model: LanguageModel, plain: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters of a model, with other ones for some of its modules."""
    inner = tuple(f"{name}." for name in plain)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inner)}
    for name, tensors in plain.items():
        module = model.get_submodule(name)
        held = _buffers(module.base if isinstance(module, Adapter) else module)
        state |= {f"{name}.{key}": tensor for key, tensor in {**held, **tensors}.items()}
    return state


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a module's state holds beside its parameters, apart from codes that stand for these."""
    if isinstance(module, NF4Linear):
        return {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}
