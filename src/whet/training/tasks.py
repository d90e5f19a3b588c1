"""What each objective needs of the data and of other models, and the objective itself."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import torch

from whet.config.classify import ClassifyObjective
from whet.config.grpo import GRPOObjective
from whet.config.mtp import MTPObjective
from whet.config.objectives import (
    AnyObjective,
    DistillObjective,
    DistrustObjective,
    PreferenceObjective,
    RegressionObjective,
    SFTObjective,
)
from whet.config.sections import MixObjective
from whet.data.batches import one_pass
from whet.data.distrust_markers import DECLARED
from whet.data.examples import StoredExamples, StoredPairs
from whet.data.labels import Labels
from whet.data.plan import StepSettings
from whet.data.splits import learned
from whet.errors import ConfigError, DataError
from whet.hardware import Precision
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.models.modes import evaluating
from whet.models.mtp import block_of
from whet.objectives import distrusting
from whet.objectives.base import Objective
from whet.objectives.distillation import Distillation
from whet.objectives.distrusting import Distrust, calibrated_scale, squared_distance
from whet.objectives.grpo import GRPO
from whet.objectives.hidden_matching import HiddenMatching
from whet.objectives.multi_token import MultiTokenPrediction
from whet.objectives.preference import Preference, answer_logprobs
from whet.objectives.sft import SFT
from whet.parallel.group import SOLO, World
from whet.training.classification import build_classify
from whet.training.references import Reference, identity_of, load_reference, untrained_reference
from whet.training.teachers import find_teachings, load_teacher

log = logging.getLogger("whet")


@dataclass(frozen=True)
class Needs:
    """What of a record an objective reads."""

    pairs: bool = False
    prompts: bool = False  # only what comes before the answer; the record is for the rewards
    columns: tuple[str, ...] = ()
    labels: Labels | None = None
    scored: tuple[str, ...] = ()  # fields that the columns were made from, before the run

    @property
    def unit(self) -> str:
        """What a step is counted in."""
        return "pairs" if self.pairs else "prompts" if self.prompts else "examples"


def needs_of(objective: AnyObjective | MixObjective) -> Needs:
    """The kind of examples that an objective learns from."""
    match objective:
        case PreferenceObjective():
            return Needs(pairs=True)
        case DistrustObjective():
            return Needs(columns=distrusting.COLUMNS, scored=DECLARED)
        case ClassifyObjective():
            return Needs(labels=Labels(objective.names, multi_label=objective.multi_label))
        case GRPOObjective():
            return Needs(prompts=True)
        case SFTObjective() | DistillObjective() | MTPObjective() | RegressionObjective() | MixObjective():
            return Needs()
    assert_never(objective)


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
        seed: int = 0,
        world: World = SOLO,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.examples = examples
        self.steps = steps
        self.precision = precision
        self.base_digest = base_digest
        self.seed = seed
        self.world = world
        self.identities: dict[str, str] = {}  # of the models that it opened, by name

    def build(self, section: AnyObjective | MixObjective) -> Objective:
        """The objective that a config, or one part of a mix, describes."""
        match section:
            case PreferenceObjective():
                found = self._preference(section)
            case DistillObjective():
                found = self._distillation(section)
            case MTPObjective():
                found = self._multi_token(section)
            case DistrustObjective():
                found = self._distrust(section)
            case ClassifyObjective():
                found = build_classify(section, self.model, self._learned(), seed=self.seed)
            case GRPOObjective():
                found = GRPO(
                    epsilon=section.epsilon,
                    epsilon_high=section.epsilon_high,
                    beta=section.beta,
                    aggregation=section.aggregated_by,
                    max_tokens=section.max_new_tokens,
                    temperature=section.temperature,
                )
            case SFTObjective():
                found = SFT()
            case RegressionObjective() | MixObjective():
                raise ConfigError(f"objective.kind {section.kind} is not an objective on texts of its own")
            case _:
                assert_never(section)
        return found

    def _learned(self) -> list[StoredExamples]:
        """The training examples, from one source or two."""
        return [examples for examples in learned(self.examples) if isinstance(examples, StoredExamples)]

    def _preference(self, section: PreferenceObjective) -> Objective:
        named = self._named_reference(section) if section.has_reference else None
        reference: Reference | None = None
        if section.has_reference and section.reference == "online":
            reference = named or untrained_reference(self.model)
        elif section.has_reference:
            model, identity = self.model, f"{self.base_digest} {self.model.fingerprint}"
            if named is not None:
                model, identity = named, self.identities[str(section.reference_model)]
            for name, pairs in self.examples.items():
                assert isinstance(pairs, StoredPairs)
                pairs.references = self._references(name, pairs, model, identity)
        return Preference(
            section.kind,
            beta=section.strength,
            gamma=section.gamma,
            label_smoothing=section.label_smoothing,
            logprobs=section.logprobs,
            reference=reference,
        )

    def _named_reference(self, section: PreferenceObjective) -> LanguageModel | None:
        if (name := section.reference_model) is None:
            return None
        longest = max(int(pairs.sides.lengths.max()) for pairs in self.examples.values())
        reference = load_reference(
            name, self.model, self.tokenizer, precision=self.precision, longest=longest
        )
        self.identities[name] = identity_of(reference)
        return reference

    def _references(self, name: str, pairs: StoredPairs, model: LanguageModel, identity: str) -> np.ndarray:
        """What the reference makes of each answer: computed once, kept beside the tokens."""
        sides = pairs.sides
        key = hashlib.sha256(f"{identity} {self.precision.compute}".encode())
        key.update(np.stack((sides.starts, sides.stops)).tobytes())
        path = pairs.store.directory / f"reference-{key.hexdigest()[:32]}.bin"
        if self.world.from_main(path.is_file() and path.stat().st_size == 8 * len(sides)):
            log.info("reference: log-probabilities of %s from the store", name)
            return np.fromfile(path, dtype=np.float64).reshape(-1, 2)
        log.info("reference: %d answers of %s, once before training", len(sides), name)
        found = np.zeros((len(pairs), 2))
        device, mixed = model.device, self.precision.compute != self.precision.trained
        batches = list(one_pass(pairs, self.steps))
        mine = []
        with evaluating(model):
            for _, (_, batch), _ in self.world.rounds(batches):
                with torch.autocast(device.type, dtype=self.precision.compute, enabled=mixed):
                    scores = answer_logprobs(model, batch.to(device))
                mine.append(scores.double().cpu().numpy().reshape(-1, 2))
        for (places, _), answers in zip(batches, self.world.in_order(mine, len(batches)), strict=True):
            found[places] = answers
        if self.world.is_main:
            pairs.store.keep_beside(path.name, found)
        return found

    def _distillation(self, section: DistillObjective) -> Objective:
        name, vocab_size = str(self.model.name), self.model.vocab_size
        teachers: list[tuple[LanguageModel, float]] = []
        if section.offline is None:
            teachers = [(self._teacher(teacher), weight) for teacher, weight in section.teachers]
        else:
            found = find_teachings(self.examples, section, student=name, vocab_size=vocab_size)
            for split, teachings in found.items():
                self.examples[split].sides.teachings = teachings
        return Distillation(
            teachers,
            temperature=section.temperature,
            alpha=section.alpha,
            divergence=section.divergence,
            taught=[weight for _, weight in section.teachers] if section.offline else (),
            matching=self._matching(section, teachers[0][0]) if section.hidden else None,
        )

    def _matching(self, section: DistillObjective, teacher: LanguageModel) -> HiddenMatching:
        assert section.hidden is not None
        found = HiddenMatching(
            self.model, teacher, section.hidden.layers, kind=section.hidden.kind, weight=section.hidden.weight
        )
        if found.projections is not None:
            found.projections.to(self.model.device, self.precision.trained)
        return found

    def _teacher(self, name: str) -> LanguageModel:
        teacher = load_teacher(
            name,
            dtype=self.precision.frozen,
            device=self.model.device,
            student=str(self.model.name),
            vocab_size=self.model.vocab_size,
            tokenizer=self.tokenizer,
        )
        self.identities[name] = identity_of(teacher)
        return teacher

    def _multi_token(self, section: MTPObjective) -> Objective:
        for name, examples in self.examples.items():
            longest = int(examples.sides.lengths.max()) + 1
            if longest < section.n_predict + 2:
                raise DataError(
                    f"{name}: the longest text has {longest} tokens, and the last of "
                    f"{section.n_predict} heads needs {section.n_predict + 2}",
                    hint="lower objective.n_predict, or train on longer texts",
                )
        block = block_of(self.model, section)
        objective = MultiTokenPrediction(self.model, section.n_predict, section.weight, block)
        heads = objective.heads.to(self.precision.trained)
        log.info(
            "heads: %d, with %s parameters, each with a layer %s",
            len(heads),
            f"{sum(p.numel() for p in heads.parameters()):,}",
            "as in objective.block"
            if block is not None
            else "like the model's last"
            if isinstance(self.model, Decoder)
            else "of whet's own",
        )
        return objective

    def _distrust(self, section: DistrustObjective) -> Objective:
        values = [np.array(examples.store.values)[examples.records, :2] for examples in self._learned()]
        # in fp32, as in the batches: what is 0 there is 0 here
        squares = squared_distance(torch.from_numpy(np.concatenate(values)).float()).double()
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
