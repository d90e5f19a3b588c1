"""Distillation: a student learns what a teacher thinks of every token, not only which one came."""

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
    """T^2 * KL(teacher || student) of softened logits [..., V], a mean over positions (arXiv 1503.02531)."""
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
    """alpha * T^2 * KL(teacher || student) + (1 - alpha) * CE over tokens [B, S], in chunks.

    No gradient reaches the teacher; with `alpha` 1 or more the hard term is left out.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    hidden = student.hidden(inputs).flatten(0, 1)
    with torch.no_grad():
        wanted = teacher.hidden(inputs).flatten(0, 1)
    soft = linear_kl(hidden, student.head(), wanted, teacher.head(), temperature=temperature)
    loss = alpha * temperature**2 * soft / len(targets)
    if alpha < 1:
        loss = loss + (1 - alpha) * linear_cross_entropy(hidden, student.head(), targets) / len(targets)
    return loss


class Distillation(Objective):
    """alpha * T^2 * divergence + (1 - alpha) * CE, both means over the supervised tokens.

    With `matching`, the distance of hidden states from those of the one teacher is added, as weighted there.
    """

    likelihood = "cross_entropy"

    def __init__(
        self,
        teachers: Sequence[tuple[LanguageModel, float]],
        *,
        temperature: float = 4.0,
        alpha: float = 0.7,
        divergence: Divergence = "forward",
        taught: Sequence[float] = (),
        matching: HiddenMatching | None = None,
    ) -> None:
        """`taught` are the weights of teachers who are not here, and whose words the batches bring."""
        if not teachers and not taught:
            raise ConfigError("distillation needs a teacher")
        total = sum(weight for _, weight in teachers) + sum(taught)
        self.teachers = [
            (teacher.eval().requires_grad_(False), weight / total) for teacher, weight in teachers
        ]
        self.taught = [weight / total for weight in taught]
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
        """Return those of the teachers that are here."""
        return [FrozenForward(teacher) for teacher, _ in self.teachers]

    def weights(self, batch: Batch) -> dict[str, float]:
        """Supervised tokens."""
        return dict.fromkeys(self.coefficients, float(batch.supervised))

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sums of this micro-batch."""
        matching, chosen = self.matching, batch.supervised_positions
        with layer_outputs(model, matching.student_layers if matching else ()) as own:
            hidden = model.hidden(batch.tokens, batch.positions, batch.layout()).flatten(0, 1)
        hidden = hidden.index_select(0, chosen)
        head, targets = model.head(), batch.supervised_targets
        soft = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for teacher, weight in self.teachers:
            with (
                torch.no_grad(),
                layer_outputs(teacher, matching.teacher_layers if matching else ()) as theirs,
            ):
                wanted = teacher.hidden(batch.tokens, batch.positions, batch.layout()).flatten(0, 1)
            soft = soft + weight * linear_kl(
                hidden,
                head,
                wanted.index_select(0, chosen),
                teacher.head(),
                temperature=self.temperature,
                divergence=self.divergence,
            )
        for teacher_index, weight in enumerate(self.taught):
            soft = soft + weight * linear_topk_kl(
                hidden,
                head,
                batch.column("taught_ids")[:, teacher_index],
                batch.column("taught_logprobs")[:, teacher_index],
                temperature=self.temperature,
                divergence=self.divergence,
            )
        sums = {"soft_loss": soft}
        metrics = {}
        if "hard_loss" in self.coefficients:
            sums["hard_loss"] = linear_cross_entropy(hidden, head, targets)
            metrics["cross_entropy"] = sums["hard_loss"].detach()
        elif not torch.is_grad_enabled():  # evaluations also say what the model makes of the text
            metrics["cross_entropy"] = linear_cross_entropy(hidden, head, targets)
        if matching is not None:
            sums["hidden_loss"] = matching.distance(own, theirs, chosen)
            metrics["hidden_loss"] = sums["hidden_loss"].detach()
        return Loss(sums, metrics)
