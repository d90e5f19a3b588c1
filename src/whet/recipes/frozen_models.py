"""Models that a run asks and does not train: teachers, and the reference of preferences and rewards."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch

from whet.adapters.adapter import adapted
from whet.errors import ModelError, blamed_on
from whet.hardware import Precision
from whet.model_io.fingerprints import weights_digest
from whet.model_io.load import load, load_base
from whet.models.language_model import LanguageModel
from whet.recipes.recipe import UNTRAINED, Frozen, FrozenModel

log = logging.getLogger("whet")


def load_frozen_models(
    wanted: Mapping[str, FrozenModel],
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    precision: Precision,
) -> tuple[dict[str, Frozen], dict[str, str]]:
    """Open the frozen models of a run: by role, and what tells those with names from any other."""
    frozen: dict[str, Frozen] = {}
    identities: dict[str, str] = {}
    for role, spec in wanted.items():
        if spec.name == UNTRAINED:
            if not spec.before_training:
                frozen[role] = untrained_copy(model)
            continue
        opened = _open(spec, model, tokenizer, precision=precision)
        if spec.trained_dtype:
            log.info("reference: %s", spec.name)
            opened.requires_grad_(False).eval()
        frozen[role] = opened
        identities[spec.name] = identity_of(opened)
    return frozen, identities


def untrained_copy(model: LanguageModel) -> Frozen:
    """Return the model as it is before the first step: itself without its adapters, or a copy."""
    if has_adapters(model):
        log.info("reference: the model with its adapters off")
        return "adapters-off"
    log.info("reference: a frozen copy of the model")
    return copy.deepcopy(model).requires_grad_(False).eval()


def _open(spec: FrozenModel, model: LanguageModel, tokenizer: Any, *, precision: Precision) -> LanguageModel:
    """Open a model by name.

    A reference is opened as the trained model is (adapters merged, weights in the same dtype), so that naming
    the model a run starts from gives the run without a name.
    """
    dtype = precision.trained if spec.trained_dtype and not has_adapters(model) else precision.frozen
    with blamed_on(spec.key):
        opened, theirs = (load_base if spec.trained_dtype else load)(
            spec.name, dtype=dtype, device=model.device
        )
        refuse_other_tokens(
            spec.name,
            opened.vocab_size,
            theirs,
            student=model.name or "the trained model",
            vocab_size=model.vocab_size,
            tokenizer=tokenizer,
        )
    return opened


def refuse_longer_texts(spec: FrozenModel, reference: LanguageModel, longest: int) -> None:
    """Refuse a reference that cannot read the longest text."""
    if longest > reference.max_positions:
        raise ModelError(
            f"{spec.key}: {spec.name} reads at most {reference.max_positions} tokens, "
            f"and the longest text has {longest}",
            hint=f"set data.max_length to {reference.max_positions} or less, or name another reference",
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
    """Open a teacher whose opinions are about the student's own token ids."""
    with blamed_on("objective.teacher"):
        teacher, theirs = load(name, dtype=dtype, device=device)
        refuse_other_tokens(
            name, teacher.vocab_size, theirs, student=student, vocab_size=vocab_size, tokenizer=tokenizer
        )
    return teacher


def refuse_other_tokens(
    name: str,
    size: int,
    theirs: Any,
    *,
    student: str,
    vocab_size: int | None,
    tokenizer: Any,
) -> None:
    """Refuse a model, of `size` tokens and with the tokenizer `theirs`, whose ids mean other tokens."""
    if vocab_size is not None:
        refuse_other_size(name, size, student, vocab_size)
    known, ours = (each.get_vocab() for each in (theirs, tokenizer)) if theirs else ({}, {})
    differ = [token for token in {**known, **ours} if known.get(token) != ours.get(token)]
    if differ:
        shown = ", ".join(f"{t!r} ({known.get(t)} there, {ours.get(t)} here)" for t in sorted(differ)[:3])
        raise ModelError(f"{name} has another tokenizer: {len(differ)} tokens differ, such as {shown}")


def refuse_other_size(name: str, theirs: int, student: str, ours: int) -> None:
    """Refuse a model with a vocabulary of another size."""
    if theirs != ours:
        raise ModelError(
            f"{name} has a vocabulary of {theirs}, and {student} of {ours}: both must have the same tokens"
        )


def identity_of(model: LanguageModel) -> str:
    """Return what tells a frozen model from any other: its weights, and what is done with them."""
    return f"{weights_digest(model)} {model.fingerprint}"


def has_adapters(model: LanguageModel) -> bool:
    """Whether a model has adapters, which can be turned off."""
    return any(True for _ in adapted(model))
