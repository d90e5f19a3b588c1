"""Set up the stream of a run with `data.stream`, and refuse settings that would fail during training."""

import logging
from typing import TYPE_CHECKING

from whet.config.data import Data
from whet.config.run_config import RunConfig
from whet.data.packing import StepSettings
from whet.data.sources.record_stream import StreamedSource
from whet.data.sources.source import Source
from whet.data.streamed_batches import StreamedBatches, StreamSettings
from whet.data.tokens.prepare_dataset import Preparation
from whet.errors import ConfigError
from whet.models.language_model import LanguageModel

if TYPE_CHECKING:
    from whet.data.run_data import Needs

log = logging.getLogger("whet")


def check_stream(config: RunConfig, needs: "Needs", steps: StepSettings) -> None:
    """Raise a ConfigError for an objective or a size of examples that a stream does not support."""
    if needs.pairs or needs.prompts or needs.labels is not None:
        raise ConfigError(
            f"data.stream cannot be combined with objective.kind: {config.objective.kind}, which reads "
            f"{'classes' if needs.labels is not None else needs.unit}",
            hint="remove data.stream",
        )
    # without a stream, the longest example is known before training
    positions = config.data.max_length - 1
    for key, limit in (("batch_tokens", steps.batch_tokens), ("micro_batch_tokens", steps.micro_tokens)):
        if limit is not None and positions > limit:
            raise ConfigError(
                f"data.stream: examples of data.max_length={config.data.max_length} tokens do not fit "
                f"run.{key}={limit}",
                hint=f"raise run.{key}, or lower data.max_length to {limit + 1}",
            )


def open_stream_source(source: Source, data: Data) -> StreamedSource:
    """Return a source whose records are streamed."""
    assert data.stream is not None
    return StreamedSource(source, buffer=data.stream.buffer, skip_bad=data.on_bad_record == "skip")


def start_stream(
    config: RunConfig, source: Source, preparation: Preparation, steps: StepSettings
) -> StreamedBatches:
    """Return the steps of a stream, from its start."""
    assert isinstance(source, StreamedSource)
    data, run = config.data, config.run
    settings = StreamSettings(source.source.name, source.buffer, run.seed, data.max_length, data.too_long)
    seed = run.seed if data.order == "shuffle" else None
    records = source.open(seed=seed, total_steps=run.steps or 0)
    return StreamedBatches(records, preparation, steps, settings)


def check_stream_limits(stream: StreamedBatches, model: LanguageModel) -> None:
    """Raise a ConfigError if later examples may be too long for a model, and check the tokens of blocks."""
    longest = stream.settings.max_length - 1
    if longest > model.max_positions:
        raise ConfigError(
            f"data.stream: examples of data.max_length={longest + 1} tokens exceed the {model.max_positions} "
            f"positions of {model.name}",
            hint=f"set data.max_length to {model.max_positions}",
        )
    stream.vocab_size = model.vocab_size
