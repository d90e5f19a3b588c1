"""Advice on settings that are unusual for a model and its data."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from whet.config.checks.unread_keys import keys_without_effect
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.class_balance import class_counts
from whet.data.run_data import RunData
from whet.data.tokens.examples import StoredExamples
from whet.errors import ModelError
from whet.model_io.tokenizer import load_model_tokenizer, new_tokenizer
from whet.planning.model_facts import model_facts
from whet.recipes.mix import MixData
from whet.recipes.registry import complete_config, recipe_for

Severity = Literal["info", "warn", "error"]

SMALL_BATCH, LARGE_BATCH = 8, 256  # examples per step
IMBALANCED = 5.0  # ratio of the largest to the smallest class above which one epoch is too few
# (parameters up to, highest usual learning rate of adapters, of full fine-tuning)
LEARNING_RATES = ((3e8, 2e-3, 3e-4), (2e9, 1e-3, 1e-4), (1.3e10, 4e-4, 5e-5), (math.inf, 2e-4, 2e-5))


@dataclass(frozen=True)
class Advice:
    """One finding about a config key."""

    key: str  # config key
    severity: Severity
    message: str
    recommendation: str = ""


def advise(config: RunConfig) -> list[Advice]:
    """Return all findings, errors first; a check without problems gives an `info`."""
    config = complete_config(config)
    data: Any = recipe_for(config).open_data()  # Any: RunData or MixData
    tokenizer = _tokenizer(config, data)
    data.prepare(tokenizer)
    findings = [
        *_learning_rate(config, model_facts(config.language_model, tokens=len(tokenizer)).parameters),
        *_alpha(config),
        *_clip(config),
        *_schedule(config, data),
        *(
            Advice(key, "warn", f"has no effect with {choice}")
            for key, choice in keys_without_effect(config).items()
        ),
    ]
    if isinstance(data, RunData):
        findings += _check_examples(config, data)
    else:
        for index, part in enumerate(data.parts.values()):
            findings += [_for_part(index, advice) for advice in _check_examples(part.config, part)]
    order = ("error", "warn", "info")
    return sorted(findings, key=lambda advice: order.index(advice.severity))


def _check_examples(config: RunConfig, data: RunData) -> Iterator[Advice]:
    """Check the settings that depend on the examples; prompts of RL runs are skipped."""
    if data.needs.prompts:
        return
    train = data.examples["train"].sides
    yield from _batch(config, data)
    yield from _max_length(config, train)
    yield from _epochs(config, data, train)


def _for_part(index: int, advice: Advice) -> Advice:
    """Return the advice with the key of a part of a mix, which has its own data and batch size."""
    return replace(advice, key=f"objective.parts.{index}.{advice.key.removeprefix('run.')}")


def _tokenizer(config: RunConfig, data: RunData | MixData) -> Any:  # Any: a transformers tokenizer
    if isinstance(config.language_model, Preset):
        return new_tokenizer(config.language_model, data.training_texts(), stored_in=None)
    if (tokenizer := load_model_tokenizer(config.language_model)) is None:
        raise ModelError(f"{config.model} has no tokenizer, so its records cannot be tokenized")
    return tokenizer


def _learning_rate(config: RunConfig, parameters: int | None) -> Iterator[Advice]:
    key, lr = "optim.lr", config.optim.lr
    if parameters is None or config.optim.name not in ("adam", "adamw", "adamw8bit"):
        yield Advice(key, "info", f"{lr:g}: no usual range is known for this model and optimizer")
        return
    is_full = config.method.kind == "full"
    adapter_limit, full_limit = next(pair[1:] for pair in LEARNING_RATES if parameters <= pair[0])
    usual = full_limit if is_full else adapter_limit
    method = "full fine-tuning" if is_full else "adapters"
    size = f"{parameters / 1e6:,.0f} million" if parameters >= 1e6 else f"{parameters:,}"
    subject = f"{method} of a model with {size} parameters"
    if isinstance(config.language_model, Preset):
        yield Advice(
            key,
            "info",
            f"{lr:g}: a model trained from scratch needs higher learning rates; no usual range is known",
        )
    elif lr > 10 * usual:
        yield Advice(key, "error", f"{lr:g} will most likely diverge for {subject}", f"use {usual:g} or less")
    elif lr > 2 * usual:
        yield Advice(key, "warn", f"{lr:g} is high for {subject}", f"use {usual:g} or less")
    elif lr < usual / 100:
        yield Advice(key, "warn", f"{lr:g} is very low for {subject}", f"use about {usual / 4:g}")
    else:
        yield Advice(key, "info", f"{lr:g} is usual for {subject}")


def _batch(config: RunConfig, data: RunData) -> Iterator[Advice]:
    run, examples = config.run, data.examples["train"]
    if run.batch_size is not None:
        key, size = "run.batch_size", float(run.batch_size)
    else:
        key, size = "run.batch_tokens", (run.batch_tokens or 0) / max(1.0, float(examples.lengths.mean()))
    description = f"{size:.3g} examples per step"
    if size > len(examples) and config.data.stream is None:  # of a stream, these are the first block
        yield Advice(
            key,
            "error",
            f"{description}, but there are only {len(examples)} examples",
            "use about 16 examples",
        )
    elif size < SMALL_BATCH:
        yield Advice(key, "warn", f"{description}: the gradient is noisy", "use about 16 examples")
    elif size > LARGE_BATCH:
        yield Advice(key, "warn", f"{description}: few updates per epoch", "use 16 to 64 examples")
    else:
        yield Advice(key, "info", description)


def _alpha(config: RunConfig) -> Iterator[Advice]:
    method = config.method
    if method.kind == "full":
        return
    if method.alpha == 2 * method.rank or method.variant == "rslora":
        yield Advice("method.alpha", "info", f"{method.alpha:g} with rank {method.rank}")
    else:
        yield Advice(
            "method.alpha",
            "warn",
            f"{method.alpha:g} with rank {method.rank}: most recipes use alpha = 2 x rank, and tune their "
            "learning rates for it",
            f"set method.alpha={2 * method.rank}",
        )


def _max_length(config: RunConfig, train: StoredExamples) -> Iterator[Advice]:
    key, limit = "data.max_length", config.data.max_length
    sizes = np.diff(train.store.bounds)
    p99 = int(np.percentile(sizes, 99))
    over = float((sizes > limit).mean())
    enough = 2 ** math.ceil(math.log2(max(2, p99)))
    if over > 0.5:
        yield Advice(
            key, "error", f"{over:.0%} of the examples are longer than {limit} tokens", f"use {enough}"
        )
    elif over > 0.01:
        yield Advice(
            key, "warn", f"{over:.0%} of the examples are longer than {limit} tokens", f"use {enough}"
        )
    elif limit > 2 * enough and not config.data.pack:
        yield Advice(
            key,
            "warn",
            f"{limit}, but 99% of the examples have at most {p99} tokens",
            f"use {enough}, for less padding",
        )
    else:
        yield Advice(key, "info", f"{limit}; 99% of the examples have at most {p99} tokens")


def _clip(config: RunConfig) -> Iterator[Advice]:
    clip = config.optim.clip
    if clip is None:
        yield Advice(
            "optim.clip", "warn", "gradients are not clipped: a single bad batch can ruin the run", "use 1.0"
        )
    else:
        yield Advice("optim.clip", "info", f"gradients are clipped to a norm of {clip:g}")


def _schedule(config: RunConfig, data: RunData | MixData) -> Iterator[Advice]:
    steps, key = _steps(config, data), "optim.warmup"
    if steps is None:
        return
    if config.optim.warmup >= steps:
        yield Advice(
            key,
            "error",
            f"{config.optim.warmup} warm-up steps in a run of {steps}: the peak learning rate is not reached",
            f"use {steps // 10}",
        )
    elif config.optim.warmup > steps / 3:
        yield Advice(
            key, "warn", f"{config.optim.warmup} of {steps} steps are warm-up", f"use {max(1, steps // 10)}"
        )


def _steps(config: RunConfig, data: RunData | MixData) -> int | None:
    run = config.run
    if run.steps is not None:
        return run.steps
    if isinstance(data, MixData) or data.needs.prompts or config.data.curriculum is not None:
        return None
    stream = data.stream()
    return sum(stream.steps_in(epoch) or 0 for epoch in range(run.epochs or 0))


def _epochs(config: RunConfig, data: RunData, train: StoredExamples) -> Iterator[Advice]:
    labels, steps = data.needs.labels, _steps(config, data)
    if labels is None or steps is None or config.data.curriculum is not None:
        return
    key = "run.epochs" if config.run.epochs else "run.steps"
    epochs = config.run.epochs or steps / (data.stream().steps_in(0) or steps)
    counts = class_counts(labels, train)
    ratio = counts.max() / max(1, counts.min())
    if not counts.min():
        absent = labels.names[int(counts.argmin())]
        yield Advice(
            "data.train", "error", f"no record has the class {absent}", "add records, or remove the class"
        )
    if ratio > IMBALANCED and epochs < 2:
        yield Advice(
            key,
            "warn",
            f"{epochs:.2g} epochs, but the largest class is {ratio:.1f} times the smallest",
            "use at least 2 epochs, because rare classes are hardly seen",
        )
    else:
        yield Advice(key, "info", f"{epochs:.2g} epochs; the largest class is {ratio:.1f} times the smallest")
