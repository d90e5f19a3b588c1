"""Supervised fine-tuning: next-token cross-entropy on the supervised tokens."""

from whet.config.objectives.union import SFTObjective
from whet.objectives.objective import Objective
from whet.objectives.sft import SFT
from whet.recipes.recipe import Build, Recipe


class SFTRecipe(Recipe[SFTObjective]):
    """Trains a language model on text and conversations."""

    def objective(self, b: Build) -> Objective:
        """Return the SFT objective."""
        return SFT()
