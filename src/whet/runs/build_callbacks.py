"""Who watches a run, as its config asks: rates, budgets, probes, samples and sinks."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from whet.config.log import Probes
from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.quality import Quality
from whet.config.run_config import RunConfig
from whet.data.sources.splits import learned
from whet.errors import ConfigError
from whet.hardware import find_peak
from whet.models.language_model import LanguageModel
from whet.run_directory import SAMPLES_FILE
from whet.training.callbacks import Callback
from whet.training.limits import Budget
from whet.training.observe.step_flops import training_flops_per_token
from whet.training.observe.throughput import ThroughputMonitor

log = logging.getLogger("whet")


def check_watching(config: RunConfig) -> None:
    """Refuse what cannot be watched, before anything is read."""
    if config.log.sinks:
        from whet.training.observe.sink_backends import check_sinks

        check_sinks(config.log.sinks)
    silent = isinstance(config.model, Quality) or isinstance(config.objective, ClassifyObjective)
    if config.log.samples is not None and silent:
        raise ConfigError("log.samples needs a model that answers in text, and this run trains none")
    budget = config.run.budget
    if budget is not None and budget.flops is not None and isinstance(config.model, Quality):
        raise ConfigError("run.budget.flops: whet cannot count the FLOPs of this model")


def watchers(
    config: RunConfig,
    directory: Path,
    work: Any,  # Any: a Recipe that is built
    held: contextlib.ExitStack,
) -> list[Callback]:
    """The callbacks that a config asks for; the stream of steps must stand at its beginning.

    What is `held` is let go of when the run is over, however it ends.
    """
    cost, settings = training_flops(config, work), config.log
    rates = ThroughputMonitor(max(10, settings.every), flops_per_token=cost, peak_tflops=peak_tflops(work))
    found: list[Callback] = [rates]
    if (budget := config.run.budget) is not None:
        found.append(Budget(flops=budget.flops, minutes=budget.minutes, flops_per_token=cost))
    if settings.probes is not None:
        found += _probes(config, settings.probes, work)
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


def _sinks(config: RunConfig, held: contextlib.ExitStack) -> list[Callback]:
    from whet.training.observe.metric_sinks import SinkCallback
    from whet.training.observe.sink_backends import SINKS

    found: list[Callback] = []
    for name in config.log.sinks:
        sink = SinkCallback(name, SINKS[name](), every=config.log.every)
        held.callback(sink.close)
        found.append(sink)
    return found


def training_flops(config: RunConfig, work: Any) -> float | None:  # Any: as above
    """FLOPs that training takes for a token, where they can be counted."""
    if not isinstance(work.model, LanguageModel):
        return None
    length, supervised = _typical_example(config, work.data)
    return training_flops_per_token(work.model, work.objective, length=length, supervised=supervised)


def peak_tflops(work: Any) -> float | None:  # Any: as above
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


def _probes(config: RunConfig, wanted: Probes, work: Any) -> list[Callback]:  # Any: as above
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
    if isinstance(config.objective, GRPOObjective):
        log.info("probes: only curvature, weights and rank: grpo has no batch before it has sampled one")
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
