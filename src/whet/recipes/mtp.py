"""Multi-token prediction: heads beside the model."""

import logging

from whet.config.objectives.mtp import MTPObjective
from whet.errors import DataError
from whet.models.decoder import Decoder
from whet.models.mtp import block_of
from whet.objectives.mtp import MultiTokenPrediction
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, Recipe

log = logging.getLogger("whet")


class MTPRecipe(Recipe[MTPObjective]):
    """A language model on texts, with heads that predict further tokens."""

    def prepare(self, b: Build) -> None:
        """Refuse texts too short for the last head."""
        count = self.section.n_predict
        for name, examples in b.data.examples.items():
            longest = int(examples.sides.lengths.max()) + 1
            if longest < count + 2:
                raise DataError(
                    f"{name}: the longest text has {longest} tokens, and the last of "
                    f"{count} heads needs {count + 2}",
                    hint="lower objective.n_predict, or train on longer texts",
                )

    def objective(self, b: Build) -> Objective:
        """Return the objective with new heads."""
        section = self.section
        block = block_of(b.model, section)
        objective = MultiTokenPrediction(b.model, section.n_predict, section.weight, block)
        heads = objective.heads.to(b.precision.trained)
        if not b.is_plan:
            log.info(
                "heads: %d, with %s parameters, each with a layer %s",
                len(heads),
                f"{sum(p.numel() for p in heads.parameters()):,}",
                "as in objective.block"
                if block is not None
                else "like the model's last"
                if isinstance(b.model, Decoder)
                else "of whet's own",
            )
        return objective
