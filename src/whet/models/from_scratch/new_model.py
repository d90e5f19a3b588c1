"""Creation of a newly initialized model from a preset."""

import logging
from typing import Any

from whet.config.optim import MuP
from whet.config.preset import Preset
from whet.errors import ConfigError, ModelError
from whet.models.costs import flops_per_token, parameter_counts
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.mup import width_ratio
from whet.models.from_scratch.presets import preset_spec
from whet.models.language_model import LanguageModel
from whet.models.spec import ModelSpec

log = logging.getLogger("whet")


def preset_model_spec(preset: Preset, *, vocab_size: int, mup: MuP | None = None) -> ModelSpec:
    """Return the spec of a preset for a tokenizer with `vocab_size` tokens."""
    changes = {"vocab_size": vocab_size, **preset.changes()}
    if changes["vocab_size"] < vocab_size:
        raise ConfigError(
            f"model.vocab_size={changes['vocab_size']} is smaller than the tokenizer's vocabulary "
            f"({vocab_size})",
            hint="remove model.vocab_size to use the size of the tokenizer",
        )
    try:
        return preset_spec(preset.preset, mup=mup, **changes)
    except ModelError as error:
        raise ConfigError(f"model: {error.message}", hint=error.hint) from error


def new_model(
    preset: Preset,
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    seed: int,
    mup: MuP | None = None,
) -> LanguageModel:
    """Return a newly initialized model of a preset."""
    spec = preset_model_spec(preset, vocab_size=len(tokenizer), mup=mup)
    special_tokens = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    ratio = 1.0 if mup is None else width_ratio(spec, mup)
    model = new_decoder(spec, seed=seed, source_config=special_tokens, width_ratio=ratio)
    model.name = f"{preset.preset} from scratch"
    counts = ", ".join(f"{part} {count:,}" for part, count in parameter_counts(spec).items() if count)
    log.info("model: %s, stored as %s: %s", model.name, spec.family, counts)
    log.info("cost: %.3g forward FLOPs per token, in a window of 512", flops_per_token(spec, 512))
    return model
