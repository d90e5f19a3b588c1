"""A weighted sum of objectives, each on its own batches."""

from collections.abc import Mapping

from torch import nn

from whet.data.batches import Batch
from whet.models.language_model import LanguageModel
from whet.objectives.objective import FrozenForward, Loss, Objective


class Mix(Objective):
    """Adds up objectives; a batch says by `part` whose it is.

    A term is called `part.term`, and is divided by the units of its own part only, so that the sum is that of
    the parts' own losses however many batches each of them has. A part reports what it would alone: its loss
    as `part.loss`, and its other metrics.
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
        """The objectives by the name of their part."""
        return self._parts

    def frozen_forwards(self, model: LanguageModel) -> list[FrozenForward]:
        """Return those of the parts."""
        return [forward for part in self.parts.values() for forward in part.frozen_forwards(model)]

    def weights(self, batch: Batch) -> dict[str, float]:
        """Those of the batch's part."""
        name, objective = self._part(batch)
        return {f"{name}.{term}": weight for term, weight in objective.weights(batch).items()}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sums of the batch's part; each of its terms is also a metric, but one called as its loss."""
        name, objective = self._part(batch)
        found = objective.loss(model, batch)
        sums = {f"{name}.{term}": value for term, value in found.sums.items()}
        first = next(iter(objective.coefficients))
        metrics = {f"{name}.{metric}": value for metric, value in found.metrics.items()}
        units = {f"{name}.{metric}": f"{name}.{found.units.get(metric, first)}" for metric in found.metrics}
        terms = {term: value for term, value in sums.items() if term != f"{name}.loss"}
        return Loss(sums, terms | metrics, {term: term for term in terms} | units)

    def _part(self, batch: Batch) -> tuple[str, Objective]:
        assert batch.part is not None
        return batch.part, self.parts[batch.part]
