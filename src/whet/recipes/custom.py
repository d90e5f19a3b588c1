"""Objectives and recipes of the user's own: `objective.kind: package.module:Class`, or an object."""

from pathlib import Path
from typing import Any

from whet.config.objectives.custom import CustomObjective
from whet.config.placeholder import parse_placeholder
from whet.config.run_config import RunConfig
from whet.data.run_data import RunData
from whet.error_boundary import reason
from whet.errors import ConfigError
from whet.given.given import Given
from whet.objectives.objective import Objective
from whet.parallel.process_group import SOLO, World
from whet.recipes.recipe import Recipe
from whet.recipes.text_recipe import TextRecipe
from whet.user_code import load_user_object

_OF_AN_OBJECTIVE = ("coefficients", "weights", "loss")


def load_custom(section: CustomObjective, given: Given) -> Objective | type[Recipe]:
    """Return the objective of a section, built with its keys, or the recipe class that it names.

    Args:
        section: `objective` of a config.
        given: what was passed from Python, for a kind that is a placeholder.

    Raises:
        ConfigError: it cannot be imported, is neither an objective nor a recipe, or refuses the keys.
    """
    named = _named(section, given)
    if isinstance(named, type) and issubclass(named, Recipe):
        return named
    built = _built(named, section) if isinstance(named, type) else named
    if not isinstance(named, type) and section.arguments:
        raise ConfigError(
            f"objective.kind {section.kind} is an object that is built already: it takes no keys "
            f"({', '.join(section.arguments)})",
            hint="pass its class, objective=CLASS, or leave the keys out",
        )
    if missing := [name for name in _OF_AN_OBJECTIVE if not hasattr(built, name)]:
        raise ConfigError(
            f"objective.kind {section.kind} is neither an objective nor a recipe: {type(built).__name__} has "
            f"no {', '.join(missing)}",
            hint="derive it from whet.Objective; docs/python.md has an example",
        )
    objective: Objective = built
    return objective


def _named(section: CustomObjective, given: Given) -> Any:  # Any: whatever a module calls by this name
    if parse_placeholder(section.kind) is not None:
        if given.objective is None:
            raise ConfigError(
                f"objective.kind {section.kind} stands for an object that is passed from Python, "
                "and it is not here",
                hint="whet.train and whet.resume take it: objective=...",
            )
        return given.objective
    try:
        return load_user_object(section.kind, what="class")
    except Exception as error:  # a module raises what it likes while it is imported
        raise ConfigError(f"objective.kind {section.kind} cannot be used: {reason(error)}") from error


def _built(kind: type, section: CustomObjective) -> Any:  # Any: whatever the class makes
    try:
        return kind(**section.arguments)
    except Exception as error:  # somebody else's code
        keys = ", ".join(section.arguments) or "none"
        raise ConfigError(
            f"objective.kind {section.kind} refuses its keys ({keys}): {reason(error)}"
        ) from error


def custom_recipe(
    config: RunConfig, directory: Path, world: World = SOLO, given: Given | None = None
) -> Recipe:
    """Return the recipe of a custom kind: its own, or the one of texts with its objective."""
    assert isinstance(config.objective, CustomObjective)
    custom = load_custom(config.objective, given or Given())
    if isinstance(custom, type):
        return custom(config, directory, world, given)
    recipe = CustomTextRecipe(config, directory, world, given)
    recipe.custom = custom
    return recipe


class CustomTextRecipe(TextRecipe):
    """A language model on texts, with an objective of the user's own."""

    custom: Objective

    def _objective_on(self, data: RunData) -> Objective:
        return self.custom
