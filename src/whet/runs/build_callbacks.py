"""Build the callbacks that a config asks for: throughput, limits, probes, samples and metric sinks."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from whet.config.log import Probes
from whet.config.run import Run
from whet.config.run_config import RunConfig
from whet.data.sources.splits import training_entries
from whet.errors import ConfigError
from whet.hardware import find_peak
from whet.models.language_model import LanguageModel
from whet.recipes.recipe import Recipe
from whet.run_directory import SAMPLES_FILE
from whet.training.callbacks import Callback
from whet.training.observe.step_flops import training_flops_per_token
from whet.training.observe.throughput import ThroughputMonitor

if TYPE_CHECKING:
    from whet.evaluation.task_evaluator import TaskEvaluator
    from whet.runs.assemble import Assembly

log = logging.getLogger("whet")


def check_callbacks(config: RunConfig, recipe: Recipe[Any]) -> None:  # Any: its section
    """Raise a ConfigError for sinks, samples, tasks and budgets that this run does not support."""
    if config.log.sinks:
        from whet.training.observe.sink_backends import check_sinks

        check_sinks(config.log.sinks)
    if config.log.samples is not None and not recipe.generates_text:
        raise ConfigError(
            "log.samples needs a model that generates text, and this run does not train one",
            hint="remove log.samples",
        )
    if config.eval.tasks is not None and not recipe.generates_text:
        raise ConfigError("eval.tasks needs a language model, and this run does not train one")
    budget = config.run.budget
    if budget is not None and budget.flops is not None and not recipe.counts_flops:
        raise ConfigError("run.budget.flops: whet cannot count the FLOPs of this model")


def callbacks_from_config(
    config: RunConfig,
    directory: Path,
    assembly: "Assembly",
    stack: contextlib.ExitStack,
) -> list[Callback]:
    """Return the callbacks that a config asks for.

    Args:
        config: The run's config.
        directory: The run directory.
        assembly: The assembled run; its step stream must be at the first step, because probes read batches
            from it.
        stack: Closes the metric sinks at the end of the run, even if the run fails.
    """
    log_config = config.log
    flops_per_token = training_flops(config, assembly)
    throughput = ThroughputMonitor(
        max(10, log_config.every), flops_per_token=flops_per_token, peak_tflops=peak_tflops(assembly)
    )
    callbacks: list[Callback] = [throughput]
    callbacks += _limits(config.run, flops_per_token)
    if log_config.probes is not None:
        callbacks += _probes(log_config.probes, assembly)
    if (samples := log_config.samples) is not None:
        from whet.training.observe.samples import SampleGenerations

        generations = SampleGenerations(
            assembly.tokenizer,
            samples.prompts,
            directory / SAMPLES_FILE,
            every=samples.every,
            max_tokens=samples.max_tokens,
        )
        # with FSDP all ranks have to take part in the forward pass
        generations.main_only = config.parallel.kind != "fsdp"
        callbacks.append(generations)
    if log_config.sinks:
        callbacks += _sinks(config, stack)
    return callbacks


def task_evaluator(
    config: RunConfig, assembly: "Assembly", directory: Path, pause: Callable[[], None]
) -> "TaskEvaluator | None":
    """Return the evaluator of eval.tasks, or None.

    Args:
        config: The run's config.
        assembly: The assembled run.
        directory: The run directory.
        pause: To be called often during an evaluation; it raises an exception if the run has to stop.
    """
    section = config.eval.tasks
    if section is None:
        return None
    from whet.evaluation.task_evaluator import TaskEvaluator, load_run_tasks

    return TaskEvaluator(
        assembly.recipe.tasks or load_run_tasks(section, config.eval.early_stop),
        section,
        model=assembly.model,
        tokenizer=assembly.tokenizer,
        directory=directory,
        pause=pause,
        world=assembly.build.world,
    )


def _limits(run: Run, flops_per_token: float | None) -> list[Callback]:
    """Return the callbacks that stop a run before its last step: budget, memory limit and time limit."""
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


def _sinks(config: RunConfig, stack: contextlib.ExitStack) -> list[Callback]:
    from whet.training.observe.metric_sinks import SinkCallback
    from whet.training.observe.sink_backends import SINKS

    sinks: list[Callback] = []
    for name in config.log.sinks:
        sink = SinkCallback(name, SINKS[name](), every=config.log.every)
        stack.callback(sink.close)
        sinks.append(sink)
    return sinks


def training_flops(config: RunConfig, assembly: "Assembly") -> float | None:
    """Return the training FLOPs per token, or None if they cannot be counted for this model."""
    if not isinstance(assembly.model, LanguageModel):
        return None
    length, supervised = _typical_example(config, assembly.data)
    return training_flops_per_token(assembly.model, assembly.objective, length=length, supervised=supervised)


def peak_tflops(assembly: "Assembly") -> float | None:
    """Return the peak TFLOPS of all devices of a run, or None for CPUs, whose peak is not known."""
    if assembly.device.type == "cpu":
        return None
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return devices * find_peak(assembly.device).tflops(assembly.precision.compute)


def _typical_example(config: RunConfig, data: Any) -> tuple[int, float]:  # Any: RunData or MixData
    """Return the mean length of the training examples, and the supervised fraction of their tokens."""
    parts = data.parts.values() if config.parts() else [data]
    documents = [examples.sides for part in parts for examples in training_entries(part.examples)]
    if not documents:  # there are only prompts, and the length of their completions is not known yet
        return config.data.max_length, 1.0
    tokens = sum(int(sides.lengths.sum()) for sides in documents)
    supervised = sum(sides.supervised for sides in documents)
    return round(tokens / sum(map(len, documents))), supervised / tokens


def _probes(probes: Probes, assembly: "Assembly") -> list[Callback]:
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

    callbacks: list[Callback] = []
    if probes.curvature:
        callbacks.append(LossCurvature(probes.curvature))
    if probes.weights:
        callbacks.append(WeightStats(probes.weights))
    if probes.rank:
        callbacks.append(EffectiveRank(probes.rank))
    if not assembly.recipe.has_batches_at_start:
        kind = assembly.build.config.objective.kind
        log.info("probes: only curvature, weights and rank, because %s has no batches before training", kind)
        return callbacks
    batches = probe_batches(assembly.stream, assembly.objective)
    if probes.gradients:
        callbacks.append(GradientStats(batches[0], probes.gradients))
    if probes.noise:
        callbacks.append(GradientNoise(batches, probes.noise))
    if not isinstance(assembly.model, LanguageModel):
        log.info("probes: no activations and no attention, because this is not a language model")
        return callbacks
    if probes.activations:
        callbacks.append(ActivationStats(batches[0], probes.activations, eps=probes.sparsity_eps))
    if probes.attention:
        callbacks.append(AttentionEntropy(batches[0], probes.attention))
    return callbacks
