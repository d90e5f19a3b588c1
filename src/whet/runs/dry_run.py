"""A run assembled without weights: raises what `whet train` would refuse before its first step."""

from typing import Any

from whet.config.objectives.distill import DistillObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.objectives.mix import MixObjective
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.errors import blamed_on
from whet.hardware import Precision
from whet.model_io.tokenizer import tokenizer_of
from whet.models.from_scratch.mup import refuse_other_multipliers
from whet.models.from_scratch.new_model import new_spec
from whet.models.heads import WithHeads
from whet.models.language_model import LanguageModel
from whet.objectives.hidden_matching import HiddenMatching
from whet.objectives.mix import Mix
from whet.objectives.objective import Objective
from whet.planning.meta_model import META, from_spec, make_objective, other_models, prepare, read_model
from whet.recipes.reference_model import frozen_key, named_models
from whet.recipes.registry import recipe_for
from whet.recipes.teachers import refuse_other_tokens
from whet.recipes.text_recipe import use_fp8
from whet.rl.rewards.worker_pool import RewardPool
from whet.training.optim.optimizers import create_optimizer
from whet.training.router_balancing import with_routers


def try_assembly(config: RunConfig, *, tokens: int | None = None) -> None:
    """Put a run's model, objective and optimizer together on the meta device.

    Args:
        config: the run.
        tokens: of the tokenizer, where the model is new and its tokenizer made from texts.
    """
    work = recipe_for(config, config.directory)
    model = _untrained(config, tokens)
    prepare(model, config, work.precision)
    if config.run.fp8:
        use_fp8(model, config.method.kind, device=work.device)
    parts = config.parts()
    objective: Objective
    if parts:
        objectives = {name: _objective(part, model, work.precision) for name, part in parts.items()}
        objective = Mix(objectives, dict.fromkeys(parts, 1.0))
    else:
        objective = _objective(config, model, work.precision)
    objective, _ = with_routers(objective, model, config.experts, compute=work.precision.compute)
    heads = objective.heads
    create_optimizer(config.optim_groups, model if heads is None else WithHeads(model, heads), quiet=True)


def _untrained(config: RunConfig, tokens: int | None) -> LanguageModel:
    name, mup = config.language_model, config.optim.mup
    if isinstance(name, Preset) and tokens is not None:
        return from_spec(new_spec(name, tokens=tokens, mup=mup))
    model = read_model(name)
    if mup is not None and not isinstance(name, Preset):
        refuse_other_multipliers(getattr(model, "spec", None), mup, name=name)
    return model


def _objective(config: RunConfig, model: LanguageModel, precision: Precision) -> Objective:
    section = config.objective
    assert not isinstance(section, MixObjective)
    others = other_models(config, precision)
    for name, other in zip(named_models(config), others, strict=False):
        with blamed_on(frozen_key(section)):
            _refuse_other_tokens(name, other, config, model)
    if isinstance(section, DistillObjective) and section.hidden is not None and others:
        with META:
            HiddenMatching(model, others[0], section.hidden.layers, kind=section.hidden.kind)
    if isinstance(section, GRPOObjective):
        with RewardPool(section):  # they start, or say why they do not
            pass
    return make_objective(section, model, others, precision)


def _refuse_other_tokens(name: str, other: LanguageModel, config: RunConfig, model: LanguageModel) -> None:
    ours: Any = None  # Any: transformers tokenizers
    theirs: Any = None
    if not isinstance(config.language_model, Preset):
        ours, theirs = tokenizer_of(config.language_model), tokenizer_of(name)
    refuse_other_tokens(
        name,
        other.vocab_size,
        theirs if ours is not None else None,
        student=str(config.language_model),
        vocab_size=model.vocab_size,
        tokenizer=ours,
    )
