"""Distillation: teachers asked during training, or their stored log-probabilities."""

from whet.config.objectives.distill import DistillObjective
from whet.data.run_data import Needs
from whet.models.language_model import LanguageModel
from whet.objectives.distill import Distillation
from whet.objectives.hidden_matching import HiddenMatching
from whet.objectives.objective import Objective
from whet.recipes.objective_inputs import ObjectiveInputs
from whet.recipes.reference_model import identity_of
from whet.recipes.teachers import find_teachings, load_teacher


def needs(section: DistillObjective) -> Needs:
    """Return what is read from records: nothing beyond their text."""
    return Needs()


def build_objective(section: DistillObjective, inputs: ObjectiveInputs) -> Objective:
    """Return the objective, with its teachers opened or their stored log-probabilities found."""
    name, vocab_size = str(inputs.model.name), inputs.model.vocab_size
    teachers: list[tuple[LanguageModel, float]] = []
    if section.offline is None:
        teachers = [(_teacher(teacher, inputs), weight) for teacher, weight in section.teachers]
    else:
        found = find_teachings(inputs.examples, section, student=name, vocab_size=vocab_size)
        for split, teachings in found.items():
            inputs.examples[split].sides.teachings = teachings
    return Distillation(
        teachers,
        temperature=section.temperature,
        alpha=section.alpha,
        divergence=section.divergence,
        taught=[weight for _, weight in section.teachers] if section.offline else (),
        matching=_matching(section, teachers[0][0], inputs) if section.hidden else None,
    )


def _matching(section: DistillObjective, teacher: LanguageModel, inputs: ObjectiveInputs) -> HiddenMatching:
    assert section.hidden is not None
    found = HiddenMatching(
        inputs.model, teacher, section.hidden.layers, kind=section.hidden.kind, weight=section.hidden.weight
    )
    if found.projections is not None:
        found.projections.to(inputs.model.device, inputs.precision.trained)
    return found


def _teacher(name: str, inputs: ObjectiveInputs) -> LanguageModel:
    teacher = load_teacher(
        name,
        dtype=inputs.precision.frozen,
        device=inputs.model.device,
        student=str(inputs.model.name),
        vocab_size=inputs.model.vocab_size,
        tokenizer=inputs.tokenizer,
    )
    inputs.identities[name] = identity_of(teacher)
    return teacher
