"""Distillation from teachers that run during training, or from their stored log-probabilities."""

from collections.abc import Mapping

import torch

from whet.config.objectives.distill import DistillObjective
from whet.data.run_data import Needs, RunData
from whet.data.tokens.teacher_logprobs import TeacherLogprobs
from whet.models.language_model import LanguageModel
from whet.objectives.distill import Distillation
from whet.objectives.hidden_matching import HiddenMatching
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, ColumnShape, FrozenModel, Recipe, StepShape
from whet.recipes.teachers import open_teacher_logprobs


class DistillRecipe(Recipe[DistillObjective]):
    """Trains a language model on the token distributions of one or more teachers."""

    def needs(self) -> Needs:
        """Return the needs of text without loss weights, which the divergence does not use."""
        return Needs(weights=False)

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the teachers, or nothing if their log-probabilities are stored."""
        if self.section.offline is not None:
            return {}
        return {
            f"teacher {number}": FrozenModel(name, "objective.teacher")
            for number, (name, _) in enumerate(self.section.teachers)
        }

    def step_shape(self) -> StepShape:
        """Return the shape of a step, with columns for stored log-probabilities."""
        if self.section.offline is None:
            return StepShape()
        count, top_k = len(self.section.teachers), self.section.offline.top_k
        ids = ColumnShape("token", (count, top_k), torch.long)
        logprobs = ColumnShape("token", (count, top_k + 1))
        return StepShape(columns={"teacher_ids": ids, "teacher_logprobs": logprobs})

    def check_models(self, b: Build) -> None:
        """Raise an error for matched layers that the student or the teacher does not have."""
        self._build_matching(b)

    def check_examples(self, data: RunData, *, vocab_size: int) -> None:
        """Raise a DataError for examples without stored log-probabilities of the offline teachers."""
        self._open_stored(data, str(self.config.language_model), vocab_size)

    def prepare(self, b: Build) -> None:
        """Attach the log-probabilities that `whet teach` stored to the examples."""
        stored = self._open_stored(b.data, str(b.model.name), b.model.vocab_size)
        for split, logprobs in stored.items():
            b.data.examples[split].sides.teacher_logprobs = logprobs

    def _open_stored(self, data: RunData, student: str, vocab_size: int) -> dict[str, list[TeacherLogprobs]]:
        if self.section.offline is None:
            return {}
        return open_teacher_logprobs(data.examples, self.section, student=student, vocab_size=vocab_size)

    def objective(self, b: Build) -> Objective:
        """Return the distillation objective with its teachers."""
        section = self.section
        weights = [weight for _, weight in section.teachers]
        teachers = [model for model in b.frozen.values() if isinstance(model, LanguageModel)]
        return Distillation(
            list(zip(teachers, weights, strict=False)),
            temperature=section.temperature,
            alpha=section.alpha,
            divergence=section.divergence,
            offline_weights=weights if section.offline else (),
            matching=self._build_matching(b),
        )

    def _build_matching(self, b: Build) -> HiddenMatching | None:
        hidden, teacher = self.section.hidden, b.frozen.get("teacher 0")
        if hidden is None or not isinstance(teacher, LanguageModel):
            return None
        matching = HiddenMatching(b.model, teacher, hidden.layers, kind=hidden.kind, weight=hidden.weight)
        if matching.projections is not None:
            matching.projections.to(b.model.device, b.precision.trained)
        return matching
