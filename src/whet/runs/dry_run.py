"""A run assembled without weights: raises what `whet train` would refuse before its first step."""

import contextlib
from typing import Any

from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.errors import blamed_on
from whet.hardware import choose_device, choose_precision
from whet.model_io.tokenizer import tokenizer_of
from whet.models.decoder import Decoder
from whet.models.from_scratch.mup import refuse_other_multipliers
from whet.models.from_scratch.new_model import new_spec
from whet.models.heads import WithHeads
from whet.models.language_model import LanguageModel
from whet.planning.meta_model import META, from_spec, prepare, read_frozen_models, read_model
from whet.recipes.frozen_models import refuse_other_tokens
from whet.recipes.model_setup import use_fp8
from whet.recipes.recipe import UNTRAINED, Build, Frozen, Recipe
from whet.recipes.registry import recipe_for
from whet.training.optim.optimizers import create_optimizer
from whet.training.router_balancing import with_routers


def try_assembly(config: RunConfig, *, tokens: int | None = None) -> None:
    """Put a run's model, objective and optimizer together on the meta device.

    Args:
        config: the run.
        tokens: of the tokenizer, where the model is new and its tokenizer made from texts.
    """
    recipe = recipe_for(config)
    recipe.check()
    device = choose_device(config.run.device)
    precision = choose_precision(config.run.precision, device)
    model = _untrained(config, tokens)
    prepare(model, config, precision)
    if config.run.fp8:
        use_fp8(model, config.method.kind, device=device)
    frozen = read_frozen_models(recipe, precision)
    _refuse_other_tokens(recipe, frozen, model)
    with contextlib.ExitStack() as held:
        recipe.start(held)  # rewards start, or say why they do not
    b = Build(config, model, precision, frozen=frozen)
    with META:
        recipe.check_models(b)
        objective = recipe.objective(b)
    objective, _ = with_routers(objective, model, config.experts, compute=precision.compute)
    heads = objective.heads
    create_optimizer(config.optim_groups, model if heads is None else WithHeads(model, heads), quiet=True)


def _untrained(config: RunConfig, tokens: int | None) -> LanguageModel:
    name, mup = config.language_model, config.optim.mup
    if isinstance(name, Preset) and tokens is not None:
        return from_spec(new_spec(name, tokens=tokens, mup=mup))
    model = read_model(name)
    if mup is not None and not isinstance(name, Preset):
        refuse_other_multipliers(model.spec if isinstance(model, Decoder) else None, mup, name=name)
    return model


def _refuse_other_tokens(
    recipe: Recipe[Any], frozen: dict[str, Frozen], model: LanguageModel
) -> None:  # Any: its section
    """Refuse frozen models whose token ids mean other tokens."""
    base = recipe.config.language_model
    for role, spec in recipe.frozen_models().items():
        other = frozen.get(role)
        if spec.name == UNTRAINED or not isinstance(other, LanguageModel):
            continue
        ours = theirs = None
        if not isinstance(base, Preset):
            ours, theirs = tokenizer_of(base), tokenizer_of(spec.name)
        with blamed_on(spec.key):
            refuse_other_tokens(
                spec.name,
                other.vocab_size,
                theirs if ours is not None else None,
                student=str(base),
                vocab_size=model.vocab_size,
                tokenizer=ours,
            )
