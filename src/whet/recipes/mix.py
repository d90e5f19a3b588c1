"""The data of a mix: that of each part, and streams whose steps have batches of all of them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from types import MappingProxyType
from typing import Any

from whet.config.objectives.mix import MixObjective
from whet.config.run_config import RunConfig
from whet.data.batches import Step, StepStream
from whet.data.run_data import EvaluationSplit, RunData
from whet.data.sources.source import GivenRows
from whet.models.language_model import LanguageModel
from whet.recipes.registry import needs_of

log = logging.getLogger("whet")


class MixData:
    """What the parts of a mix name, used as the data of one run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        today: date | None = None,
        given: GivenRows = MappingProxyType({}),
    ) -> None:
        assert isinstance(config.objective, MixObjective)
        self.parts = {
            name: RunData(part, needs_of(part.objective), today=today, given=given)
            for name, part in config.parts().items()
        }
        self.weights = {part.called: part.weight for part in config.objective.parts}

    def texts(self) -> Iterator[str]:
        """What the training records of all parts say, to make a tokenizer from."""
        for data in self.parts.values():
            yield from data.texts()

    def digests(self) -> dict[str, str]:
        """A hash of each source's content."""
        return self._of_parts(RunData.digests)

    def token_digests(self) -> dict[str, str]:
        """A hash of what each source became."""
        return self._of_parts(RunData.token_digests)

    def _of_parts(self, digests: Callable[[RunData], dict[str, str]]) -> dict[str, str]:
        return {
            f"{part}.{name}": digest
            for part, data in self.parts.items()
            for name, digest in digests(data).items()
        }

    def prepare(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        """Tokenise every source of every part."""
        for name, data in self.parts.items():
            log.info("part %s, weight %g:", name, self.weights[name])
            data.prepare(tokenizer)

    def check(self, model: LanguageModel) -> None:
        """Refuse tokens and lengths that the model does not know; warn if it would not learn to stop."""
        for data in self.parts.values():
            data.check(model)

    def stream(self) -> "MixStream":
        """Steps that have the next batches of every part."""
        return MixStream({name: data.stream() for name, data in self.parts.items()})

    def describe_steps(self) -> str:
        """How large a step is, for a person."""
        return "; ".join(f"{name}: {data.describe_steps()}" for name, data in self.parts.items())

    def split(self, name: str, model: LanguageModel) -> EvaluationSplit | None:
        """The batches of valid or test of all parts that have one, and what is asked in them."""
        found = {part: data.split(name, model) for part, data in self.parts.items()}
        splits = {part: split for part, split in found.items() if split is not None}
        if not splits:
            return None
        return EvaluationSplit(
            [replace(batch, part=part) for part, split in splits.items() for batch in split.batches],
            [question for split in splits.values() for question in split.questions],
        )


class MixStream(StepStream):
    """Several endless streams, a step of each at a time; the parts' positions are its position."""

    def __init__(self, streams: Mapping[str, StepStream]) -> None:
        self.streams = streams

    def __next__(self) -> Step:
        steps = {part: next(stream) for part, stream in self.streams.items()}
        return Step([replace(batch, part=part) for part, step in steps.items() for batch in step])

    def state(self) -> dict[str, dict[str, int]]:
        """The position of each part."""
        return {part: stream.state() for part, stream in self.streams.items()}

    def seek(self, state: Mapping[str, dict[str, int]]) -> None:
        """Go to a position that `state` returned."""
        for part, stream in self.streams.items():
            stream.seek(state[part])
