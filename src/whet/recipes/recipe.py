"""The contract of a recipe: what differs between kinds of runs."""

import abc
import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.adapters.qlora import quantised_weights
from whet.config.run_config import RunConfig
from whet.data.run_data import EvaluationSplit
from whet.given.given import Given
from whet.hardware import choose_device, choose_precision
from whet.models.language_model import LanguageModel, Trainable
from whet.objectives.objective import Objective
from whet.parallel.process_group import SOLO, World
from whet.run_directory import ARCH_FILE, began_on
from whet.training.callbacks import Callback, Metrics
from whet.training.trainer import Trainer

log = logging.getLogger("whet")

Evaluators = list[Callable[[], Metrics]]


class Recipe(abc.ABC):
    """One kind of run. `build` makes the model, the objective and the stream of steps."""

    data: Any  # Any: records, in the form of RunData
    model: Any  # Any: the Trainable that its objective is for
    objective: Objective
    stream: Any  # Any: steps, each a list of micro-batches
    base_digest: str
    identities: dict[str, str]  # of frozen models that were opened by name

    def __init__(
        self, config: RunConfig, directory: Path, world: World = SOLO, given: Given | None = None
    ) -> None:
        self.config = config
        self.given = given or Given()  # objects from Python, for the placeholders in the config
        self.directory = directory
        self.world = world
        self.device = choose_device(config.run.device)
        self.precision = choose_precision(config.run.precision, self.device)
        self.began = began_on(directory)
        self.identities = {}

    @abc.abstractmethod
    def build(self, held: contextlib.ExitStack) -> None:
        """Everything up to the first step, in the order in which mistakes are cheapest to find.

        What is `held` lives as long as the run.
        """

    @abc.abstractmethod
    def callbacks(self, pause: Callable[[], None]) -> list[Callback]:
        """Who takes part in the run beside those of every run; `pause` may break off what takes long."""

    @abc.abstractmethod
    def write_final(self, trainer: Trainer) -> None:
        """`final/`: what people use. After early stopping the trainer has put the best weights back."""

    def evaluators(self, split: str, found: EvaluationSplit | None, pause: Callable[[], None]) -> Evaluators:
        """What an evaluation on valid or test tells beside the loss."""
        return []

    def frozen_models(self) -> list[LanguageModel]:
        """Models that the run asks and does not train."""
        forwards = self.objective.frozen_forwards(self.model)
        return [forward.model for forward in forwards if forward.model is not self.model]

    def files(self) -> dict[str, str]:
        """What describes the run, beside its config and its origins."""
        found = {"fingerprint": self.model.fingerprint, "architecture": self.model.describe()}
        return {ARCH_FILE: json.dumps(found, indent=2) + "\n"}

    def stage(self, staging: Path) -> None:  # noqa: B027 # most have nothing of the kind
        """Put into a new run's directory what is no text."""

    def announce(self, model: Trainable) -> None:
        """Say how large the model is."""
        total = sum(p.numel() for p in model.parameters()) + quantised_weights(model)[0]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        log.info(
            "parameters: %s, of which %s train (%.2f%%)", f"{total:,}", f"{trained:,}", 100 * trained / total
        )
