"""Who watches a run, as its config asks: rates, budgets, probes, samples and sinks."""

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from whet.config.log import Probes
from whet.config.run import Run
from whet.config.run_config import RunConfig
from whet.data.sources.splits import learned
from whet.errors import ConfigError
from whet.hardware import find_peak
from whet.models.language_model import LanguageModel
from whet.recipes.recipe import Recipe
from whet.run_directory import SAMPLES_FILE
from whet.training.callbacks import Callback
from whet.training.observe.step_flops import training_flops_per_token
from whet.training.observe.throughput import ThroughputMonitor

if TYPE_CHECKING:
    from whet.runs.assemble import Assembly

log = logging.getLogger("whet")


def check_watching(config: RunConfig, recipe: Recipe[Any]) -> None:  # Any: its section
    """Refuse what cannot be watched, before anything is read."""
    if config.log.sinks:
        from whet.training.observe.sink_backends import check_sinks

        check_sinks(config.log.sinks)
    if config.log.samples is not None and not recipe.answers_in_text:
        raise ConfigError("log.samples needs a model that answers in text, and this run trains none")
    budget = config.run.budget
    if budget is not None and budget.flops is not None and not recipe.counts_flops:
        raise ConfigError("run.budget.flops: whet cannot count the FLOPs of this model")


def watchers(
    config: RunConfig,
    directory: Path,
    work: "Assembly",
    held: contextlib.ExitStack,
) -> list[Callback]:
    """The callbacks that a config asks for; the stream of steps must stand at its beginning.

    What is `held` is let go of when the run is over, however it ends.
    """
    cost, settings = training_flops(config, work), config.log
    rates = ThroughputMonitor(max(10, settings.every), flops_per_token=cost, peak_tflops=peak_tflops(work))
    found: list[Callback] = [rates]
    found += _limits(config.run, cost)
    if settings.probes is not None:
        found += _probes(settings.probes, work)
    if (samples := settings.samples) is not None:
        from whet.training.observe.samples import SampleGenerations

        answers = SampleGenerations(
            work.tokenizer,
            samples.prompts,
            directory / SAMPLES_FILE,
            every=samples.every,
            max_tokens=samples.max_tokens,
        )
        answers.main_only = config.parallel.kind != "fsdp"  # weights in parts are put together by all ranks
        found.append(answers)
    if settings.sinks:
        found += _sinks(config, held)
    return found


def _limits(run: Run, flops_per_token: float | None) -> list[Callback]:
    """Return what ends a run before its last step."""
    if run.budget is None and run.max_memory is None and run.max_time is None:
        return []
    from whet.training.limits import Budget, MemoryLimit, TimeLimit

    limits: list[Callback] = []
    if run.budget is not None:
        budget = run.budget
        limits.append(Budget(flops=budget.flops, minutes=budget.minutes, flops_per_token=flops_per_token))
    if run.max_memory is not None:
        limits.append(MemoryLimit(run.max_memory))
    if run.max_time is not None:
        limits.append(TimeLimit(run.max_time))
    return limits


def _sinks(config: RunConfig, held: contextlib.ExitStack) -> list[Callback]:
    from whet.training.observe.metric_sinks import SinkCallback
    from whet.training.observe.sink_backends import SINKS

    found: list[Callback] = []
    for name in config.log.sinks:
        sink = SinkCallback(name, SINKS[name](), every=config.log.every)
        held.callback(sink.close)
        found.append(sink)
    return found


def training_flops(config: RunConfig, work: "Assembly") -> float | None:
    """FLOPs that training takes for a token, where they can be counted."""
    if not isinstance(work.model, LanguageModel):
        return None
    length, supervised = _typical_example(config, work.data)
    return training_flops_per_token(work.model, work.objective, length=length, supervised=supervised)


def peak_tflops(work: "Assembly") -> float | None:
    """What the devices of a run can do together; a processor would have to be measured, and is not."""
    if work.device.type == "cpu":
        return None
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return devices * find_peak(work.device).tflops(work.precision.compute)


def _typical_example(config: RunConfig, data: Any) -> tuple[int, float]:  # Any: RunData or MixData
    """The mean length of the training examples, and the share of their tokens that is supervised."""
    parts = data.parts.values() if config.parts() else [data]
    every = [examples.sides for part in parts for examples in learned(part.examples)]
    if not every:  # prompts, whose answers are not known yet
        return config.data.max_length, 1.0
    tokens = sum(int(sides.lengths.sum()) for sides in every)
    return round(tokens / sum(map(len, every))), sum(sides.supervised for sides in every) / tokens


def _probes(wanted: Probes, work: "Assembly") -> list[Callback]:
    from whet.training.observe.probe_batches import probe_batches
    from whet.training.observe.probes import (
        ActivationStats,
        AttentionEntropy,
        EffectiveRank,
        GradientNoise,
        GradientStats,
        LossCurvature,
        WeightStats,
    )

    found: list[Callback] = []
    if wanted.curvature:
        found.append(LossCurvature(wanted.curvature))
    if wanted.weights:
        found.append(WeightStats(wanted.weights))
    if wanted.rank:
        found.append(EffectiveRank(wanted.rank))
    if not work.recipe.has_batches_at_start:
        kind = work.build.config.objective.kind
        log.info("probes: only curvature, weights and rank: %s has no batch before it has sampled one", kind)
        return found
    pieces = probe_batches(work.stream, work.objective)
    if wanted.gradients:
        found.append(GradientStats(pieces[0], wanted.gradients))
    if wanted.noise:
        found.append(GradientNoise(pieces, wanted.noise))
    if not isinstance(work.model, LanguageModel):
        log.info("probes: no activations and no attention: this is no language model")
        return found
    if wanted.activations:
        found.append(ActivationStats(pieces[0], wanted.activations, eps=wanted.sparsity_eps))
    if wanted.attention:
        found.append(AttentionEntropy(pieces[0], wanted.attention))
    return found
