"""Load frozen models: the teachers of distillation, and the reference model of DPO and GRPO."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch

from whet.adapters.adapter import named_adapters
from whet.config.run_config import RunConfig
from whet.errors import ModelError, prefix_errors
from whet.hardware import Precision
from whet.model_io.fingerprints import weights_digest
from whet.model_io.load import load, load_base
from whet.models.language_model import LanguageModel
from whet.recipes.recipe import INITIAL_MODEL, Frozen, FrozenModel

log = logging.getLogger("whet")


def load_frozen_models(
    specs: Mapping[str, FrozenModel],
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    config: RunConfig,
    precision: Precision,
) -> tuple[dict[str, Frozen], dict[str, str]]:
    """Load the frozen models of a run.

    Args:
        specs: The frozen models of the recipe, by role.
        model: The trained model, before its first step.
        tokenizer: The tokenizer of the trained model.
        config: The config of the run.
        precision: The dtypes of the run.

    Returns:
        The models by role, and the identities (`identity_of`) of those that were loaded, by name.
    """
    frozen: dict[str, Frozen] = {}
    identities: dict[str, str] = {}
    for role, spec in specs.items():
        if spec.name == INITIAL_MODEL:
            if not spec.before_training:
                frozen[role] = initial_model(model, config)
            continue
        loaded = _load_by_name(spec, model, tokenizer, precision=precision)
        if spec.trained_dtype:
            log.info("reference: %s", spec.name)
            loaded.requires_grad_(False).eval()
        frozen[role] = loaded
        identities[spec.name] = identity_of(loaded)
    return frozen, identities


def initial_model(model: LanguageModel, config: RunConfig) -> Frozen:
    """Return the model as it is before its first step: "adapters-off" for new adapters, or a frozen copy.

    The copy of an adapter that the run continues shares the frozen base weights with the model, unless FSDP
    will shard both.
    """
    if has_adapters(model) and not config.method.continues:
        log.info("reference: the model with its adapters disabled")
        return "adapters-off"
    log.info("reference: a frozen copy of the %s", "adapter" if has_adapters(model) else "model")
    shared: list[torch.Tensor] = []
    if has_adapters(model) and config.parallel.kind != "fsdp":
        shared = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared}).requires_grad_(False).eval()


def _load_by_name(
    spec: FrozenModel, model: LanguageModel, tokenizer: Any, *, precision: Precision
) -> LanguageModel:
    """Load a frozen model and check that it has the vocabulary of the trained model.

    A reference model is loaded like the trained model (adapters merged, weights in the same dtype). A run
    that names its base model as the reference therefore equals a run that names no reference.
    """
    dtype = precision.trained if spec.trained_dtype and not has_adapters(model) else precision.frozen
    with prefix_errors(spec.key):
        loaded, frozen_tokenizer = (load_base if spec.trained_dtype else load)(
            spec.name, dtype=dtype, device=model.device
        )
        check_same_vocabulary(
            spec.name,
            loaded.vocab_size,
            frozen_tokenizer,
            student=model.name or "the trained model",
            vocab_size=model.vocab_size,
            tokenizer=tokenizer,
        )
    return loaded


def check_reference_length(spec: FrozenModel, reference: LanguageModel, longest: int) -> None:
    """Raise a ModelError if the reference model cannot read the longest text, of `longest` tokens."""
    if longest > reference.max_positions:
        raise ModelError(
            f"{spec.key}: {spec.name} supports at most {reference.max_positions} tokens, "
            f"but the longest text has {longest}",
            hint=f"set data.max_length to {reference.max_positions} or less, or use another reference model",
        )


def load_teacher(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    student: str,
    vocab_size: int | None,
    tokenizer: Any,  # Any: a transformers tokenizer, as below
) -> LanguageModel:
    """Load a teacher, and check that it has the vocabulary of the student.

    Args:
        name: The name or path of the teacher.
        dtype: The dtype of its weights.
        device: The device of its weights.
        student: The name of the trained model, for messages.
        vocab_size: The vocabulary size of the student, if it is known.
        tokenizer: The tokenizer of the student.
    """
    with prefix_errors("objective.teacher"):
        teacher, teacher_tokenizer = load(name, dtype=dtype, device=device)
        check_same_vocabulary(
            name,
            teacher.vocab_size,
            teacher_tokenizer,
            student=student,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
        )
    return teacher


def check_same_vocabulary(
    name: str,
    frozen_vocab_size: int,
    frozen_tokenizer: Any,
    *,
    student: str,
    vocab_size: int | None,
    tokenizer: Any,
) -> None:
    """Raise a ModelError if a frozen model has another vocabulary than the trained model.

    Args:
        name: The frozen model's name.
        frozen_vocab_size: Its vocabulary size.
        frozen_tokenizer: Its tokenizer; None skips the comparison of tokens.
        student: The trained model's name.
        vocab_size: Its vocabulary size; None skips the comparison of sizes.
        tokenizer: Its tokenizer.
    """
    if vocab_size is not None:
        check_same_vocab_size(name, frozen_vocab_size, student, vocab_size)
    if not frozen_tokenizer:
        return
    frozen_ids, ids = frozen_tokenizer.get_vocab(), tokenizer.get_vocab()
    differing = [token for token in {**frozen_ids, **ids} if frozen_ids.get(token) != ids.get(token)]
    if differing:
        shown = ", ".join(
            f"{token!r} (id {frozen_ids.get(token)} instead of {ids.get(token)})"
            for token in sorted(differing)[:3]
        )
        raise ModelError(
            f"{name} has a different tokenizer than {student}: "
            f"{len(differing)} tokens differ, such as {shown}"
        )


def check_same_vocab_size(name: str, frozen_vocab_size: int, student: str, vocab_size: int) -> None:
    """Raise a ModelError if a frozen model's vocabulary size differs from the trained model's."""
    if frozen_vocab_size != vocab_size:
        raise ModelError(
            f"{name} has a vocabulary of {frozen_vocab_size}, but {student} has one of {vocab_size}: "
            "both must have the same tokens"
        )


def identity_of(model: LanguageModel) -> str:
    """Return a string that identifies a frozen model: the hash of its weights, and its fingerprint."""
    return f"{weights_digest(model)} {model.fingerprint}"


def has_adapters(model: LanguageModel) -> bool:
    """Return whether a model has adapters."""
    return any(True for _ in named_adapters(model))
