"""Assemble a run: everything up to the first step, with the cheapest checks first."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.config.run_config import RunConfig
from whet.data.batches import StepStream
from whet.given.given import Given
from whet.hardware import Precision, choose_device, choose_precision
from whet.models.language_model import LanguageModel
from whet.models.moe import moe_layers
from whet.objectives.objective import Objective
from whet.parallel.preflight import check_device
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.recipes.recipe import Build, Recipe
from whet.recipes.registry import complete_config, recipe_for
from whet.run_directory import start_date
from whet.runs.build_callbacks import check_callbacks
from whet.training.callbacks import Callback


@dataclass(frozen=True)
class Assembly:
    """All parts of a run that is ready for its first step."""

    recipe: Recipe[Any]  # Any: its section
    build: Build
    objective: Objective  # includes the loss terms of the model's routers
    stream: StepStream
    router_callbacks: list[Callback]  # log the routers' metrics and balance their load
    device: torch.device
    start_date: date

    @property
    def model(self) -> Any:  # Any: the Trainable that the objective is for
        """The trained model."""
        return self.build.model

    @property
    def data(self) -> Any:  # Any: the recipe's Data
        """The tokenized data."""
        return self.build.data

    @property
    def tokenizer(self) -> Any:  # Any: a transformers tokenizer
        """The tokenizer, or None if the model has none."""
        return self.build.tokenizer

    @property
    def precision(self) -> Precision:
        """The dtypes of trained weights, frozen weights and computation."""
        return self.build.precision


def assemble(
    config: RunConfig,
    stack: contextlib.ExitStack,
    *,
    directory: Path,
    world: World = SINGLE_PROCESS,
    given: Given | None = None,
) -> Assembly:
    """Read the data, load the models, and build the objective and the training steps of a run.

    Args:
        config: The run's config.
        stack: Closed at the end of the run; it owns processes that the recipe starts.
        directory: The run directory, which need not exist yet.
        world: The ranks that train together.
        given: Python objects that the config refers to.
    """
    recipe = recipe_for(config, given)
    recipe.check()
    check_callbacks(config, recipe)

    device = choose_device(config.run.device)
    check_device(world, device)
    precision = choose_precision(config.run.precision, device)
    first_day = start_date(directory)
    _seed(config.run.seed)

    data = recipe.open_data(today=first_day)
    with world.main_process_first():
        tokenizer = recipe.find_tokenizer(data, directory)
        data.prepare(tokenizer)
    recipe.start(stack)
    model, base_digest = recipe.model(tokenizer, device=device, precision=precision)
    data.check_model_limits(model)
    b = Build(
        config, model, precision, data, tokenizer, base_digest=base_digest, directory=directory, world=world
    )
    if recipe.has_batches_at_start:
        b.steps = recipe.steps(b)
        stack.callback(b.steps.close)
    if isinstance(model, LanguageModel):
        _complete_language_model(recipe, b)

    recipe.prepare(b)
    # models that only `prepare` needs are freed before training
    specs = recipe.frozen_models()
    b.frozen = {role: frozen for role, frozen in b.frozen.items() if not specs[role].before_training}
    b.objective = recipe.objective(b)
    stream = b.steps = b.steps or recipe.steps(b)
    objective, router_callbacks = _add_router_losses(b.objective, b)
    return Assembly(recipe, b, objective, stream, router_callbacks, device, first_day)


def _complete_language_model(recipe: Recipe[Any], b: Build) -> None:  # Any: its section
    """Compile the model if run.compile is set, and load the frozen models."""
    if b.config.run.compile:
        from whet.recipes.model_setup import compile_model

        compile_model(b)
    if specs := recipe.frozen_models():
        from whet.recipes.frozen_models import load_frozen_models

        b.frozen, b.identities = load_frozen_models(
            specs, b.model, b.tokenizer, config=b.config, precision=b.precision
        )


def _add_router_losses(objective: Objective, b: Build) -> tuple[Objective, list[Callback]]:
    """Return the objective with the router losses of an MoE model, and the routers' callbacks."""
    section = b.config.experts
    if not isinstance(b.model, LanguageModel):
        return objective, []
    if not moe_layers(b.model) and not any(section.model_dump().values()):
        return objective, []
    from whet.training.router_balancing import add_router_objective

    objective, callbacks = add_router_objective(objective, b.model, section, compute=b.precision.compute)
    return objective, list(callbacks)


@contextlib.contextmanager
def open_assembly(config: RunConfig) -> Iterator[Assembly]:
    """Assemble a run without training it, to inspect its model, objective and steps."""
    with contextlib.ExitStack() as stack:
        yield assemble(complete_config(config), stack, directory=config.directory)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
