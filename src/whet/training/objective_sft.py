"""Supervised fine-tuning: next-token cross-entropy on the supervised tokens."""

from whet.config.objectives import SFTObjective
from whet.objectives.base import Objective
from whet.objectives.sft import SFT
from whet.training.objective_inputs import ObjectiveInputs
from whet.training.run_data import Needs


def needs(section: SFTObjective) -> Needs:
    """Return what is read from records: nothing beyond their text."""
    return Needs()


def build_objective(section: SFTObjective, inputs: ObjectiveInputs) -> Objective:
    """Return the objective."""
    return SFT()
