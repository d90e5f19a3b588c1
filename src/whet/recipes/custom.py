"""Objectives and recipes of the user's own: `objective.kind: package.module:Class`, or an object."""

from typing import Any

from whet.config.objectives.custom import CustomObjective
from whet.config.placeholder import parse_placeholder
from whet.config.run_config import RunConfig
from whet.error_boundary import reason
from whet.errors import ConfigError
from whet.given.given import Given
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, Recipe
from whet.user_code import load_user_object


def load_custom(section: CustomObjective, given: Given) -> Objective | type[Recipe[Any]]:  # Any: as below
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
    if not isinstance(built, Objective):
        raise ConfigError(
            f"objective.kind {section.kind} is neither an objective nor a recipe: {type(built).__name__}",
            hint="derive it from whet.Objective; docs/python.md has an example",
        )
    return built


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


def custom_recipe(config: RunConfig, given: Given) -> Recipe[Any]:  # Any: the section of a custom kind
    """Return the recipe of a custom kind: its own, or the one of texts with its objective."""
    assert isinstance(config.objective, CustomObjective)  # see recipe_for
    custom = load_custom(config.objective, given)
    if isinstance(custom, type):
        return custom(config, config.objective, given)
    return CustomRecipe(config, config.objective, given, custom)


class CustomRecipe(Recipe[CustomObjective]):
    """A language model on texts, with an objective of the user's own."""

    def __init__(
        self, config: RunConfig, section: CustomObjective, given: Given, objective: Objective
    ) -> None:
        super().__init__(config, section, given)
        self._objective = objective

    def objective(self, b: Build) -> Objective:
        """Return the user's objective."""
        return self._objective
