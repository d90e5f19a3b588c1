"""Classification: a head predicts the class or classes of a text from one hidden state."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from whet.data.batches import Batch
from whet.models.heads import ClassificationHead, pool_hidden_states
from whet.models.language_model import LanguageModel
from whet.objectives.confusion_matrix import confusion_matrix, confusion_metrics, multi_label_metrics
from whet.objectives.objective import Loss, Objective

EFFECTIVE_BETA = 0.999  # for the effective number of samples (arXiv 1901.05555)


class Classify(Objective):
    """Weighted classification loss, averaged over texts or over their weights.

    For single-label targets the loss is -sum_c q_c w_c (1 - p_c)^gamma ln p_c, where q is the smoothed
    target; with gamma 0 this is torch's cross-entropy. For multi-label targets it is the binary cross-entropy
    averaged over classes, and weights multiply the positive terms.

    Args:
        head: The classification head.
        multi_label: Whether a text may have several classes or none.
        class_weights: The weight of each class; by default 1.
        normalise: Whether the sum is divided by the number of samples or by their weights.
        label_smoothing: The share of the target that is spread over all classes.
        focal: The gamma of the focal loss; 0 for none.
    """

    coefficients: Mapping[str, float] = {
        "texts": 0.0,
        "loss": 1.0,
    }  # metrics are averaged over the units of the first term
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
        """Return the class of each text [texts], or multi-label targets [texts, classes]."""
        values = batch.column("values")
        return values[:, : self.classes].float() if self.multi_label else values[:, 0].long()

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of texts, and for the loss that number or the sum of their class weights."""
        texts = float(len(batch.origins))
        if self.normalise == "samples":
            return {"texts": texts, "loss": texts}
        return {"texts": texts, "loss": float(self.class_weights[self.targets(batch)].double().sum())}

    def features(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """Return the pooled hidden state of each text, which the head reads [texts, d_model]."""
        return pool_hidden_states(
            model.hidden(batch.tokens, batch.positions, batch.layout()),
            batch.supervised_positions,
            batch.examples,
            texts=len(batch.origins),
            pooling=self.head.pooling,
        )

    def logits(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """Return the logits of the head [texts, classes]."""
        logits: torch.Tensor = self.head(self.features(model, batch))
        return logits

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Return the summed loss of the texts of a micro-batch."""
        logits, targets = self.logits(model, batch), self.targets(batch)
        losses = (
            self._multi_label_losses(logits, targets)
            if self.multi_label
            else self._single_label_losses(logits, targets)
        )
        metrics = {}
        if torch.is_grad_enabled():  # evaluations compute it over the whole split
            metrics["accuracy"] = self._is_correct(logits.detach(), targets).float().sum()
        return Loss({"loss": losses.sum()}, metrics, outputs=logits.detach())

    def _is_correct(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.multi_label:
            return ((logits > 0) == (targets > 0.5)).all(1)
        return logits.argmax(1) == targets

    def _single_label_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logp = logits.log_softmax(1)
        smoothing = self.label_smoothing
        one_hot = torch.zeros_like(logp).scatter(1, targets[:, None], 1.0)
        smoothed = one_hot * (1 - smoothing) + smoothing / self.classes
        terms = smoothed * self.class_weights.to(logits.device) * -logp
        if self.focal:
            # at p = 1 a power below 1 has an infinite derivative; smaller values do not change the sum
            terms = terms * (1 - logp.exp()).clamp(min=torch.finfo(logp.dtype).tiny) ** self.focal
        return terms.sum(1)

    def _multi_label_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / 2
        positive, negative = -F.logsigmoid(logits), -F.logsigmoid(-logits)
        if self.focal:
            # (1 - p)^gamma from its logarithm, because at 0 a power below 1 has an infinite derivative
            positive, negative = (
                positive * (-self.focal * negative).exp(),
                negative * (-self.focal * positive).exp(),
            )
        weights = self.class_weights.to(logits.device)
        return (targets * weights * positive + (1 - targets) * negative).mean(1)

    def summarise(self, outputs: Sequence[torch.Tensor], batches: Sequence[Batch]) -> dict[str, float]:
        """Return the classification metrics of an evaluation over all its texts."""
        logits = torch.cat(list(outputs))
        targets = torch.cat([self.targets(batch) for batch in batches])
        if self.multi_label:
            return multi_label_metrics((targets > 0.5).numpy(), (logits > 0).numpy())
        matrix = confusion_matrix(targets.numpy(), logits.argmax(1).numpy(), self.classes)
        return {name: float(value) for name, value in confusion_metrics(matrix).items()}


def balanced_weights(
    counts: np.ndarray, kind: Literal["none", "inverse", "sqrt_inverse", "effective"]
) -> list[float]:
    """Return the weight of each class from the number of its texts; the mean weight is 1.

    A class without texts is weighted like one with a single text.
    """
    counts = np.maximum(counts, 1).astype(np.float64)
    if kind == "none":
        weights = np.ones(len(counts))
    elif kind == "effective":
        weights = (1 - EFFECTIVE_BETA) / (1 - EFFECTIVE_BETA**counts)
    else:
        weights = counts.sum() / (len(counts) * counts)
        weights = np.sqrt(weights) if kind == "sqrt_inverse" else weights
    normalized: list[float] = (weights * len(counts) / weights.sum()).tolist()
    return normalized


def multi_label_weights(
    positive: np.ndarray, total: int, kind: Literal["none", "inverse", "sqrt_inverse"]
) -> list[float]:
    """Return the weights of positive targets of multi-label classes, relative to negative ones.

    Args:
        positive: The number of texts that have each class.
        total: The number of texts.
        kind: How the weights depend on the ratio of negative to positive texts.
    """
    if kind == "none":
        return [1.0] * len(positive)
    weights = (total - positive) / np.maximum(positive, 1)
    weights = np.maximum(weights, 1 / total)
    scaled: list[float] = (np.sqrt(weights) if kind == "sqrt_inverse" else weights).tolist()
    return scaled
