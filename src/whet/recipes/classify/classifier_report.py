"""The end of a classification run: calibrate the head, fit a linear probe, and write the report."""

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.config.objectives.classify import ClassifyObjective
from whet.config.run_config import RunConfig
from whet.data.class_balance import label_values, to_boolean_targets
from whet.data.run_data import RunData
from whet.data.sources.splits import TRAINING_SPLITS
from whet.data.tokens.examples import StoredExamples
from whet.errors import ConfigError, StorageError
from whet.evaluation.classifier_metrics import (
    Report,
    multi_label_report,
    sigmoid,
    single_label_report,
    softmax,
)
from whet.evaluation.linear_probe import LinearProbe
from whet.model_io.formats.classifier_head import (
    ClassifierInfo,
    StoredHead,
    WeightedHead,
    read_calibration,
    read_head,
)
from whet.models.language_model import LanguageModel
from whet.objectives.classify import Classify
from whet.objectives.confusion_matrix import confusion_matrix, confusion_metrics, multi_label_metrics
from whet.recipes.classify.calibration import compute_outputs, fit_temperature
from whet.recipes.classify.classifier_config import ClassifierSettings
from whet.recipes.recipe import Build
from whet.run_directory import CLASSIFICATION_FILE, FINAL_DIRECTORY, PROBE_FILE
from whet.storage import read_json, replace_text
from whet.training.callbacks import Injector, ModelCallback, RunView
from whet.training.state import RunResult

log = logging.getLogger("whet")

PROBE_EXAMPLES = 2_000  # the maximum number of training examples of the linear probe


def classification_report(
    logits: np.ndarray,
    labels: np.ndarray,
    info: ClassifierInfo,
    examples: Any,  # Any: a sequence of examples
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    seconds: float,
) -> Report:
    """Return the classification report: metrics, calibration, confusions and throughput.

    Args:
        logits: The outputs of the head, [examples, classes].
        labels: The classes [examples, 1], or with multi_label the targets [examples, classes].
        info: The classes and the kind of the classifier.
        examples: The examples, in the order of the logits.
        tokenizer: Decodes the texts of examples that the report shows.
        seconds: How long the logits took to compute.
    """
    tokens = int(sum(example.length for example in examples))
    throughput = {
        "seconds": seconds,
        "examples_per_s": len(examples) / seconds,
        "tokens_per_s": tokens / seconds,
    }

    def show(index: int) -> dict[str, str]:
        example = examples[index]
        return {"text": tokenizer.decode(example.tokens[:-1]), "origin": example.origin}

    if info.multi_label:
        return {**multi_label_report(sigmoid(logits), labels, info.classes), "throughput": throughput}
    classes = labels[:, 0].astype(np.int64)
    return {
        **single_label_report(softmax(logits), classes, info.classes, describe=show),
        "throughput": throughput,
    }


class ClassificationReport:
    """Measures a classification run: a linear probe before it, calibration and a report after it."""

    def __init__(self, config: RunConfig, section: ClassifyObjective, b: Build, objective: Classify) -> None:
        self.section = section
        self.data: RunData = b.data
        self.objective = objective
        self.model: LanguageModel = b.model
        self.directory = b.directory
        self.precision = b.precision
        self.world = b.world
        self.info = ClassifierSettings.from_config(config, config.directory).info
        split = "test" if "test" in self.data.examples else "valid"
        self.split = split if split in self.data.examples else None

    def probe(self) -> dict[str, float] | None:
        """Return the scores of a linear probe on the untrained model's features, and store them in the run.

        None if the run has no probe: it is turned off, there is no evaluation split, or a library is missing.
        """
        path = self.directory / PROBE_FILE
        if self.split is None or not self.section.probe:
            return None
        if self.world.broadcast(path.is_file()):
            return read_json(path)
        try:
            probe = LinearProbe()
        except ConfigError as error:
            log.warning("no linear probe: %s (%s)", error.message, error.hint)
            return None
        train = [self._examples(split) for split in TRAINING_SPLITS if split in self.data.examples]
        stride = -(-sum(map(len, train)) // PROBE_EXAMPLES)
        subsets = [examples.select(np.arange(len(examples))[::stride]) for examples in train]
        features = [
            (self._rows(examples, self.objective.features), self._hard_labels(examples))
            for examples in (*subsets, self._examples(self.split))
        ]
        x, y = (np.concatenate(parts) for parts in zip(*features[:-1], strict=True))
        x_eval, y_eval = features[-1]
        predictions = probe.fit(x, y).predict(x_eval)
        if self.section.multi_label:
            scores = multi_label_metrics(y_eval, predictions)
        else:
            matrix = confusion_matrix(y_eval, predictions, len(self.info.classes))
            scores = {name: float(value) for name, value in confusion_metrics(matrix).items()}
        log.info("linear probe of the untrained model: macro F1 %.3f", scores["f1_macro"])
        if self.world.is_main:
            with contextlib.suppress(StorageError):  # then the report of a resumed run has no probe
                replace_text(path, json.dumps(scores, indent=2) + "\n")
        return scores

    def _examples(self, split: str) -> StoredExamples:
        examples = self.data.examples[split]
        assert isinstance(examples, StoredExamples)  # pairs have no labels
        return examples

    def _rows(self, examples: StoredExamples, compute: Any) -> np.ndarray:  # Any: the objective's method
        return compute_outputs(
            compute, self.model, examples, self.data.steps, precision=self.precision, world=self.world
        )

    def _hard_labels(self, examples: StoredExamples) -> np.ndarray:
        labels = self._labels(examples)
        return to_boolean_targets(labels) if self.section.multi_label else labels

    def _labels(self, examples: StoredExamples) -> np.ndarray:
        if self.section.multi_label:
            return label_values(examples, len(self.info.classes))
        classes: np.ndarray = label_values(examples, 1)[:, 0].astype(np.int64)
        return classes

    def calibrated_head(self) -> StoredHead:
        """Calibrate the head if the config asks for it, and return it in the form that is saved."""
        calibration = {"temperature": self._calibrate()} if self.section.calibrate else None
        weights = self.objective.class_weights.tolist()
        stored = WeightedHead(self.objective.head, self.info, weights, calibration)
        if (reason := stored.export_problem(self.model)) is not None:
            log.info("only whet can load this head: %s", reason)
        return stored

    def _calibrate(self) -> float:
        """Fit a temperature to the validation records, divide the head by it, and return it."""
        valid = self._examples("valid")
        logits, labels = self._rows(valid, self.objective.logits), self._labels(valid)
        temperature = fit_temperature(logits, labels, multi_label=self.section.multi_label)
        with torch.no_grad():
            for parameter in self.objective.head.parameters():
                parameter.div_(temperature)
        log.info("calibrated: temperature %.3f, on %d validation records", temperature, len(valid))
        return temperature

    def load_saved_head(self, final: Path) -> None:
        """Load the saved head, because the one in the checkpoint is not calibrated."""
        saved = read_head(final).head.to(self.model.device)
        self.objective.head.load_state_dict(saved.state_dict())

    def write(self, probe: dict[str, float] | None) -> dict[str, float]:
        """Write classification.json for the test split, or else the valid split, and return its main scores.

        Args:
            probe: The scores of the linear probe, if there are any.
        """
        if self.split is None:
            return {}
        examples = self._examples(self.split)
        started = time.perf_counter()
        logits = self._rows(examples, self.objective.logits)
        seconds = time.perf_counter() - started
        columns = len(self.info.classes) if self.section.multi_label else 1
        try:
            report = classification_report(
                logits,
                label_values(examples, columns),
                self.info,
                examples,
                self.data.tokenizer,
                seconds=seconds,
            )
        except ConfigError as error:
            log.warning("no classification report: %s (%s)", error.message, error.hint)
            return {}
        report |= {"split": self.split, "calibration": read_calibration(self.directory / FINAL_DIRECTORY)}
        if probe is not None:
            report["baselines"]["linear probe"] = probe
        try:
            if self.world.is_main:
                replace_text(self.directory / CLASSIFICATION_FILE, json.dumps(report, indent=2) + "\n")
        except StorageError as error:  # final/ is complete, and whet eval can write the report again
            log.warning(error.message)
            return {}
        scores = ("accuracy", "balanced_accuracy", "f1_macro", "mcc", "ece")
        return {name: report[name] for name in scores if name in report}


class ClassificationReportCallback(ModelCallback, Injector):
    """Fits the linear probe before the first step, and writes the report of a finished run."""

    def __init__(self, report: ClassificationReport) -> None:
        self.report = report
        self.probe: dict[str, float] | None = None

    def touches_model(self, step: int) -> bool:
        """Return False: only the untrained and the final model are evaluated."""
        return False

    def on_train_begin(self, run: RunView) -> None:
        """Fit the linear probe on the untrained model, or read the scores that the run has stored."""
        if run.step == 0 or self.report.world.broadcast((self.report.directory / PROBE_FILE).is_file()):
            self.probe = self.report.probe()

    def on_train_end(self, result: RunResult) -> None:
        """Write the report of a finished run, and add its main scores to the summary."""
        if not result.unfinished and (scores := self.report.write(self.probe)):
            result.summary["classification"] = scores
