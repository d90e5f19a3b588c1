"""The frozen model that preferences and rewards are compared with: the untrained one, or one by name."""

import copy
import logging
from typing import Any, Literal

from whet.adapters.adapter import adapted
from whet.config.objectives.distill import DistillObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.objectives.preference import PreferenceObjective
from whet.config.run_config import RunConfig
from whet.errors import ModelError, blamed_on
from whet.hardware import Precision
from whet.model_io.fingerprints import weights_digest
from whet.model_io.load import load_base
from whet.models.language_model import LanguageModel
from whet.recipes.teachers import refuse_other_tokens

log = logging.getLogger("whet")

Reference = LanguageModel | Literal["adapters-off"]
REFERENCE_KEY = "objective.reference_model"


def untrained_reference(model: LanguageModel) -> Reference:
    """Return the model as it is before the first step: itself without its adapters, or a copy."""
    if _has_adapters(model):
        log.info("reference: the model with its adapters off")
        return "adapters-off"
    log.info("reference: a frozen copy of the model")
    return copy.deepcopy(model).requires_grad_(False).eval()


def named_models(config: RunConfig) -> list[str]:
    """Return the names of the frozen models that a run opens: teachers, or a reference."""
    section = config.objective
    match section:
        case DistillObjective(offline=None):
            return [name for name, _ in section.teachers]
        case PreferenceObjective(reference_model=str(name)) if section.has_reference:
            return [name]
        case GRPOObjective(reference_model=str(name)) if section.beta:
            return [name]
    return [name for part in config.parts().values() for name in named_models(part)]


def frozen_key(section: object) -> str:
    """Return the key that names the frozen models of an objective."""
    return "objective.teacher" if isinstance(section, DistillObjective) else REFERENCE_KEY


def load_reference(
    name: str,
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    precision: Precision,
    longest: int,
) -> LanguageModel:
    """Open a reference by name, for texts of at most `longest` tokens of `model`.

    It is opened as the trained model is (adapters merged, weights in the same dtype), so that naming the
    model a run starts from gives the run without a name.
    """
    dtype = precision.frozen if _has_adapters(model) else precision.trained
    with blamed_on(REFERENCE_KEY):
        reference, theirs = load_base(name, dtype=dtype, device=model.device)
        refuse_other_tokens(
            name,
            reference.vocab_size,
            theirs,
            student=model.name or "the trained model",
            vocab_size=model.vocab_size,
            tokenizer=tokenizer,
        )
    if longest > reference.max_positions:
        raise ModelError(
            f"{REFERENCE_KEY}: {name} reads at most {reference.max_positions} tokens, "
            f"and the longest text has {longest}",
            hint=f"set data.max_length to {reference.max_positions} or less, or name another reference",
        )
    log.info("reference: %s", name)
    return reference.requires_grad_(False).eval()


def identity_of(model: LanguageModel) -> str:
    """Return what tells a frozen model from any other: its weights, and what is done with them."""
    return f"{weights_digest(model)} {model.fingerprint}"


def _has_adapters(model: LanguageModel) -> bool:
    return any(True for _ in adapted(model))
