"""Which recipe runs which objective kind, by name: running one kind imports no other."""

from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from whet.config.objectives.custom import CustomObjective
from whet.config.objectives.mix import MixObjective
from whet.config.objectives.union import AnyObjective
from whet.config.run_config import RunConfig
from whet.data.run_data import Needs, RunData
from whet.data.sources.source import GivenRows
from whet.errors import ConfigError
from whet.given.given import Given
from whet.lazy_import import load_object
from whet.objectives.objective import Objective
from whet.parallel.process_group import SOLO, World
from whet.recipes.objective_inputs import ObjectiveInputs

if TYPE_CHECKING:
    from whet.recipes.mix import MixData
    from whet.recipes.recipe import Recipe

RECIPES = {
    "sft": "whet.recipes.text_recipe:TextRecipe",
    "dpo": "whet.recipes.text_recipe:TextRecipe",
    "ipo": "whet.recipes.text_recipe:TextRecipe",
    "orpo": "whet.recipes.text_recipe:TextRecipe",
    "simpo": "whet.recipes.text_recipe:TextRecipe",
    "distill": "whet.recipes.text_recipe:TextRecipe",
    "mtp": "whet.recipes.text_recipe:TextRecipe",
    "distrust": "whet.recipes.text_recipe:TextRecipe",
    "mix": "whet.recipes.text_recipe:TextRecipe",
    "classify": "whet.recipes.classify.classify:ClassifyRecipe",
    "grpo": "whet.recipes.grpo:GRPORecipe",
    "regression": "whet.recipes.quality.quality:QualityRecipe",
}
# of a config's own objective, or of one part of a mix: modules with `needs` and `build_objective`
OBJECTIVES = {
    "sft": "whet.recipes.sft",
    "dpo": "whet.recipes.preference",
    "ipo": "whet.recipes.preference",
    "orpo": "whet.recipes.preference",
    "simpo": "whet.recipes.preference",
    "distill": "whet.recipes.distill",
    "mtp": "whet.recipes.mtp",
    "distrust": "whet.recipes.distrust",
    "classify": "whet.recipes.classify.classify",
    "grpo": "whet.recipes.grpo",
}
_WITHOUT_TEXTS = ("regression", "mix")  # rows of numbers, and several objectives on texts


def recipe_for(
    config: RunConfig, directory: Path, world: World = SOLO, given: Given | None = None
) -> "Recipe":
    """Return the recipe that runs a config."""
    if isinstance(config.objective, CustomObjective):
        own: Recipe = load_object("whet.recipes.custom:custom_recipe")(config, directory, world, given)
        return own
    recipe: Recipe = load_object(RECIPES[config.objective.kind])(config, directory, world, given)
    return recipe


def data_of(
    config: RunConfig, *, today: date | None = None, given: GivenRows = MappingProxyType({})
) -> "RunData | MixData":
    """Return what a config's data section names, or those of its parts."""
    if config.parts():
        data: MixData = load_object("whet.recipes.mix:MixData")(config, today=today, given=given)
        return data
    return RunData(config, needs_of(config.objective), today=today, given=given)


def needs_of(section: AnyObjective | MixObjective | CustomObjective) -> Needs:
    """Return what an objective reads from records."""
    if section.kind in _WITHOUT_TEXTS or isinstance(section, CustomObjective):
        return Needs()
    needs: Needs = load_object(f"{OBJECTIVES[section.kind]}:needs")(section)
    return needs


def build_objective(
    section: AnyObjective | MixObjective | CustomObjective, inputs: ObjectiveInputs
) -> Objective:
    """Return the objective that a config, or one part of a mix, describes."""
    if section.kind in _WITHOUT_TEXTS:
        raise ConfigError(f"objective.kind {section.kind} is not an objective on texts of its own")
    objective: Objective = load_object(f"{OBJECTIVES[section.kind]}:build_objective")(section, inputs)
    return objective
