"""Text classification: the recipe, the classification head and the class weights."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import numpy as np

from whet.config.objectives.classify import ClassifyObjective
from whet.data.class_balance import class_counts, describe_classes
from whet.data.class_labels import ClassLabels
from whet.data.run_data import Needs
from whet.data.sources.splits import training_entries
from whet.data.tokens.examples import StoredExamples
from whet.errors import ConfigError
from whet.models.heads import ClassificationHead
from whet.models.language_model import LanguageModel
from whet.objectives.classify import Classify, balanced_weights, multi_label_weights
from whet.recipes.classify.classifier_report import ClassificationReport, ClassificationReportCallback
from whet.recipes.model_setup import save_language_model
from whet.recipes.recipe import Build, ColumnShape, Recipe, StepShape
from whet.run_directory import HELD_OUT_FILE
from whet.training.callbacks import Callback
from whet.training.trainer import Trainer

log = logging.getLogger("whet")
UNBALANCED = 2.0  # ratio of the largest to the smallest class, above which `auto` weights classes


class ClassifyRecipe(Recipe[ClassifyObjective]):
    """Trains a language model with a classification head."""

    generates_text = False

    def needs(self) -> Needs:
        """Request labels, a held-out share of each class, and oversampling if it is configured."""
        section = self.section
        return Needs(
            labels=labels_of(section),
            valid_share=section.valid_share,
            oversample=section.oversample,
            weights=False,
        )

    def step_shape(self) -> StepShape:
        """Return the shape of a step, with a column of labels per document."""
        columns = len(self.section.names) if self.section.multi_label else 1
        return StepShape(columns={"values": ColumnShape("document", (columns,))})

    def objective(self, b: Build) -> Classify:
        """Return the objective with a new head and the class weights of the training records."""
        train = None if b.is_plan else training_entries(b.data.examples)
        head = self._trained_head() if self.config.method.continues and not b.is_plan else None
        return build_classify(self.section, b.model, train, seed=self.config.run.seed, head=head)

    def _trained_head(self) -> ClassificationHead | None:
        """Return the head of the classifier that method.continue trains further, or None if it has none."""
        from whet.model_io.load import adapter_directory
        from whet.recipes.classify.classifier_config import trained_head

        name = str(self.config.language_model)
        stored = trained_head(adapter_directory(name))
        if stored is None:
            log.info("head: new, because %s is not a classifier", name)
            return None
        section = self.section
        for key, before, now in (
            ("classes", stored.info.classes, section.names),
            ("multi_label", stored.info.multi_label, section.multi_label),
            ("pooling", stored.info.pooling, section.pooling),
            ("bias", stored.info.bias, section.bias),
        ):
            if before != now:
                raise ConfigError(f"objective.{key} is {now}, but the classifier {name} has {before}")
        return stored.head

    def callbacks(self, b: Build) -> list[Callback]:
        """Return the callback that fits the linear probe and writes the classification report."""
        return [ClassificationReportCallback(self._report(b))]

    def files(self, b: Build) -> dict[str, str]:
        """Return the default files, and the list of records that were held out for validation."""
        held_out = b.data.held_out
        held_out_file = {} if held_out is None else {HELD_OUT_FILE: json.dumps(held_out, indent=2) + "\n"}
        return {**super().files(b), **held_out_file}

    def save_final(self, b: Build, trainer: Trainer, path: Path) -> None:
        """Write the model with its head, which is calibrated first if the config asks for it."""
        save_language_model(self.config, b, path, head=self._report(b).calibrated_head())

    def restore_final(self, b: Build, path: Path) -> None:
        """Load the saved head, which may be calibrated."""
        self._report(b).load_saved_head(path)

    def _report(self, b: Build) -> ClassificationReport:
        assert isinstance(b.objective, Classify)
        return ClassificationReport(self.config, self.section, b, b.objective)


def labels_of(section: ClassifyObjective) -> ClassLabels:
    """Return the classes of an objective."""
    return ClassLabels(section.names, multi_label=section.multi_label)


def build_classify(
    section: ClassifyObjective,
    model: LanguageModel,
    train: Sequence[StoredExamples] | None,
    *,
    seed: int,
    head: ClassificationHead | None = None,
) -> Classify:
    """Return the objective with a new head and class weights.

    Args:
        section: The `objective` section of the config.
        model: The model that the head is attached to.
        train: The training examples, for class weights; None in plans.
        seed: The seed of a new head's initialization.
        head: A trained head to train further, instead of a new one.
    """
    names = section.names
    head = head or ClassificationHead(
        model.head().weight.shape[1], len(names), pooling=section.pooling, bias=section.bias
    ).initialise(seed)
    return Classify(
        head.to(model.device),
        multi_label=section.multi_label,
        class_weights=None if train is None else _class_weights(section, train),
        normalise=section.normalise,
        label_smoothing=section.label_smoothing,
        focal=section.focal,
    )


def _class_weights(section: ClassifyObjective, train: Sequence[StoredExamples]) -> list[float]:
    names, kind = section.names, section.class_weights
    counts = np.sum([class_counts(labels_of(section), examples) for examples in train], axis=0)
    log.info("classes: %s", describe_classes(names, counts))
    if absent := [name for name, count in zip(names, counts, strict=True) if not count]:
        log.warning("no training record has the class %s", ", ".join(absent))
    if isinstance(kind, list):
        return kind
    if section.multi_label:
        weighting = cast(Literal["none", "inverse", "sqrt_inverse"], "none" if kind == "auto" else kind)
        weights = multi_label_weights(counts, sum(map(len, train)), weighting)
    else:
        ratio = counts.max() / max(1, counts.min())
        unbalanced = ratio > UNBALANCED and not section.oversample
        if kind == "auto":
            kind = "sqrt_inverse" if unbalanced else "none"
            if unbalanced:
                log.info(
                    "class weights: sqrt_inverse, because the largest class has %.1f times as many texts as "
                    "the smallest",
                    ratio,
                )
        weights = balanced_weights(counts, kind)
    if kind not in ("auto", "none"):
        log.info(
            "class weights: %s", ", ".join(f"{name} {w:.3g}" for name, w in zip(names, weights, strict=True))
        )
    return weights
