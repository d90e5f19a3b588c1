"""The mix objective: a weighted sum of objectives with separate data, all of which are in every step."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from typing import Any

from whet.config.objectives.mix import MixObjective
from whet.config.run_config import RunConfig
from whet.data.batches import Step, StepStream
from whet.data.packing import StepSettings
from whet.data.run_data import EvaluationSplit, RunData
from whet.given.given import Given
from whet.models.language_model import LanguageModel
from whet.objectives.mix import Mix
from whet.objectives.objective import Objective
from whet.recipes.recipe import Build, FrozenModel, Recipe
from whet.recipes.registry import recipe_for

log = logging.getLogger("whet")


class MixRecipe(Recipe[MixObjective]):
    """Trains a language model on several objectives at once, each with its data."""

    def __init__(self, config: RunConfig, section: MixObjective, given: Given | None = None) -> None:
        super().__init__(config, section, given)
        self.parts = {name: recipe_for(part, given) for name, part in config.parts().items()}
        self.weights = {part.label: part.weight for part in section.parts}

    def check(self) -> None:
        """Check the settings of every part."""
        for recipe in self.parts.values():
            recipe.check()

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the frozen models of all parts, under "PART.ROLE"."""
        return {
            f"{part}.{role}": model
            for part, recipe in self.parts.items()
            for role, model in recipe.frozen_models().items()
        }

    def open_data(self, *, today: date | None = None) -> "MixData":
        """Open the sources of every part."""
        parts = {
            name: RunData(recipe.config, recipe.needs(), today=today, given=self.given.data)
            for name, recipe in self.parts.items()
        }
        is_validated = any("valid" in data.sources for data in parts.values())
        for index, data in enumerate(parts.values()):
            data.warns_without_validation = not (is_validated or index)
        return MixData(parts, self.weights)

    def check_models(self, b: Build) -> None:
        """Check the models of every part."""
        for name, recipe in self.parts.items():
            recipe.check_models(self._part_build(b, name))

    def prepare(self, b: Build) -> None:
        """Prepare the data of every part."""
        for name, recipe in self.parts.items():
            recipe.prepare(self._part_build(b, name))

    def objective(self, b: Build) -> Objective:
        """Return the weighted sum of the parts' objectives."""
        parts = {name: recipe.objective(self._part_build(b, name)) for name, recipe in self.parts.items()}
        return Mix(parts, self.weights)

    def _part_build(self, b: Build, name: str) -> Build:
        """Return the build with the config, data and frozen models of one part."""
        prefix = f"{name}."
        frozen = {
            role.removeprefix(prefix): model for role, model in b.frozen.items() if role.startswith(prefix)
        }
        data = None if b.data is None else b.data.parts[name]
        return replace(b, config=self.parts[name].config, data=data, frozen=frozen)


class MixData:
    """The data of all parts of a mix, as the data of one run."""

    def __init__(self, parts: Mapping[str, RunData], weights: Mapping[str, float]) -> None:
        self.parts = dict(parts)
        self.weights = weights

    @property
    def steps(self) -> StepSettings:
        """The settings that split the steps of the first part into micro-batches."""
        return next(iter(self.parts.values())).steps

    def training_texts(self) -> Iterator[str]:
        """Yield the texts of the training records of all parts, to train a tokenizer on."""
        for data in self.parts.values():
            yield from data.training_texts()

    def digests(self) -> dict[str, str]:
        """Return a hash of each source's records, under "PART.SOURCE"."""
        return self._collect_digests(RunData.digests)

    def token_digests(self) -> dict[str, str]:
        """Return a hash of each source's tokens, under "PART.SOURCE"."""
        return self._collect_digests(RunData.token_digests)

    def _collect_digests(self, digests: Callable[[RunData], dict[str, str]]) -> dict[str, str]:
        return {
            f"{part}.{name}": digest
            for part, data in self.parts.items()
            for name, digest in digests(data).items()
        }

    def prepare(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        """Tokenize every source of every part."""
        for name, data in self.parts.items():
            log.info("part %s, weight %g:", name, self.weights[name])
            data.prepare(tokenizer)

    def check_model_limits(self, model: LanguageModel) -> None:
        """Raise an error for tokens and lengths that the model does not support.

        Warns if EOS is never supervised.
        """
        for data in self.parts.values():
            data.check_model_limits(model)

    def stream(self) -> "MixStream":
        """Return steps that contain the next step of every part."""
        return MixStream({name: data.stream() for name, data in self.parts.items()})

    def describe_steps(self) -> str:
        """Return the size of each part's steps as text."""
        return "; ".join(f"{name}: {data.describe_steps()}" for name, data in self.parts.items())

    def evaluation_split(self, name: str, model: LanguageModel) -> EvaluationSplit | None:
        """Return the batches and questions of a split over all parts that have it, or None."""
        part_splits = {part: data.evaluation_split(name, model) for part, data in self.parts.items()}
        splits = {part: split for part, split in part_splits.items() if split is not None}
        if not splits:
            return None
        return EvaluationSplit(
            [replace(batch, part=part) for part, split in splits.items() for batch in split.batches],
            [question for split in splits.values() for question in split.questions],
        )


class MixStream(StepStream):
    """Combines the endless streams of all parts: each step contains one step of every part."""

    def __init__(self, streams: Mapping[str, StepStream]) -> None:
        self.streams = streams

    def __next__(self) -> Step:
        steps = {part: next(stream) for part, stream in self.streams.items()}
        return Step([replace(batch, part=part) for part, step in steps.items() for batch in step])

    def state(self) -> dict[str, dict[str, int]]:
        """Return the position of each part's stream."""
        return {part: stream.state() for part, stream in self.streams.items()}

    def seek(self, state: Mapping[str, dict[str, int]]) -> None:
        """Move every part's stream to the position that `state` returned."""
        for part, stream in self.streams.items():
            stream.seek(state[part])

    def close(self) -> None:
        """Close the streams of all parts."""
        for stream in self.streams.values():
            stream.close()
