"""`whet.load`: load a model by name or path, including adapters, checkpoints and finished runs."""

import logging
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whet.adapters.adapter import Adapter
from whet.adapters.attach import attach_from_config
from whet.adapters.nf4 import NF4Linear
from whet.config.load_config import load_config
from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.mtp import MTPObjective
from whet.config.preset import Preset
from whet.error_boundary import invalid_input_errors
from whet.errors import ConfigError, ModelError
from whet.hardware import choose_device, choose_precision
from whet.model_io.base_models import (
    absolute_path_or_name,
    base_model_of,
    config_of_checkpoint,
    expand_user,
    local_model_directory,
    starting_model,
    stored_base,
)
from whet.model_io.checkpoint_weights import copy_trained_parameters, read_trained_parameters
from whet.model_io.config_json import QUANTIZATION, read_config, read_spec
from whet.model_io.file_checks import check_weight
from whet.model_io.formats.adapter_files import NF4_BASE, QUANTIZATION_FILE, load_adapter
from whet.model_io.formats.classifier_head import SCORE, is_classifier
from whet.model_io.resolve_model import resolve_model
from whet.model_io.safetensors import load_parameters, open_tensor_files
from whet.model_io.tokenizer import load_model_tokenizer
from whet.models import families
from whet.models.decoder import Decoder
from whet.models.heads import HEADS_PREFIX, ModelWithHeads
from whet.models.language_model import LanguageModel
from whet.run_directory import CONFIG_FILE, run_directory_of
from whet.storage import MANIFEST, check_manifest, read_json

if TYPE_CHECKING:
    from whet.models.mtp import PredictionHeads

log = logging.getLogger("whet")


def load(
    name_or_path: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[LanguageModel, Any]:  # Any: a transformers tokenizer, or None if the directory has none
    """Load a model in evaluation mode, and its tokenizer.

    Args:
        name_or_path: A model name, a Hugging Face model directory, a GGUF file, an adapter directory, a
            finished run, or a checkpoint of a run.
        dtype: The dtype of the weights. By default the dtype that suits the device.
        device: The device to load to. By default the best available one.

    Returns:
        The model and its transformers tokenizer, or None instead of a tokenizer if there is none.

    Raises:
        ModelError: If the model cannot be found or read, or if it is a classifier.
    """
    check_not_classifier(name_or_path)
    return load_without_head(name_or_path, dtype=dtype, device=device)


def check_not_classifier(name_or_path: str | Path) -> None:
    """Raise ModelError for a classifier, which was trained for its head and cannot predict tokens."""
    config = config_of_checkpoint(name_or_path)
    if config is not None and not isinstance(config.objective, ClassifyObjective):
        return
    if config is not None or is_classifier(local_model_directory(name_or_path)):
        raise ModelError(
            f"{name_or_path} is a classifier, not a language model",
            hint=f'use whet classify {name_or_path} "some text", or whet.Classifier.load',
        )


def load_without_head(
    name_or_path: str | Path, *, dtype: torch.dtype | None, device: str | torch.device | None
) -> tuple[LanguageModel, Any]:  # Any: as in `load`
    """Load a model like `load`; for a classifier, load its model without the classification head."""
    if ((path := expand_user(name_or_path)) / MANIFEST).is_file():
        return _load_checkpoint(path, dtype=dtype, device=device)
    target = local_model_directory(name_or_path)
    if base_model_of(target) is None:
        extra = {SCORE} if is_classifier(target) else ()
        return load_model(target, dtype=dtype, device=device, extra_tensors=extra), load_model_tokenizer(
            target
        )
    assert isinstance(target, Path)
    model = load_base_of_adapter(target, dtype=dtype, device=device)
    attach_trained_adapter(model, target)
    return model.eval(), load_model_tokenizer(target)


def load_base_of_adapter(
    target: Path, *, dtype: torch.dtype | None, device: str | torch.device | None
) -> LanguageModel:
    """Load the base model of an adapter directory or checkpoint, quantized if the adapter was trained so."""
    base = base_model_of(target)
    assert base is not None
    if is_base_quantized(target):
        model = _load_quantized(base, dtype=dtype, device=device)
    else:
        model, _ = load_base(base, dtype=dtype, device=device)
    model.name = absolute_path_or_name(base)  # also if the base is itself an adapter
    return model


def is_base_quantized(target: Path) -> bool:
    """Return whether the adapter of a directory or checkpoint was trained on a 4-bit base model."""
    if (config := config_of_checkpoint(target)) is not None:
        # a base that is stored in the run's directory is already dequantized
        return config.method.kind == "qlora" and stored_base(target) is None
    path = target / QUANTIZATION_FILE
    if path.is_file() and (kind := read_json(path)) != NF4_BASE:
        raise ModelError(f"{path}: unsupported quantization of the base model: {kind}")
    return path.is_file()


def attach_trained_adapter(model: LanguageModel, target: Path) -> None:
    """Attach the adapter of a directory or checkpoint to its base model, in place."""
    if (config := config_of_checkpoint(target)) is None:
        load_adapter(model, target)
        return
    if config.method.continues:
        attach_trained_adapter(model, adapter_directory(str(config.language_model)))
    else:
        attach_from_config(model, config.method)
    _copy_checkpoint_weights(model, target)


def adapter_directory(name: str) -> Path:
    """Return the adapter directory or checkpoint of a name; raise a ConfigError if it is not an adapter."""
    target = expand_user(name) if config_of_checkpoint(name) is not None else local_model_directory(name)
    if not isinstance(target, Path) or base_model_of(target) is None:
        is_missing = "/" in name and not expand_user(name).exists()
        raise ConfigError(
            f"method.continue: {name} {'does not exist' if is_missing else 'is not an adapter'}",
            hint="set model to a run, checkpoint or directory with an adapter, or remove method.continue",
        )
    return target


def _load_quantized(
    name: str, *, dtype: torch.dtype | None, device: str | torch.device | None
) -> LanguageModel:
    torch_device = choose_device(str(device or "auto"))
    dtype = dtype or choose_precision("auto", torch_device).frozen
    return load_quantized(name, dtype=dtype, device=torch_device)


def load_quantized(name_or_path: str | Path, *, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """Load a base model quantized to NF4, without its tokenizer."""
    # quantized from float32, which represents every stored dtype, so that the codes do not depend on the
    # precision of the run
    model, _ = load_base(name_or_path, dtype=torch.float32, device="cpu")
    from whet.adapters.qlora import quantize_base

    return quantize_base(model, device=device, dtype=dtype)


def _load_checkpoint(
    checkpoint: Path, *, dtype: torch.dtype | None, device: str | torch.device | None
) -> tuple[LanguageModel, Any]:  # Any: as in `load`
    """Load the model of a run at a checkpoint: its base model with the weights of the checkpoint."""
    config = config_of_checkpoint(checkpoint)
    if config is None:
        raise ModelError(
            f"{checkpoint} is a checkpoint outside of a run directory, so its base model is unknown",
            hint="build the model, then call whet.load_checkpoint(path, model)",
        )
    check_manifest(checkpoint)
    tokenizer, base = load_model_tokenizer(checkpoint), starting_model(checkpoint)
    assert base is not None
    if config.method.kind != "full":
        model = load_base_of_adapter(checkpoint, dtype=dtype, device=device)
        attach_trained_adapter(model, checkpoint)
        return model.eval(), tokenizer
    if isinstance(base, Preset):
        from whet.models.from_scratch.new_model import new_model

        model = new_model(base, tokenizer, seed=config.run.seed, mup=config.optim.mup)
        torch_device = choose_device(str(device or "auto"))
        model.to(torch_device, dtype or choose_precision("auto", torch_device).frozen)
    else:
        model, _ = load_base(base, dtype=dtype, device=device)
    model.name = absolute_path_or_name(checkpoint)
    model.requires_grad_(True)
    _copy_checkpoint_weights(model, checkpoint)
    return model.eval(), tokenizer


def _copy_checkpoint_weights(model: LanguageModel, checkpoint: Path) -> None:
    """Copy the trained weights of a checkpoint into the model, without the heads of its objective."""
    weights = read_trained_parameters(model, checkpoint, extra_prefix=HEADS_PREFIX)
    for name, tensor in weights.items():
        check_weight(tensor, name, checkpoint)
    copy_trained_parameters(model, weights)


def load_base(
    name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> tuple[LanguageModel, Any]:  # Any: as in `load`
    """Load a model to train on top of: like `load`, with adapters merged into the weights.

    `model.name` is None for merged weights, because they exist nowhere else, and for checkpoints, because
    they may be deleted later.
    """
    model, tokenizer = load(name_or_path, dtype=dtype, device=device)
    is_checkpoint = config_of_checkpoint(name_or_path) is not None
    model.name = None if is_checkpoint else absolute_path_or_name(name_or_path)
    if any(isinstance(module, Adapter | NF4Linear) for module in model.modules()):
        from whet.adapters.merge import merge

        model = merge(model)
    return model, tokenizer


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    extra_tensors: Container[str] = (),
) -> LanguageModel:
    """Load a model in evaluation mode, natively if whet supports its family, else through transformers.

    The files may contain `extra_tensors`, which are ignored because they are not part of the model.
    """
    directory = resolve_model(str(name_or_path))
    torch_device = choose_device(str(device or "auto"))
    dtype = dtype or choose_precision("auto", torch_device).frozen
    config = read_config(directory)
    choice = families.choose_family(config)
    if choice.family is None:
        log.info("model: through transformers (%s)", choice.reason)
        try:
            from whet.model_io.load_transformers import load_bridge

            model: LanguageModel = load_bridge(
                directory, dtype=dtype, device=torch_device, extra_tensors=extra_tensors
            )
        except ModelError as error:  # the reason why whet has no native model often explains the failure
            raise ModelError(f"{error.message} ({choice.reason})", hint=error.hint) from error
    else:
        log.info("model: %s", choice.reason)
        model = _load_native(directory, config, dtype=dtype, device=torch_device, extra_tensors=extra_tensors)
    model.source = directory
    path = Path(name_or_path)
    model.name = str(path.absolute()) if path.exists() else str(name_or_path)
    return model.eval()


def _load_native(
    directory: Path,
    config: dict[str, Any],  # Any: JSON values
    *,
    dtype: torch.dtype,
    device: torch.device,
    extra_tensors: Container[str],
) -> Decoder:
    family = families.FAMILIES[config["model_type"]]
    spec = read_spec(family, config, directory)
    files = open_tensor_files(directory, config)
    source_config = {key: value for key, value in config.items() if key != QUANTIZATION}
    if len(spec.blocks) > (stored := sum(1 for _ in files)):
        raise ModelError(
            f"{directory}: config.json has {len(spec.blocks)} layers, but there are only {stored} tensors"
        )
    experts = max((mixture.experts for mixture in spec.expert_specs), default=0)
    with invalid_input_errors(f"{directory / 'config.json'} is invalid"), torch.device("meta"):
        model = Decoder(spec, source_config=source_config)
    names = {name: family.hf_name(name) for name in model.state_dict()}
    # files store experts as separate tensors; older versions of whet wrote the fused tensors
    unfused = [name for name in names if names[name] not in files] if experts <= stored else []
    parts = {
        name: tensors for name in unfused if (tensors := families.stored_tensor_names(spec, name)) is not None
    }
    prefix = getattr(family, "PREFIX", "")
    if prefix and not any(name.startswith(prefix) for name in files):
        # old checkpoints of the model without its head omit the prefix
        names = {name: hf_name.removeprefix(prefix) for name, hf_name in names.items()}
    ignored = {name for name in files if families.is_buffer(family, name) or name in extra_tensors}
    if spec.tied_head and (head := family.hf_name("lm_head.weight")) in files:
        embedding = names["embed_tokens.weight"]
        pair = dict(files.read({head, embedding}))
        if embedding in pair and not torch.equal(pair[head], pair[embedding]):
            raise ModelError(
                f"{directory}: config.json ties the head to the embedding, but {head} differs from it"
            )
        ignored.add(head)
    transposed = {name for name in names if families.is_transposed(family, name)}
    load_parameters(
        model,
        files,
        names=names,
        transposed=transposed,
        ignored=ignored,
        dtype=dtype,
        device=device,
        parts=parts,
    )
    return model


def load_with_heads(
    checkpoint: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[LanguageModel, "PredictionHeads", Any]:  # Any: a transformers tokenizer
    """Load the model of a checkpoint, its multi-token prediction heads, and the tokenizer.

    Raises:
        ModelError: If the checkpoint does not belong to a run with objective.kind: mtp.
    """
    checkpoint = Path(checkpoint)
    config = run_directory_of(checkpoint) / CONFIG_FILE
    objective = load_config(config).objective if config.is_file() else None
    if not isinstance(objective, MTPObjective):
        raise ModelError(
            f"{checkpoint} is not a checkpoint of a run with objective.kind: mtp, so it has no heads",
            hint="use a checkpoint such as runs/NAME/checkpoints/step-000100; final/ and saved models have no"
            " heads",
        )
    model, tokenizer = load(checkpoint, dtype=dtype, device=device)
    from whet.models.mtp import mtp_block_spec, new_prediction_heads

    heads = new_prediction_heads(model, objective.n_predict, mtp_block_spec(model, objective))
    both = ModelWithHeads(model, heads)
    copy_trained_parameters(both, read_trained_parameters(both, checkpoint))
    return model, heads.requires_grad_(False).eval(), tokenizer
