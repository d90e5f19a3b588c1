"""Whatever kind of objective or optimizer a config may name is built as itself, never as a default."""

from types import SimpleNamespace
from typing import get_args

import pytest
from torch import nn

from whet.config.objectives.mix import MixObjective
from whet.config.objectives.union import AnyObjective
from whet.config.optim import Optim
from whet.config.section import Section
from whet.errors import ConfigError
from whet.lazy_import import load_object
from whet.planning import meta_model
from whet.recipes import registry
from whet.recipes.recipe import Recipe
from whet.recipes.registry import build_objective, needs_of, recipe_for
from whet.training.optim import optimizers

SECTIONS = [*get_args(get_args(AnyObjective)[0]), MixObjective]
NOT_ON_TEXTS = ("regression", "mix")  # of rows, and of several parts


def made(section):
    """An instance without its checks: only its class and its kind are looked at."""
    return section.model_construct(
        kind=get_args(section.model_fields["kind"].annotation)[0], classes=2, multi_label=False
    )


class Unheard(Section):
    """A kind that somebody adds to the union and to nothing else."""

    kind: str = "unheard"


def kinds_of(section):
    return get_args(section.model_fields["kind"].annotation)


def test_the_registries_cover_every_objective_of_a_config():
    kinds = {kind for section in SECTIONS for kind in kinds_of(section)}
    assert registry.RECIPES.keys() == kinds
    assert registry.OBJECTIVES.keys() == kinds - set(NOT_ON_TEXTS)
    for reference in registry.RECIPES.values():
        assert issubclass(load_object(reference), Recipe)
    for module in registry.OBJECTIVES.values():
        assert callable(load_object(f"{module}:build_objective"))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_objective_of_a_config_is_read_and_built_as_itself(section):
    """A section is handed to functions that take it, and no other: none falls back to SFT."""
    needs_of(made(section))
    if made(section).kind in NOT_ON_TEXTS:
        with pytest.raises(ConfigError, match=f"objective.kind {made(section).kind} is not"):
            build_objective(made(section), None)
        return
    for kind in kinds_of(section):
        for function in ("needs", "build_objective"):
            taken = load_object(f"{registry.OBJECTIVES[kind]}:{function}").__annotations__["section"]
            assert taken is section


def test_an_objective_without_a_recipe_is_not_taken_for_sft():
    unheard = Unheard()
    for build in (
        needs_of,
        lambda section: build_objective(section, None),
        lambda section: recipe_for(SimpleNamespace(objective=section), None),
    ):
        with pytest.raises(KeyError, match="unheard"):
            build(unheard)
    with pytest.raises(AssertionError, match="unheard"):
        meta_model.make_objective(unheard, None, [], None)


def test_every_optimizer_of_a_config_has_a_branch():
    assert optimizers.OPTIMIZERS.keys() == set(get_args(Optim.model_fields["name"].annotation))
    kinds = {}
    for name in get_args(Optim.model_fields["name"].annotation):
        section = Optim(name=name)
        model = nn.Linear(2, 2)
        kinds[name] = type(optimizers._create(section, [{"params": list(model.parameters())}], model))
    assert len(set(kinds.values())) == len(kinds), kinds


def test_an_optimizer_without_a_branch_is_not_taken_for_adamw():
    section = Optim().model_copy(update={"name": "unheard"})
    with pytest.raises(KeyError, match="unheard"):
        optimizers._create(section, [], nn.Linear(2, 2))
