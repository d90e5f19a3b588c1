"""Multi-token prediction: additional heads that predict later tokens."""

import logging

from whet.config.objectives.mtp import MTPObjective
from whet.errors import DataError
from whet.models.decoder import Decoder
from whet.models.mtp import mtp_block_spec
from whet.objectives.mtp import MultiTokenPrediction
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, Recipe

log = logging.getLogger("whet")


class MTPRecipe(Recipe[MTPObjective]):
    """Trains a language model on text, together with heads that predict later tokens."""

    def prepare(self, b: Build) -> None:
        """Raise a DataError if all texts of a split are too short for the last head."""
        count = self.section.n_predict
        for name, examples in b.data.examples.items():
            longest = int(examples.sides.lengths.max()) + 1
            if longest < count + 2:
                raise DataError(
                    f"{name}: the longest text has {longest} tokens, but the last of "
                    f"{count} heads needs {count + 2}",
                    hint="lower objective.n_predict, or train on longer texts",
                )

    def objective(self, b: Build) -> Objective:
        """Return the MTP objective with new heads."""
        section = self.section
        block = mtp_block_spec(b.model, section)
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
                else "of whet's default architecture",
            )
        return objective
