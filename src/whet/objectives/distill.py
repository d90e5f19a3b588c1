"""Distillation: train a student on the token distributions of one or more teachers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from whet.data.batches import Batch
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel
from whet.objectives.hidden_matching import HiddenMatching, layer_outputs
from whet.objectives.objective import FrozenForward, Loss, Objective
from whet.ops.cross_entropy import linear_cross_entropy
from whet.ops.kl_divergence import Divergence, linear_kl, linear_topk_kl


def soft_target_loss(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float = 4.0
) -> torch.Tensor:
    """Return T^2 * KL(teacher || student) of softened logits, averaged over positions (arXiv 1503.02531).

    Args:
        student_logits: Logits of the student [..., V].
        teacher_logits: Logits of the teacher [..., V]; they get no gradient.
        temperature: T, which both logits are divided by.
    """
    student = (student_logits / temperature).log_softmax(-1).flatten(0, -2)
    teacher = (teacher_logits.detach() / temperature).log_softmax(-1).flatten(0, -2)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def distillation_loss(
    student: LanguageModel,
    teacher: LanguageModel,
    tokens: torch.Tensor,
    temperature: float = 4.0,
    alpha: float = 0.7,
) -> torch.Tensor:
    """Return alpha * T^2 * KL(teacher || student) + (1 - alpha) * cross-entropy, averaged over positions.

    Logits are computed in chunks.

    Args:
        student: The model to train.
        teacher: The teacher, which gets no gradient.
        tokens: Token ids [B, S].
        temperature: T, which both logits are divided by.
        alpha: The weight of the teacher; with 1 or more the cross-entropy is left out.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    hidden = student.hidden(inputs).flatten(0, 1)
    with torch.no_grad():
        teacher_hidden = teacher.hidden(inputs).flatten(0, 1)
    soft = linear_kl(hidden, student.head(), teacher_hidden, teacher.head(), temperature=temperature)
    loss = alpha * temperature**2 * soft / len(targets)
    if alpha < 1:
        loss = loss + (1 - alpha) * linear_cross_entropy(hidden, student.head(), targets) / len(targets)
    return loss


class Distillation(Objective):
    """Distillation loss: alpha * T^2 * divergence + (1 - alpha) * cross-entropy over supervised tokens.

    Args:
        teachers: Teachers that run in each step, and their weights. They are frozen.
        temperature: T, which all logits are divided by.
        alpha: The weight of the teachers; with 1 or more the cross-entropy is left out.
        divergence: The divergence between student and teacher.
        offline_weights: The weights of teachers whose log-probabilities are stored in the batches.
        matching: Adds the distance to the hidden states of a single teacher, with its own weight.
    """

    likelihood = "cross_entropy"

    def __init__(
        self,
        teachers: Sequence[tuple[LanguageModel, float]],
        *,
        temperature: float = 4.0,
        alpha: float = 0.7,
        divergence: Divergence = "forward",
        offline_weights: Sequence[float] = (),
        matching: HiddenMatching | None = None,
    ) -> None:
        if not teachers and not offline_weights:
            raise ConfigError("distillation needs at least one teacher")
        total = sum(weight for _, weight in teachers) + sum(offline_weights)
        self.teachers = [
            (teacher.eval().requires_grad_(False), weight / total) for teacher, weight in teachers
        ]
        self.offline_weights = [weight / total for weight in offline_weights]
        self.matching = matching
        self.heads = None if matching is None else matching.projections
        self.temperature = temperature
        self.divergence: Divergence = divergence
        self.coefficients = {
            "soft_loss": alpha * temperature**2,
            **({"hard_loss": 1 - alpha} if alpha < 1 else {}),
            **({"hidden_loss": matching.weight} if matching is not None else {}),
        }

    def frozen_forwards(self, model: LanguageModel) -> list[FrozenForward]:
        """Return the forward passes of the teachers that run in each step."""
        return [FrozenForward(teacher) for teacher, _ in self.teachers]

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of supervised tokens for every term."""
        return dict.fromkeys(self.coefficients, float(batch.supervised))

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the loss sums of this micro-batch."""
        matching, supervised = self.matching, batch.supervised_positions
        with layer_outputs(model, matching.student_layers if matching else ()) as student_states:
            hidden = model.hidden(batch.tokens, batch.positions, batch.layout()).flatten(0, 1)
        hidden = hidden.index_select(0, supervised)
        head, targets = model.head(), batch.supervised_targets
        soft = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for teacher, weight in self.teachers:
            with (
                torch.no_grad(),
                layer_outputs(teacher, matching.teacher_layers if matching else ()) as teacher_states,
            ):
                teacher_hidden = teacher.hidden(batch.tokens, batch.positions, batch.layout()).flatten(0, 1)
            soft = soft + weight * linear_kl(
                hidden,
                head,
                teacher_hidden.index_select(0, supervised),
                teacher.head(),
                temperature=self.temperature,
                divergence=self.divergence,
            )
        for teacher_index, weight in enumerate(self.offline_weights):
            soft = soft + weight * linear_topk_kl(
                hidden,
                head,
                batch.column("teacher_ids")[:, teacher_index],
                batch.column("teacher_logprobs")[:, teacher_index],
                temperature=self.temperature,
                divergence=self.divergence,
            )
        sums = {"soft_loss": soft}
        metrics = {}
        if "hard_loss" in self.coefficients:
            sums["hard_loss"] = linear_cross_entropy(hidden, head, targets)
            metrics["cross_entropy"] = sums["hard_loss"].detach()
        elif not torch.is_grad_enabled():  # evaluations also report the cross-entropy
            metrics["cross_entropy"] = linear_cross_entropy(hidden, head, targets)
        if matching is not None:
            sums["hidden_loss"] = matching.distance(student_states, teacher_states, supervised)
            metrics["hidden_loss"] = sums["hidden_loss"].detach()
        return Loss(sums, metrics)
