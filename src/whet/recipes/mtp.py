"""Multi-token prediction: heads beside the model."""

import logging

from whet.config.objectives.mtp import MTPObjective
from whet.data.run_data import Needs
from whet.errors import DataError
from whet.models.decoder import Decoder
from whet.models.mtp import block_of
from whet.objectives.mtp import MultiTokenPrediction
from whet.objectives.objective import Objective
from whet.recipes.objective_inputs import ObjectiveInputs

log = logging.getLogger("whet")


def needs(section: MTPObjective) -> Needs:
    """Return what is read from records: nothing beyond their text."""
    return Needs()


def build_objective(section: MTPObjective, inputs: ObjectiveInputs) -> Objective:
    """Return the objective with new heads; refuse texts too short for the last of them."""
    for name, examples in inputs.examples.items():
        longest = int(examples.sides.lengths.max()) + 1
        if longest < section.n_predict + 2:
            raise DataError(
                f"{name}: the longest text has {longest} tokens, and the last of "
                f"{section.n_predict} heads needs {section.n_predict + 2}",
                hint="lower objective.n_predict, or train on longer texts",
            )
    block = block_of(inputs.model, section)
    objective = MultiTokenPrediction(inputs.model, section.n_predict, section.weight, block)
    heads = objective.heads.to(inputs.precision.trained)
    log.info(
        "heads: %d, with %s parameters, each with a layer %s",
        len(heads),
        f"{sum(p.numel() for p in heads.parameters()):,}",
        "as in objective.block"
        if block is not None
        else "like the model's last"
        if isinstance(inputs.model, Decoder)
        else "of whet's own",
    )
    return objective
