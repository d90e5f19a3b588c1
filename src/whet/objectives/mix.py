"""A weighted sum of objectives, each with its own batches."""

from collections.abc import Mapping

from torch import nn

from whet.data.batches import Batch
from whet.models.language_model import LanguageModel
from whet.objectives.objective import FrozenForward, Loss, Objective


class Mix(Objective):
    """Adds up objectives; `Batch.part` is the name of the objective that a batch belongs to.

    Terms are named `part.term`. Each is divided by the units of its own part, so the sum does not depend on
    how many batches each part has. Each part reports its loss as `part.loss` and its other metrics.

    Args:
        parts: The objectives by name.
        weights: The weight of each objective in the sum.
    """

    def __init__(self, parts: Mapping[str, Objective], weights: Mapping[str, float]) -> None:
        self._parts = dict(parts)
        self.coefficients = {
            f"{name}.{term}": weights[name] * coefficient
            for name, objective in parts.items()
            for term, coefficient in objective.coefficients.items()
        }
        self.reports = {
            f"{name}.{metric}": {f"{name}.{term}": share for term, share in shares.items()}
            for name, objective in parts.items()
            for metric, shares in {
                "loss": objective.coefficients,
                **objective.reports,
            }.items()
        }
        heads = {name: objective.heads for name, objective in parts.items() if objective.heads is not None}
        self.heads = nn.ModuleDict(heads) if heads else None

    @property
    def parts(self) -> Mapping[str, Objective]:
        """The objectives by name."""
        return self._parts

    def frozen_forwards(self, model: LanguageModel) -> list[FrozenForward]:
        """Return the frozen forward passes of all parts."""
        return [forward for part in self.parts.values() for forward in part.frozen_forwards(model)]

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the weights of the batch's part."""
        name, objective = self._part(batch)
        return {f"{name}.{term}": weight for term, weight in objective.weights(batch).items()}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the loss sums of the batch's part; its terms, except `loss`, are also metrics."""
        name, objective = self._part(batch)
        result = objective.loss(model, batch)
        sums = {f"{name}.{term}": value for term, value in result.sums.items()}
        first = next(iter(objective.coefficients))
        metrics = {f"{name}.{metric}": value for metric, value in result.metrics.items()}
        units = {f"{name}.{metric}": f"{name}.{result.units.get(metric, first)}" for metric in result.metrics}
        terms = {term: value for term, value in sums.items() if term != f"{name}.loss"}
        return Loss(sums, terms | metrics, {term: term for term in terms} | units)

    def _part(self, batch: Batch) -> tuple[str, Objective]:
        assert batch.part is not None
        return batch.part, self.parts[batch.part]
