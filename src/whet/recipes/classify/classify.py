"""Classification: labels, the head, class weights, and the recipe that trains them."""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Literal, cast

import numpy as np

from whet.config.objectives.classify import ClassifyObjective
from whet.data.class_balance import class_counts, describe_classes
from whet.data.class_labels import Labels
from whet.data.run_data import Needs, RunData
from whet.data.tokens.examples import StoredExamples
from whet.model_io.formats.classifier_head import StoredHead
from whet.models.heads import ClassificationHead
from whet.models.language_model import LanguageModel
from whet.objectives.classify import Classify, balanced_weights, mark_weights
from whet.recipes.classify.classifier_report import ClassificationEnd
from whet.recipes.objective_inputs import ObjectiveInputs
from whet.recipes.text_recipe import TextRecipe
from whet.run_directory import HELD_OUT_FILE
from whet.training.callbacks import Callback

log = logging.getLogger("whet")
UNBALANCED = 2.0  # the largest class over the smallest, from which `auto` weights them


class ClassifyRecipe(TextRecipe):
    """A head on the model tells classes apart."""

    data: RunData

    def callbacks(self, pause: Callable[[], None]) -> list[Callback]:
        """The one that writes the report, too; it looks at the untrained model now."""
        assert isinstance(self.task, Classify)
        self.end = ClassificationEnd(
            self.config,
            self.data,
            self.task,
            model=self.model,
            directory=self.directory,
            precision=self.precision,
            world=self.world,
        )
        return [*super().callbacks(pause), self.end]

    def files(self) -> dict[str, str]:
        """Which records were held out, too."""
        held_out = self.data.held_out
        more = {} if held_out is None else {HELD_OUT_FILE: json.dumps(held_out, indent=2) + "\n"}
        return {**super().files(), **more}

    def stored_head(self) -> StoredHead | None:
        """The trained one."""
        return self.end.stored_head()


def labels_of(section: ClassifyObjective) -> Labels:
    """Return the classes of a task, by name and by number."""
    return Labels(section.names, multi_label=section.multi_label)


def needs(section: ClassifyObjective) -> Needs:
    """Return what is read from records: labels; some are held out of each class, or repeated."""
    return Needs(labels=labels_of(section), valid_share=section.valid_share, oversample=section.oversample)


def build_objective(section: ClassifyObjective, inputs: ObjectiveInputs) -> Classify:
    """Return the objective with a new head."""
    return build_classify(section, inputs.model, inputs.training_examples(), seed=inputs.seed)


def build_classify(
    section: ClassifyObjective, model: LanguageModel, train: Sequence[StoredExamples], *, seed: int
) -> Classify:
    """The objective, with a new head, weighted as the training records ask for."""
    names = section.names
    head = ClassificationHead(
        model.head().weight.shape[1], len(names), pooling=section.pooling, bias=section.bias
    ).initialise(seed)
    return Classify(
        head.to(model.device),
        multi_label=section.multi_label,
        class_weights=_class_weights(section, train),
        normalise=section.normalise,
        label_smoothing=section.label_smoothing,
        focal=section.focal,
    )


def _class_weights(section: ClassifyObjective, train: Sequence[StoredExamples]) -> list[float]:
    names, kind = section.names, section.class_weights
    counts = np.sum([class_counts(labels_of(section), examples) for examples in train], axis=0)
    log.info("classes: %s", describe_classes(names, counts))
    if absent := [name for name, count in zip(names, counts, strict=True) if not count]:
        log.warning("no training record is of the class %s", ", ".join(absent))
    if isinstance(kind, list):
        return kind
    if section.multi_label:
        chosen = cast(Literal["none", "inverse", "sqrt_inverse"], "none" if kind == "auto" else kind)
        weights = mark_weights(counts, sum(map(len, train)), chosen)
    else:
        ratio = counts.max() / max(1, counts.min())
        unbalanced = ratio > UNBALANCED and not section.oversample
        if kind == "auto":
            kind = "sqrt_inverse" if unbalanced else "none"
            if unbalanced:
                log.info(
                    "class weights: sqrt_inverse, as the largest class is %.1f times the smallest", ratio
                )
        weights = balanced_weights(counts, kind)
    if kind not in ("auto", "none"):
        log.info(
            "class weights: %s", ", ".join(f"{name} {w:.3g}" for name, w in zip(names, weights, strict=True))
        )
    return weights
