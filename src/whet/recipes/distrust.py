"""Distrust: token losses weighted by authority and provenance."""

import logging

import numpy as np
import torch

from whet.config.objectives.distrust import DistrustObjective
from whet.data.distrust_markers import DECLARED
from whet.data.run_data import Needs
from whet.data.sources.splits import learned
from whet.objectives.distrust_loss import COLUMNS, Distrust, calibrated_scale, squared_distance
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, ColumnShape, Recipe, StepShape

log = logging.getLogger("whet")


class DistrustRecipe(Recipe[DistrustObjective]):
    """A language model on texts with scores of their authority and provenance."""

    def needs(self) -> Needs:
        """Return what is read from records: two scores, and the fields they were made from."""
        return Needs(columns=COLUMNS, scored=DECLARED)

    def step_shape(self) -> StepShape:
        """Return the shape of texts with two scores."""
        return StepShape(columns={"values": ColumnShape("document", (len(COLUMNS),))})

    def objective(self, b: Build) -> Objective:
        """Return the objective, its scale calibrated on the training records where asked for."""
        section = self.section
        squares = torch.ones(1, dtype=torch.float64, device="cpu") if b.is_plan else self._squares(b)
        scale = section.scale
        if scale == "auto":
            scale = calibrated_scale(squares, alpha=section.alpha)
            if not b.is_plan:
                log.info("distrust: scale %.4g", scale)
        if section.mode == "additive" and not b.is_plan:
            log.warning(
                "distrust: the additive term depends on no weight of the model: it changes no gradient"
            )
        return Distrust(
            float(squares.mean()),
            mode=section.mode,
            strength=section.strength,
            alpha=section.alpha,
            scale=scale,
        )

    @staticmethod
    def _squares(b: Build) -> torch.Tensor:
        values = [np.array(each.store.values)[each.records, :2] for each in learned(b.data.examples)]
        # in fp32, as in the batches: what is 0 there is 0 here
        return squared_distance(torch.from_numpy(np.concatenate(values)).float()).double()
