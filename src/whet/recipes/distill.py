"""Distillation: teachers asked during training, or their stored log-probabilities."""

from collections.abc import Mapping

import torch

from whet.config.objectives.distill import DistillObjective
from whet.data.run_data import RunData
from whet.data.tokens.teacher_logprobs import Teaching
from whet.models.language_model import LanguageModel
from whet.objectives.distill import Distillation
from whet.objectives.hidden_matching import HiddenMatching
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, ColumnShape, FrozenModel, Recipe, StepShape
from whet.recipes.teachers import find_teachings

_TAUGHT = 64  # stored tokens of a teacher, where nothing says how many


class DistillRecipe(Recipe[DistillObjective]):
    """A language model on texts, and what teachers make of them."""

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the teachers, unless they were asked before the run."""
        if self.section.offline is not None:
            return {}
        return {
            f"teacher {number}": FrozenModel(name, "objective.teacher")
            for number, (name, _) in enumerate(self.section.teachers)
        }

    def step_shape(self) -> StepShape:
        """Return the shape of texts, with the stored log-probabilities of teachers."""
        if self.section.offline is None:
            return StepShape()
        count = len(self.section.teachers)
        ids = ColumnShape("token", (count, _TAUGHT), torch.long)
        return StepShape(
            columns={"taught_ids": ids, "taught_logprobs": ColumnShape("token", (count, _TAUGHT + 1))}
        )

    def check_models(self, b: Build) -> None:
        """Refuse layers that the student or the teacher does not have."""
        self._matching(b)

    def check_examples(self, data: RunData, *, vocab_size: int) -> None:
        """Refuse examples that offline teachers were not asked about."""
        self._stored(data, str(self.config.language_model), vocab_size)

    def prepare(self, b: Build) -> None:
        """Find what `whet teach` stored."""
        stored = self._stored(b.data, str(b.model.name), b.model.vocab_size)
        for split, teachings in stored.items():
            b.data.examples[split].sides.teachings = teachings

    def _stored(self, data: RunData, student: str, vocab_size: int) -> dict[str, list[Teaching]]:
        if self.section.offline is None:
            return {}
        return find_teachings(data.examples, self.section, student=student, vocab_size=vocab_size)

    def objective(self, b: Build) -> Objective:
        """Return the objective with its teachers."""
        section = self.section
        weights = [weight for _, weight in section.teachers]
        teachers = [model for model in b.frozen.values() if isinstance(model, LanguageModel)]
        return Distillation(
            list(zip(teachers, weights, strict=False)),
            temperature=section.temperature,
            alpha=section.alpha,
            divergence=section.divergence,
            taught=weights if section.offline else (),
            matching=None if b.is_plan else self._matching(b),
        )

    def _matching(self, b: Build) -> HiddenMatching | None:
        hidden, teacher = self.section.hidden, b.frozen.get("teacher 0")
        if hidden is None or not isinstance(teacher, LanguageModel):
            return None
        matching = HiddenMatching(b.model, teacher, hidden.layers, kind=hidden.kind, weight=hidden.weight)
        if matching.projections is not None:
            matching.projections.to(b.model.device, b.precision.trained)
        return matching
