"""Every objective and optimizer of a config is built as configured, never as a default."""

from types import SimpleNamespace
from typing import get_args, get_origin

import pytest
from torch import nn

from whet.config.objectives.mix import MixObjective
from whet.config.objectives.union import AnyObjective
from whet.config.optim import Optim
from whet.config.section import Section
from whet.lazy_import import load_object
from whet.recipes import registry
from whet.recipes.recipe import Recipe
from whet.recipes.registry import recipe_for, record_needs
from whet.training.optim import optimizers

SECTIONS = [*get_args(get_args(AnyObjective)[0]), MixObjective]


class UnregisteredObjective(Section):
    """An objective kind without a recipe."""

    kind: str = "unregistered"


def kinds_of(section):
    return get_args(section.model_fields["kind"].annotation)


def test_registry_covers_every_objective_kind():
    kinds = {kind for section in SECTIONS for kind in kinds_of(section)}
    assert registry.RECIPES.keys() == kinds
    for reference in registry.RECIPES.values():
        assert issubclass(load_object(reference), Recipe)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_objective_has_a_recipe_for_its_section(section):
    """Each section is passed to the recipe that is declared for it, and none falls back to SFT."""
    for kind in kinds_of(section):
        recipe = load_object(registry.RECIPES[kind])
        [base] = [base for base in recipe.__orig_bases__ if get_origin(base) is Recipe]
        assert get_args(base) == (section,)


def test_objective_without_a_recipe_does_not_fall_back_to_sft():
    config = SimpleNamespace(objective=UnregisteredObjective())
    for build in (recipe_for, record_needs):
        with pytest.raises(KeyError, match="unregistered"):
            build(config)


def test_every_optimizer_name_has_a_branch():
    assert optimizers.OPTIMIZERS.keys() == set(get_args(Optim.model_fields["name"].annotation))
    kinds = {}
    for name in get_args(Optim.model_fields["name"].annotation):
        section = Optim(name=name)
        model = nn.Linear(2, 2)
        kinds[name] = type(optimizers._create(section, [{"params": list(model.parameters())}], model))
    assert len(set(kinds.values())) == len(kinds), kinds


def test_optimizer_without_a_branch_does_not_fall_back_to_adamw():
    section = Optim().model_copy(update={"name": "unregistered"})
    with pytest.raises(KeyError, match="unregistered"):
        optimizers._create(section, [], nn.Linear(2, 2))
