"""Classification: a head reads one state of each text, and says which class or classes it belongs to."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from whet.data.batches import Batch
from whet.models.heads import ClassificationHead, pool
from whet.models.language_model import LanguageModel
from whet.objectives.confusion_matrix import confusion_matrix, confusion_metrics, mark_metrics
from whet.objectives.objective import Loss, Objective

EFFECTIVE_BETA = 0.999  # of the effective number of samples (arXiv 1901.05555)


class Classify(Objective):
    """The weighted loss of each text, summed, over the number of texts (or over their weights).

    Of one class: -sum_c q_c w_c (1 - p_c)^gamma ln p_c, where q is the smoothed target. Without a gamma that
    is torch's cross-entropy. Of several: binary cross-entropy, averaged over the classes; weights then
    multiply the term of the classes that a text has.
    """

    coefficients: Mapping[str, float] = {"texts": 0.0, "loss": 1.0}  # metrics are means over the first
    reads_lm_head = False

    def __init__(
        self,
        head: ClassificationHead,
        *,
        multi_label: bool = False,
        class_weights: Sequence[float] | None = None,
        normalise: Literal["samples", "weights"] = "samples",
        label_smoothing: float = 0.0,
        focal: float = 0.0,
    ) -> None:
        self.heads = head
        self.head = head
        self.classes = head.score.out_features
        self.multi_label = multi_label
        self.class_weights = torch.tensor(class_weights or [1.0] * self.classes, device="cpu")
        self.normalise = normalise
        self.label_smoothing = label_smoothing
        self.focal = focal

    def targets(self, batch: Batch) -> torch.Tensor:
        """The class of each text [texts], or its marks [texts, classes]."""
        values = batch.column("values")
        return values[:, : self.classes].float() if self.multi_label else values[:, 0].long()

    def weights(self, batch: Batch) -> dict[str, float]:
        """Texts, or the sum of the weights of their classes."""
        texts = float(len(batch.origins))
        if self.normalise == "samples":
            return {"texts": texts, "loss": texts}
        return {"texts": texts, "loss": float(self.class_weights[self.targets(batch)].double().sum())}

    def features(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """What the head reads: one state of each text."""
        return pool(
            model.hidden(batch.tokens, batch.positions, batch.layout()),
            batch.supervised_positions,
            batch.examples,
            texts=len(batch.origins),
            pooling=self.head.pooling,
        )

    def logits(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """[texts, classes]."""
        logits: torch.Tensor = self.head(self.features(model, batch))
        return logits

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The summed loss of a micro-batch's texts."""
        logits, targets = self.logits(model, batch), self.targets(batch)
        each = self._marked_losses(logits, targets) if self.multi_label else self._losses(logits, targets)
        metrics = {}
        if torch.is_grad_enabled():  # evaluations count over the whole set
            metrics["accuracy"] = self._right(logits.detach(), targets).float().sum()
        return Loss({"loss": each.sum()}, metrics, outputs=logits.detach())

    def _right(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.multi_label:
            return ((logits > 0) == (targets > 0.5)).all(1)
        return logits.argmax(1) == targets

    def _losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logp = logits.log_softmax(1)
        smooth = self.label_smoothing
        marks = torch.zeros_like(logp).scatter(1, targets[:, None], 1.0)
        wanted = marks * (1 - smooth) + smooth / self.classes
        terms = wanted * self.class_weights.to(logits.device) * -logp
        if self.focal:
            # at p = 1 a power below 1 has an infinite slope; what is smaller than this adds nothing
            terms = terms * (1 - logp.exp()).clamp(min=torch.finfo(logp.dtype).tiny) ** self.focal
        return terms.sum(1)

    def _marked_losses(self, logits: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        marks = marks * (1 - self.label_smoothing) + self.label_smoothing / 2
        has, has_not = -F.logsigmoid(logits), -F.logsigmoid(-logits)
        if self.focal:
            # powers of the other chance, by its logarithm: at 0 a power below 1 has an infinite slope
            has, has_not = has * (-self.focal * has_not).exp(), has_not * (-self.focal * has).exp()
        return (marks * self.class_weights.to(logits.device) * has + (1 - marks) * has_not).mean(1)

    def summarise(self, outputs: Sequence[torch.Tensor], batches: Sequence[Batch]) -> dict[str, float]:
        """What an evaluation says of all its texts together."""
        logits = torch.cat(list(outputs))
        targets = torch.cat([self.targets(batch) for batch in batches])
        if self.multi_label:
            return mark_metrics((targets > 0.5).numpy(), (logits > 0).numpy())
        matrix = confusion_matrix(targets.numpy(), logits.argmax(1).numpy(), self.classes)
        return {name: float(value) for name, value in confusion_metrics(matrix).items()}


def balanced_weights(
    counts: np.ndarray, kind: Literal["none", "inverse", "sqrt_inverse", "effective"]
) -> list[float]:
    """What a text of each class counts, from how many there are of each; the weights sum to their number.

    A class without a text is weighted as one with a single text.
    """
    counts = np.maximum(counts, 1).astype(np.float64)
    if kind == "none":
        weights = np.ones(len(counts))
    elif kind == "effective":
        weights = (1 - EFFECTIVE_BETA) / (1 - EFFECTIVE_BETA**counts)
    else:
        weights = counts.sum() / (len(counts) * counts)
        weights = np.sqrt(weights) if kind == "sqrt_inverse" else weights
    found: list[float] = (weights * len(counts) / weights.sum()).tolist()
    return found


def mark_weights(
    positive: np.ndarray, total: int, kind: Literal["none", "inverse", "sqrt_inverse"]
) -> list[float]:
    """Several classes a text: what the texts of each class count, against those that are not of it."""
    if kind == "none":
        return [1.0] * len(positive)
    weights = (total - positive) / np.maximum(positive, 1)
    weights = np.maximum(weights, 1 / total)
    found: list[float] = (np.sqrt(weights) if kind == "sqrt_inverse" else weights).tolist()
    return found
