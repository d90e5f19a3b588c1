"""What each objective needs of the data and of other models, and the objective itself."""

import copy
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from whet.adapters.adapter import adapted
from whet.adapters.load import load
from whet.config.objectives import (
    AnyObjective,
    DistillObjective,
    DistrustObjective,
    PreferenceObjective,
    RegressionObjective,
)
from whet.data.batches import one_pass
from whet.data.examples import StoredExamples, StoredPairs
from whet.data.plan import StepSettings
from whet.errors import ModelError
from whet.generation.engine import evaluating
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.objectives import distrust
from whet.objectives.base import Objective
from whet.objectives.distillation import Distillation
from whet.objectives.distrust import Distrust, calibrated_scale, squared_distance
from whet.objectives.preference import Preference, answer_logprobs
from whet.objectives.regression import Regression
from whet.objectives.sft import SFT

log = logging.getLogger("whet")


@dataclass(frozen=True)
class Needs:
    """What of a record an objective reads."""

    pairs: bool = False
    columns: tuple[str, ...] = ()


def needs_of(objective: AnyObjective) -> Needs:
    """The kind of examples that an objective learns from."""
    match objective:
        case PreferenceObjective():
            return Needs(pairs=True)
        case DistrustObjective():
            return Needs(columns=distrust.COLUMNS)
    return Needs()


class ObjectiveBuilder:
    """Makes a run's objective, once its data and its untrained model are there."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer
        examples: Mapping[str, StoredExamples | StoredPairs],
        *,
        steps: StepSettings,
        precision: Precision,
        base_digest: str,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.examples = examples
        self.steps = steps
        self.precision = precision
        self.base_digest = base_digest

    def build(self, section: AnyObjective) -> Objective:
        """The objective that a config describes."""
        match section:
            case PreferenceObjective():
                return self._preference(section)
            case DistillObjective():
                return self._distillation(section)
            case DistrustObjective():
                return self._distrust(section)
            case RegressionObjective():
                return Regression(gluing=section.gluing)
        return SFT()

    def _preference(self, section: PreferenceObjective) -> Objective:
        reference: LanguageModel | Literal["adapters-off"] | None = None
        if section.kind in ("dpo", "ipo") and section.reference == "online":
            reference = self._online_reference()
        elif section.kind in ("dpo", "ipo"):
            for name, pairs in self.examples.items():
                assert isinstance(pairs, StoredPairs)
                pairs.references = self._references(name, pairs)
        return Preference(
            section.kind,
            beta=section.strength,
            gamma=section.gamma,
            label_smoothing=section.label_smoothing,
            reference=reference,
        )

    def _online_reference(self) -> LanguageModel | Literal["adapters-off"]:
        if any(True for _ in adapted(self.model)):
            log.info("reference: the model with its adapters off")
            return "adapters-off"
        log.info("reference: a frozen copy of the model")
        return copy.deepcopy(self.model).requires_grad_(False).eval()

    def _references(self, name: str, pairs: StoredPairs) -> np.ndarray:
        """What the untrained model makes of each answer: computed once, kept beside the tokens."""
        sides = pairs.sides
        key = hashlib.sha256(f"{self.base_digest} {self.precision.compute}".encode())
        key.update(np.stack((sides.starts, sides.stops)).tobytes())
        path = pairs.store.directory / f"reference-{key.hexdigest()[:32]}.bin"
        if path.is_file() and path.stat().st_size == 8 * len(sides):
            log.info("reference: log-probabilities of %s from the store", name)
            return np.fromfile(path, dtype=np.float64).reshape(-1, 2)
        log.info("reference: %d answers of %s, once before training", len(sides), name)
        found = np.zeros((len(pairs), 2))
        device, mixed = self.model.device, self.precision.compute != self.precision.trained
        with evaluating(self.model):
            for places, batch in one_pass(pairs, self.steps):
                with torch.autocast(device.type, dtype=self.precision.compute, enabled=mixed):
                    scores = answer_logprobs(self.model, batch.to(device))
                found[places] = scores.double().cpu().numpy().reshape(-1, 2)
        pairs.store.keep_beside(path.name, found)
        return found

    def _distillation(self, section: DistillObjective) -> Objective:
        named = section.teacher
        wanted = [(named, 1.0)] if isinstance(named, str) else [(t.model, t.weight) for t in named]
        teachers = []
        for name, weight in wanted:
            teacher, tokenizer = load(name, dtype=self.precision.frozen, device=self.model.device)
            self._same_ids(name, teacher, tokenizer)
            teachers.append((teacher, weight))
        return Distillation(
            teachers,
            temperature=section.temperature,
            alpha=section.alpha,
            divergence=section.divergence,
        )

    def _same_ids(self, name: str, teacher: LanguageModel, tokenizer: Any) -> None:  # Any: as above
        """A teacher's opinions are about its own token ids: they must be the student's."""
        if teacher.vocab_size != self.model.vocab_size:
            raise ModelError(
                f"{name} has a vocabulary of {teacher.vocab_size}, and {self.model.name} of "
                f"{self.model.vocab_size}: a teacher's tokens must be the student's"
            )
        theirs, ours = (each.get_vocab() for each in (tokenizer, self.tokenizer)) if tokenizer else ({}, {})
        differ = [token for token in {**theirs, **ours} if theirs.get(token) != ours.get(token)]
        if differ:
            shown = ", ".join(
                f"{t!r} ({theirs.get(t)} there, {ours.get(t)} here)" for t in sorted(differ)[:3]
            )
            raise ModelError(f"{name} has another tokenizer: {len(differ)} tokens differ, such as {shown}")

    def _distrust(self, section: DistrustObjective) -> Objective:
        examples = self.examples["train"]
        assert isinstance(examples, StoredExamples)
        squares = squared_distance(torch.from_numpy(np.array(examples.store.values))[examples.records])
        scale = section.scale
        if scale == "auto":
            scale = calibrated_scale(squares, alpha=section.alpha)
            log.info("distrust: scale %.4g", scale)
        if section.mode == "additive":
            log.warning(
                "distrust: the additive term depends on no weight of the model: it changes no gradient"
            )
        return Distrust(
            float(squares.mean()),
            mode=section.mode,
            strength=section.strength,
            alpha=section.alpha,
            scale=scale,
        )
