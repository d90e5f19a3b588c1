"""Settings that look wrong for a model and its data: what is told, and what would be better."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from whet.config.checks.unread_keys import unread
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.class_balance import class_counts
from whet.data.run_data import RunData
from whet.data.tokens.examples import StoredExamples
from whet.errors import ModelError
from whet.model_io.tokenizer import new_tokenizer, tokenizer_of
from whet.planning.model_facts import model_facts
from whet.recipes.mix import MixData
from whet.recipes.registry import recipe_for

Severity = Literal["info", "warn", "error"]

SMALL_BATCH, LARGE_BATCH = 8, 256  # examples in a step
IMBALANCED = 5.0  # the largest class over the smallest, from which one epoch is few
# the highest usual learning rate, by the model's size: adapters, and every weight
LEARNING_RATES = ((3e8, 2e-3, 3e-4), (2e9, 1e-3, 1e-4), (1.3e10, 4e-4, 5e-5), (math.inf, 2e-4, 2e-5))


@dataclass(frozen=True)
class Advice:
    """One finding."""

    key: str  # of the config
    severity: Severity
    message: str
    recommendation: str = ""


def advise(config: RunConfig) -> list[Advice]:
    """Every finding, the gravest first; one `info` a check that found nothing wrong."""
    data: Any = recipe_for(config).open_data()  # Any: RunData or MixData, of the texts that it reads
    tokenizer = _tokenizer(config, data)
    data.prepare(tokenizer)
    found = [
        *_learning_rate(config, model_facts(config.language_model, tokens=len(tokenizer)).parameters),
        *_alpha(config),
        *_clip(config),
        *_schedule(config, data),
        *(Advice(key, "warn", f"it has no effect with {choice}") for key, choice in unread(config).items()),
    ]
    if isinstance(data, RunData):
        found += _of_examples(config, data)
    else:
        for place, part in enumerate(data.parts.values()):
            found += [_of_part(place, advice) for advice in _of_examples(part.config, part)]
    order = ("error", "warn", "info")
    return sorted(found, key=lambda advice: order.index(advice.severity))


def _of_examples(config: RunConfig, data: RunData) -> Iterator[Advice]:
    """What the examples tell; of prompts that are yet to be answered, nothing."""
    if data.needs.prompts:
        return
    train = data.examples["train"].sides
    yield from _batch(config, data)
    yield from _max_length(config, train)
    yield from _epochs(config, data, train)


def _of_part(place: int, advice: Advice) -> Advice:
    """The same under the key of a mix's part, which has a size of its steps and data of its own."""
    return replace(advice, key=f"objective.parts.{place}.{advice.key.removeprefix('run.')}")


def _tokenizer(config: RunConfig, data: RunData | MixData) -> Any:  # Any: a transformers tokenizer
    if isinstance(config.language_model, Preset):
        return new_tokenizer(config.language_model, data.texts(), kept_in=None)
    if (found := tokenizer_of(config.language_model)) is None:
        raise ModelError(f"{config.model} has no tokenizer, so it cannot read records")
    return found


def _learning_rate(config: RunConfig, parameters: int | None) -> Iterator[Advice]:
    key, lr = "optim.lr", config.optim.lr
    if parameters is None or config.optim.name not in ("adam", "adamw", "adamw8bit"):
        yield Advice(key, "info", f"{lr:g}: what is usual for this model and optimizer is not known")
        return
    full = config.method.kind == "full"
    adapters, whole = next(pair[1:] for pair in LEARNING_RATES if parameters <= pair[0])
    usual = whole if full else adapters
    what = (
        f"{'every weight' if full else 'adapters'} of a model of {parameters / 1e6:,.0f} million parameters"
    )
    if isinstance(config.language_model, Preset):
        yield Advice(key, "info", f"{lr:g}: a model from scratch takes more than the rates known here")
    elif lr > 10 * usual:
        yield Advice(key, "error", f"{lr:g} will most likely destroy {what}", f"{usual:g} or less")
    elif lr > 2 * usual:
        yield Advice(key, "warn", f"{lr:g} is high for {what}", f"{usual:g} or less")
    elif lr < usual / 100:
        yield Advice(key, "warn", f"{lr:g} is so low that little will be learned of {what}", f"{usual / 4:g}")
    else:
        yield Advice(key, "info", f"{lr:g} is usual for {what}")


def _batch(config: RunConfig, data: RunData) -> Iterator[Advice]:
    run, examples = config.run, data.examples["train"]
    if run.batch_size is not None:
        key, size = "run.batch_size", float(run.batch_size)
    else:
        key, size = "run.batch_tokens", (run.batch_tokens or 0) / max(1.0, float(examples.lengths.mean()))
    shown = f"{size:.3g} examples in a step"
    if size > len(examples):
        yield Advice(key, "error", f"{shown}, and there are {len(examples)} in all", "about 16 examples")
    elif size < SMALL_BATCH:
        yield Advice(key, "warn", f"{shown}: the gradient is noisy", "about 16 examples")
    elif size > LARGE_BATCH:
        yield Advice(key, "warn", f"{shown}: few updates for much work", "16 to 64 examples")
    else:
        yield Advice(key, "info", shown)


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
            f"{method.alpha:g} with rank {method.rank}: most recipes take alpha = 2 x rank, and tune their "
            "learning rates for it",
            f"method.alpha={2 * method.rank}",
        )


def _max_length(config: RunConfig, train: StoredExamples) -> Iterator[Advice]:
    key, limit = "data.max_length", config.data.max_length
    sizes = np.diff(train.store.bounds)
    p99 = int(np.percentile(sizes, 99))
    over = float((sizes > limit).mean())
    enough = 2 ** math.ceil(math.log2(max(2, p99)))
    if over > 0.5:
        yield Advice(key, "error", f"{over:.0%} of the examples are longer than {limit}", f"{enough}")
    elif over > 0.01:
        yield Advice(key, "warn", f"{over:.0%} of the examples are longer than {limit}", f"{enough}")
    elif limit > 2 * enough and not config.data.pack:
        yield Advice(
            key,
            "warn",
            f"{limit}, and 99% of the examples have at most {p99} tokens",
            f"{enough}: less padding",
        )
    else:
        yield Advice(key, "info", f"{limit}; 99% of the examples have at most {p99} tokens")


def _clip(config: RunConfig) -> Iterator[Advice]:
    clip = config.optim.clip
    if clip is None:
        yield Advice("optim.clip", "warn", "gradients are not clipped: one odd batch can undo a run", "1.0")
    else:
        yield Advice("optim.clip", "info", f"gradients are clipped at {clip:g}")


def _schedule(config: RunConfig, data: RunData | MixData) -> Iterator[Advice]:
    steps, key = _steps(config, data), "optim.warmup"
    if steps is None:
        return
    if config.optim.warmup >= steps:
        yield Advice(
            key, "error", f"{config.optim.warmup} steps of {steps}: the rate never arrives", f"{steps // 10}"
        )
    elif config.optim.warmup > steps / 3:
        yield Advice(key, "warn", f"{config.optim.warmup} of {steps} steps", f"{max(1, steps // 10)}")


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
            "data.train", "error", f"no record is of the class {absent}", "add some, or drop the class"
        )
    if ratio > IMBALANCED and epochs < 2:
        yield Advice(
            key,
            "warn",
            f"{epochs:.2g} epochs, and the largest class is {ratio:.1f} times the smallest",
            "at least 2 epochs: the rare classes are hardly seen",
        )
    else:
        yield Advice(key, "info", f"{epochs:.2g} epochs; the largest class is {ratio:.1f} times the smallest")
