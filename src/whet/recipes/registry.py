"""The recipe of each objective kind, by import path, so that running one kind does not import the others."""

from typing import TYPE_CHECKING, Any

from whet.config.objectives.custom import CustomObjective
from whet.config.run_config import RunConfig
from whet.data.run_data import Needs
from whet.given.given import Given
from whet.lazy_import import load_object

if TYPE_CHECKING:
    from whet.recipes.recipe import Recipe

RECIPES = {
    "sft": "whet.recipes.sft:SFTRecipe",
    "dpo": "whet.recipes.preference:PreferenceRecipe",
    "ipo": "whet.recipes.preference:PreferenceRecipe",
    "orpo": "whet.recipes.preference:PreferenceRecipe",
    "simpo": "whet.recipes.preference:PreferenceRecipe",
    "distill": "whet.recipes.distill:DistillRecipe",
    "mtp": "whet.recipes.mtp:MTPRecipe",
    "distrust": "whet.recipes.distrust:DistrustRecipe",
    "mix": "whet.recipes.mix:MixRecipe",
    "classify": "whet.recipes.classify.classify:ClassifyRecipe",
    "grpo": "whet.recipes.grpo:GRPORecipe",
    "regression": "whet.recipes.quality.quality:QualityRecipe",
}


def recipe_for(config: RunConfig, given: Given | None = None) -> "Recipe[Any]":  # Any: its section
    """Return the recipe of a config's objective.

    Args:
        config: The run's config.
        given: Python objects that the config refers to.
    """
    if isinstance(config.objective, CustomObjective):
        custom: Recipe[Any] = load_object("whet.recipes.custom:custom_recipe")(config, given or Given())
        return custom
    recipe: Recipe[Any] = load_object(RECIPES[config.objective.kind])(config, config.objective, given)
    return recipe


def record_needs(config: RunConfig) -> Needs:
    """Return which parts of the records a config's objective reads, without importing a custom objective."""
    return Needs() if isinstance(config.objective, CustomObjective) else recipe_for(config).needs()


def complete_config(config: RunConfig) -> RunConfig:
    """Return the config with the settings of the adapter that method.continue trains further."""
    if not config.method.continues:
        return config
    from whet.model_io.continued_adapter import resolve_continued

    return resolve_continued(config)
