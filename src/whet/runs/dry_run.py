"""Assemble a run without weights, to find the errors that `whet train` would raise before its first step."""

import contextlib
from typing import Any

from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.errors import prefix_errors
from whet.hardware import choose_device, choose_precision
from whet.model_io.tokenizer import load_model_tokenizer
from whet.models.decoder import Decoder
from whet.models.from_scratch.mup import check_mup_multipliers
from whet.models.from_scratch.new_model import preset_model_spec
from whet.models.heads import ModelWithHeads
from whet.models.language_model import LanguageModel
from whet.planning.meta_model import (
    META,
    build_meta_decoder,
    build_meta_model,
    prepare_for_training,
    read_frozen_models,
)
from whet.recipes.frozen_models import check_same_vocabulary
from whet.recipes.model_setup import use_fp8
from whet.recipes.recipe import INITIAL_MODEL, Build, Frozen, Recipe
from whet.recipes.registry import complete_config, recipe_for
from whet.training.optim.optimizers import create_optimizer
from whet.training.router_balancing import add_router_objective


def check_assembly(config: RunConfig, *, tokens: int | None = None) -> None:
    """Build a run's model, objective and optimizer on the meta device, so that invalid settings raise errors.

    Args:
        config: The run's config.
        tokens: The vocabulary size, if the model is new and its tokenizer is trained on the data.
    """
    config = complete_config(config)
    recipe = recipe_for(config)
    recipe.check()
    device = choose_device(config.run.device)
    precision = choose_precision(config.run.precision, device)
    model = _build_untrained_model(config, tokens)
    prepare_for_training(model, config, precision)
    if config.run.fp8:
        use_fp8(model, config.method.kind, device=device)
    frozen = read_frozen_models(recipe, model, precision)
    _check_vocabularies(recipe, frozen, model)
    with contextlib.ExitStack() as stack:
        recipe.start(stack)  # starts the reward functions, or raises their error
    b = Build(config, model, precision, frozen=frozen)
    with META:
        recipe.check_models(b)
        objective = recipe.objective(b)
    objective, _ = add_router_objective(objective, model, config.experts, compute=precision.compute)
    heads = objective.heads
    create_optimizer(
        config.optim_groups, model if heads is None else ModelWithHeads(model, heads), quiet=True
    )


def _build_untrained_model(config: RunConfig, tokens: int | None) -> LanguageModel:
    name, mup = config.language_model, config.optim.mup
    if isinstance(name, Preset) and tokens is not None:
        return build_meta_decoder(preset_model_spec(name, vocab_size=tokens, mup=mup))
    model = build_meta_model(name)
    if mup is not None and not isinstance(name, Preset):
        check_mup_multipliers(model.spec if isinstance(model, Decoder) else None, mup, name=name)
    return model


def _check_vocabularies(
    recipe: Recipe[Any], frozen: dict[str, Frozen], model: LanguageModel
) -> None:  # Any: its section
    """Raise a ModelError if a frozen model has a different vocabulary than the trained model."""
    base = recipe.config.language_model
    for role, spec in recipe.frozen_models().items():
        frozen_model = frozen.get(role)
        if spec.name == INITIAL_MODEL or not isinstance(frozen_model, LanguageModel):
            continue
        tokenizer = frozen_tokenizer = None
        if not isinstance(base, Preset):
            tokenizer, frozen_tokenizer = load_model_tokenizer(base), load_model_tokenizer(spec.name)
        with prefix_errors(spec.key):
            check_same_vocabulary(
                spec.name,
                frozen_model.vocab_size,
                frozen_tokenizer if tokenizer is not None else None,
                student=str(base),
                vocab_size=model.vocab_size,
                tokenizer=tokenizer,
            )
