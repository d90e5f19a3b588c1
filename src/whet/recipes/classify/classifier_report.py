"""The end of a run that classifies: its head calibrated and saved, and a report of what it can do."""

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
from whet.data.class_balance import label_values, to_marks
from whet.data.run_data import RunData
from whet.data.sources.splits import LEARNED
from whet.data.tokens.examples import StoredExamples
from whet.errors import ConfigError, StorageError
from whet.evaluation.classifier_metrics import Report, marked_report, sigmoid, single_report, softmax
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
from whet.objectives.confusion_matrix import confusion_matrix, confusion_metrics, mark_metrics
from whet.recipes.classify.calibration import fitted_temperature, rows_of
from whet.recipes.classify.classifier_config import ClassifierSettings
from whet.recipes.recipe import Build
from whet.run_directory import CLASSIFICATION_FILE, FINAL, PROBE_FILE
from whet.storage import read_json, replace_text
from whet.training.callbacks import Injector, ModelCallback, RunView
from whet.training.state import RunResult

log = logging.getLogger("whet")

PROBE_EXAMPLES = 2_000  # the most it is fitted on


def report_on(
    logits: np.ndarray,
    labels: np.ndarray,
    info: ClassifierInfo,
    examples: Any,  # Any: a sequence of examples
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    seconds: float,
) -> Report:
    """The report on the logits of some examples, which took so long."""
    tokens = int(sum(example.length for example in examples))
    speed = {"seconds": seconds, "examples_per_s": len(examples) / seconds, "tokens_per_s": tokens / seconds}

    def show(place: int) -> dict[str, str]:
        example = examples[place]
        return {"text": tokenizer.decode(example.tokens[:-1]), "origin": example.origin}

    if info.multi_label:
        return {**marked_report(sigmoid(logits), labels, info.classes), "throughput": speed}
    classes = labels[:, 0].astype(np.int64)
    return {**single_report(softmax(logits), classes, info.classes, show=show), "throughput": speed}


class ClassificationReport:
    """What is measured of a classifier's run: a baseline before it, the calibration and a report after it."""

    def __init__(self, config: RunConfig, section: ClassifyObjective, b: Build, objective: Classify) -> None:
        self.section = section
        self.data: RunData = b.data
        self.objective = objective
        self.model: LanguageModel = b.model
        self.directory = b.directory
        self.precision = b.precision
        self.world = b.world
        self.info = ClassifierSettings.of_config(config, config.directory).info
        held = "test" if "test" in self.data.examples else "valid"
        self.split = held if held in self.data.examples else None

    def probe(self) -> dict[str, float] | None:
        """Return how far a line through the untrained model's features gets, and keep it in the run."""
        path = self.directory / PROBE_FILE
        if self.split is None or not self.section.probe:
            return None
        if self.world.from_main(path.is_file()):
            return read_json(path)
        try:
            probe = LinearProbe()
        except ConfigError as error:
            log.warning("no linear probe: %s (%s)", error.message, error.hint)
            return None
        train = [self._examples(split) for split in LEARNED if split in self.data.examples]
        every = -(-sum(map(len, train)) // PROBE_EXAMPLES)
        known = [examples.only(np.arange(len(examples))[::every]) for examples in train]
        features = [
            (self._rows(examples, self.objective.features), self._marks_or_classes(examples))
            for examples in (*known, self._examples(self.split))
        ]
        x, y = (np.concatenate(parts) for parts in zip(*features[:-1], strict=True))
        x_held, y_held = features[-1]
        guessed = probe.fit(x, y).predict(x_held)
        if self.section.multi_label:
            scores = mark_metrics(y_held, guessed)
        else:
            matrix = confusion_matrix(y_held, guessed, len(self.info.classes))
            scores = {name: float(value) for name, value in confusion_metrics(matrix).items()}
        log.info("linear probe of the untrained model: macro F1 %.3f", scores["f1_macro"])
        if self.world.is_main:
            with contextlib.suppress(StorageError):  # then the report of a resumed run has none
                replace_text(path, json.dumps(scores, indent=2) + "\n")
        return scores

    def _examples(self, split: str) -> StoredExamples:
        examples = self.data.examples[split]
        assert isinstance(examples, StoredExamples)  # labels are never read from pairs
        return examples

    def _rows(self, examples: StoredExamples, compute: Any) -> np.ndarray:  # Any: the objective's own method
        return rows_of(
            compute, self.model, examples, self.data.steps, precision=self.precision, world=self.world
        )

    def _marks_or_classes(self, examples: StoredExamples) -> np.ndarray:
        labels = self._labels(examples)
        return to_marks(labels) if self.section.multi_label else labels

    def _labels(self, examples: StoredExamples) -> np.ndarray:
        if self.section.multi_label:
            return label_values(examples, len(self.info.classes))
        classes: np.ndarray = label_values(examples, 1)[:, 0].astype(np.int64)
        return classes

    def calibrated_head(self) -> StoredHead:
        """Return the head to be saved: calibrated, where the config asks for it."""
        calibration = {"temperature": self._calibrate()} if self.section.calibrate else None
        weights = self.objective.class_weights.tolist()
        stored = WeightedHead(self.objective.head, self.info, weights, calibration)
        if (reason := stored.unexportable(self.model)) is not None:
            log.info("whet alone can use this head: %s", reason)
        return stored

    def _calibrate(self) -> float:
        """Divide the head by the temperature that fits the validation records best, and return it."""
        valid = self._examples("valid")
        logits, labels = self._rows(valid, self.objective.logits), self._labels(valid)
        temperature = fitted_temperature(logits, labels, multi_label=self.section.multi_label)
        with torch.no_grad():
            for parameter in self.objective.head.parameters():
                parameter.div_(temperature)
        log.info("calibrated: temperature %.3f, on %d validation records", temperature, len(valid))
        return temperature

    def load_saved_head(self, final: Path) -> None:
        """Use the head that was saved: a run that was stopped after it has another one."""
        saved = read_head(final).head.to(self.model.device)
        self.objective.head.load_state_dict(saved.state_dict())

    def write(self, probe: dict[str, float] | None) -> dict[str, float]:
        """Write classification.json, on the test records or else the validation ones; returns its scores."""
        if self.split is None:
            return {}
        examples = self._examples(self.split)
        started = time.perf_counter()
        logits = self._rows(examples, self.objective.logits)
        seconds = time.perf_counter() - started
        columns = len(self.info.classes) if self.section.multi_label else 1
        try:
            report = report_on(
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
        report |= {"split": self.split, "calibration": read_calibration(self.directory / FINAL)}
        if probe is not None:
            report["baselines"]["linear probe"] = probe
        try:
            if self.world.is_main:
                replace_text(self.directory / CLASSIFICATION_FILE, json.dumps(report, indent=2) + "\n")
        except StorageError as error:  # final/ is there; whet eval makes the report again
            log.warning(error.message)
            return {}
        scores = ("accuracy", "balanced_accuracy", "f1_macro", "mcc", "ece")
        return {name: report[name] for name in scores if name in report}


class ClassificationEnd(ModelCallback, Injector):
    """Measures a baseline before the first step, and writes the report of a finished run."""

    def __init__(self, report: ClassificationReport) -> None:
        self.report = report
        self.probe: dict[str, float] | None = None

    def touches_model(self, step: int) -> bool:
        """Return False: only the untrained and the final model are looked at."""
        return False

    def on_train_begin(self, run: RunView) -> None:
        """Measure the untrained model, or read what was measured before the run was stopped."""
        if run.step == 0 or self.report.world.from_main((self.report.directory / PROBE_FILE).is_file()):
            self.probe = self.report.probe()

    def on_train_end(self, result: RunResult) -> None:
        """Write the report, and its scores into the summary."""
        if not result.unfinished and (scores := self.report.write(self.probe)):
            result.summary["classification"] = scores
