"""Distrust: token losses weighted by the authority and provenance scores of each text."""

import logging

import numpy as np
import torch

from whet.config.objectives.distrust import DistrustObjective
from whet.data.distrust_markers import DECLARED_FIELDS
from whet.data.run_data import Needs
from whet.data.sources.splits import training_entries
from whet.objectives.distrust_loss import COLUMNS, Distrust, calibrate_scale, squared_distance
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, ColumnShape, Recipe, StepShape

log = logging.getLogger("whet")


class DistrustRecipe(Recipe[DistrustObjective]):
    """Trains a language model on texts that have scores for their authority and provenance."""

    def needs(self) -> Needs:
        """Return the two score columns, and the fields that the scores were computed from."""
        return Needs(columns=COLUMNS, scored_from=DECLARED_FIELDS, weights=False)

    def step_shape(self) -> StepShape:
        """Return the shape of a step, with a column of two scores per document."""
        return StepShape(columns={"values": ColumnShape("document", (len(COLUMNS),))})

    def objective(self, b: Build) -> Objective:
        """Return the objective; `scale: auto` is calibrated on the training records."""
        section = self.section
        squares = (
            torch.ones(1, dtype=torch.float64, device="cpu") if b.is_plan else self._squared_distances(b)
        )
        scale = section.scale
        if scale == "auto":
            scale = calibrate_scale(squares, alpha=section.alpha)
            if not b.is_plan:
                log.info("distrust: scale %.4g", scale)
        if section.mode == "additive" and not b.is_plan:
            log.warning(
                "distrust: the additive term does not depend on the model's weights and has no gradient, "
                "so it does not affect training; set objective.mode to weight"
            )
        return Distrust(
            float(squares.mean()),
            mode=section.mode,
            strength=section.strength,
            alpha=section.alpha,
            scale=scale,
        )

    @staticmethod
    def _squared_distances(b: Build) -> torch.Tensor:
        values = [
            np.array(examples.store.values)[examples.records, :2]
            for examples in training_entries(b.data.examples)
        ]
        # rounded to fp32 like the batches, so that the same scores give exactly 0 in both
        return squared_distance(torch.from_numpy(np.concatenate(values)).float()).double()
