"""Supervised fine-tuning: next-token cross-entropy on the supervised tokens."""

from whet.config.objectives.union import SFTObjective
from whet.data.run_data import Needs
from whet.objectives.objective import Objective
from whet.objectives.sft import SFT
from whet.recipes.objective_inputs import ObjectiveInputs


def needs(section: SFTObjective) -> Needs:
    """Return what is read from records: nothing beyond their text."""
    return Needs()


def build_objective(section: SFTObjective, inputs: ObjectiveInputs) -> Objective:
    """Return the objective."""
    return SFT()
