"""Distrust: token losses weighted by authority and provenance."""

import logging

import numpy as np
import torch

from whet.config.objectives.distrust import DistrustObjective
from whet.data.distrust_markers import DECLARED
from whet.data.run_data import Needs
from whet.objectives.distrust_loss import COLUMNS, Distrust, calibrated_scale, squared_distance
from whet.objectives.objective import Objective
from whet.recipes.objective_inputs import ObjectiveInputs

log = logging.getLogger("whet")


def needs(section: DistrustObjective) -> Needs:
    """Return what is read from records: two scores, and the fields they were made from."""
    return Needs(columns=COLUMNS, scored=DECLARED)


def build_objective(section: DistrustObjective, inputs: ObjectiveInputs) -> Objective:
    """Return the objective, its scale calibrated on the training records where asked for."""
    values = [
        np.array(examples.store.values)[examples.records, :2] for examples in inputs.training_examples()
    ]
    # in fp32, as in the batches: what is 0 there is 0 here
    squares = squared_distance(torch.from_numpy(np.concatenate(values)).float()).double()
    scale = section.scale
    if scale == "auto":
        scale = calibrated_scale(squares, alpha=section.alpha)
        log.info("distrust: scale %.4g", scale)
    if section.mode == "additive":
        log.warning("distrust: the additive term depends on no weight of the model: it changes no gradient")
    return Distrust(
        float(squares.mean()),
        mode=section.mode,
        strength=section.strength,
        alpha=section.alpha,
        scale=scale,
    )
