"""Custom objectives and recipes: `objective.kind: package.module:Class`, or an object from Python."""

from typing import Any

from whet.config.objectives.custom import CustomObjective
from whet.config.placeholder import parse_placeholder
from whet.config.run_config import RunConfig
from whet.error_boundary import error_text
from whet.errors import ConfigError
from whet.given.given import Given
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, Recipe
from whet.user_code import load_user_object


def load_custom(section: CustomObjective, given: Given) -> Objective | type[Recipe[Any]]:  # Any: as below
    """Return the custom objective, built with the keys of its section, or the custom recipe class.

    Args:
        section: The `objective` section of a config.
        given: Objects from Python, one of which is the objective if the kind is a placeholder.

    Raises:
        ConfigError: The class cannot be imported, is neither an objective nor a recipe, or does not accept
            the keys.
    """
    class_or_object = _load(section, given)
    if isinstance(class_or_object, type) and issubclass(class_or_object, Recipe):
        return class_or_object
    if isinstance(class_or_object, type):
        objective = _construct(class_or_object, section)
    else:
        objective = class_or_object
        if section.arguments:
            raise ConfigError(
                f"objective.kind {section.kind} is an object, not a class, and cannot accept keys "
                f"({', '.join(section.arguments)})",
                hint="pass its class (objective=CLASS), or remove the keys",
            )
    if not isinstance(objective, Objective):
        raise ConfigError(
            f"objective.kind {section.kind} is neither an objective nor a recipe: {type(objective).__name__}",
            hint="derive it from whet.Objective; docs/python.md has an example",
        )
    return objective


def _load(section: CustomObjective, given: Given) -> Any:  # Any: any object of the user's module
    if parse_placeholder(section.kind) is not None:
        if given.objective is None:
            raise ConfigError(
                f"objective.kind {section.kind} is a placeholder for a Python object, "
                "and no object was passed",
                hint="pass it to whet.train or whet.resume: objective=...",
            )
        return given.objective
    try:
        return load_user_object(section.kind, kind="class")
    except Exception as error:  # importing the user's module can raise anything
        raise ConfigError(f"objective.kind {section.kind} cannot be used: {error_text(error)}") from error


def _construct(objective_class: type, section: CustomObjective) -> Any:  # Any: an instance of a user's class
    try:
        return objective_class(**section.arguments)
    except Exception as error:  # the user's constructor can raise anything
        keys = ", ".join(section.arguments) or "none"
        raise ConfigError(
            f"objective.kind {section.kind} does not accept its keys ({keys}): {error_text(error)}"
        ) from error


def custom_recipe(config: RunConfig, given: Given) -> Recipe[Any]:  # Any: the section of a custom kind
    """Return the custom recipe, or for a custom objective the default recipe with that objective."""
    assert isinstance(config.objective, CustomObjective)  # see recipe_for
    custom = load_custom(config.objective, given)
    if isinstance(custom, type):
        return custom(config, config.objective, given)
    return CustomRecipe(config, config.objective, given, custom)


class CustomRecipe(Recipe[CustomObjective]):
    """Trains a language model on text with a custom objective."""

    def __init__(
        self, config: RunConfig, section: CustomObjective, given: Given, objective: Objective
    ) -> None:
        super().__init__(config, section, given)
        self._objective = objective

    def objective(self, b: Build) -> Objective:
        """Return the user's objective."""
        return self._objective
