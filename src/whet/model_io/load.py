"""`whet.load`: any model that can be named, adapters, checkpoints and finished runs included."""

import logging
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whet.adapters.attach import attach_configured, merge
from whet.config.load_config import load_config
from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.mtp import MTPObjective
from whet.config.preset import Preset
from whet.error_boundary import wrong_input
from whet.errors import ModelError
from whet.hardware import choose_device, choose_precision
from whet.model_io.checkpoint_weights import put_trained, read_trained
from whet.model_io.config_json import read_config, read_spec
from whet.model_io.file_checks import check_weight
from whet.model_io.formats.adapter_files import NF4_BASE, QUANTISED, load_adapter
from whet.model_io.formats.classifier_head import SCORE, is_classifier
from whet.model_io.hub import resolve
from whet.model_io.resolve import (
    at_home,
    base_of,
    below_checkpoint,
    config_of_checkpoint,
    full_name,
    usable_directory,
)
from whet.model_io.safetensors import TensorFiles, load_parameters
from whet.model_io.tokenizer import tokenizer_of
from whet.models import families
from whet.models.decoder import Decoder
from whet.models.heads import HEADS, WithHeads
from whet.models.language_model import LanguageModel
from whet.run_directory import CONFIG_FILE, run_of
from whet.storage import MANIFEST, check_manifest, read_json

if TYPE_CHECKING:
    from whet.models.mtp import PredictionHeads

log = logging.getLogger("whet")


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
    from whet.adapters.qlora import quantise_base

    return quantise_base(model, device=device, dtype=dtype)


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
        from whet.models.from_scratch.new_model import new_model

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


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    besides: Container[str] = (),
) -> LanguageModel:
    """A model in evaluation mode: natively where whet has the family, else on transformers' class.

    Its files may hold the tensors named in `besides`, which are not the model's.
    """
    directory = resolve(str(name_or_path))
    where = choose_device(str(device or "auto"))
    dtype = dtype or choose_precision("auto", where).frozen
    config = read_config(directory)
    choice = families.choose(config)
    if choice.family is None:
        log.info("model: through transformers (%s)", choice.reason)
        try:
            from whet.model_io.load_transformers import load_bridge

            model: LanguageModel = load_bridge(directory, dtype=dtype, device=where, besides=besides)
        except ModelError as error:  # what whet does not know is often what transformers stumbles over
            raise ModelError(f"{error.message} ({choice.reason})", hint=error.hint) from error
    else:
        log.info("model: %s", choice.reason)
        model = _load_native(directory, config, dtype=dtype, device=where, besides=besides)
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
    besides: Container[str],
) -> Decoder:
    family = families.FAMILIES[config["model_type"]]
    spec = read_spec(family, config, directory)
    files = TensorFiles(directory)
    if len(spec.blocks) > (stored := sum(1 for _ in files)):
        raise ModelError(
            f"{directory}: config.json has {len(spec.blocks)} layers, and there are {stored} tensors"
        )
    experts = max((each.experts for each in spec.mixtures), default=0)
    with wrong_input(f"{directory / 'config.json'} cannot be understood"), torch.device("meta"):
        model = Decoder(spec, source_config=config)
    names = {name: family.hf_name(name) for name in model.state_dict()}
    # whole tensors of experts are what older versions of whet wrote
    apart = [name for name in names if names[name] not in files] if experts <= stored else []
    parts = {name: each for name in apart if (each := families.stored_parts(spec, name)) is not None}
    prefix = getattr(family, "PREFIX", "")
    if prefix and not any(name.startswith(prefix) for name in files):
        # old checkpoints of the bare model, without its head, leave the prefix out
        names = {name: theirs.removeprefix(prefix) for name, theirs in names.items()}
    ignored = {name for name in files if families.is_buffer(family, name) or name in besides}
    if spec.tied_head and (head := family.hf_name("lm_head.weight")) in files:
        embedding = names["embed_tokens.weight"]
        pair = dict(files.read({head, embedding}))
        if embedding in pair and not torch.equal(pair[head], pair[embedding]):
            raise ModelError(
                f"{directory}: config.json says the head is tied to the embedding, but {head} differs from it"
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
    """The model of a checkpoint, the heads that trained with it, and the tokenizer."""
    checkpoint = Path(checkpoint)
    config = run_of(checkpoint) / CONFIG_FILE
    objective = load_config(config).objective if config.is_file() else None
    if not isinstance(objective, MTPObjective):
        raise ModelError(
            f"{checkpoint} is not a checkpoint of a run with objective.kind: mtp, so it has no heads",
            hint="name one such as runs/NAME/checkpoints/step-000100; final/ and saved models have none",
        )
    model, tokenizer = load(checkpoint, dtype=dtype, device=device)
    from whet.models.mtp import block_of, new_heads

    heads = new_heads(model, objective.n_predict, block_of(model, objective))
    both = WithHeads(model, heads)
    put_trained(both, read_trained(both, checkpoint))
    return model, heads.requires_grad_(False).eval(), tokenizer
