"""`whet teach`: teachers asked once about all of a run's data, for runs that do without them."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from whet.config.objectives.distill import DistillObjective
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.batches import one_pass
from whet.data.packing import StepSettings
from whet.data.run_data import RunData
from whet.data.tokens.examples import StoredExamples
from whet.data.tokens.teacher_logprobs import Taught, as_bytes, write_teaching
from whet.errors import ConfigError, ModelError
from whet.hardware import choose_device, choose_precision
from whet.model_io.fingerprints import config_mark, weights_mark
from whet.model_io.tokenizer import new_tokenizer, tokenizer_of
from whet.models.language_model import LanguageModel, evaluating
from whet.ops.kl_divergence import top_logprobs
from whet.planning.model_facts import model_facts
from whet.recipes.frozen_models import load_teacher
from whet.recipes.registry import needs_of, recipe_for
from whet.recipes.teachers import plain, teaching_path

log = logging.getLogger("whet")


def teach(config: RunConfig) -> None:
    """Ask the offline teachers of a config about its data, and keep what they say beside the tokens."""
    parts = {
        name: part
        for name, part in (config.parts() or {"": config}).items()
        if isinstance(part.objective, DistillObjective) and part.objective.offline is not None
    }
    if not parts:
        raise ConfigError(
            "no teacher of this config is to be asked before the run",
            hint="set objective: {kind: distill, teacher: NAME, offline: {top_k: 64}}",
        )
    tokenizer = _tokenizer(config)
    facts = model_facts(config.language_model, tokens=len(tokenizer))
    device = choose_device(config.run.device)
    dtype = choose_precision(config.run.precision, device).frozen
    for part in parts.values():
        section = part.objective
        assert isinstance(section, DistillObjective)
        data = RunData(part, needs_of(part))
        data.prepare(tokenizer)
        for name, _ in section.teachers:
            teacher = load_teacher(
                name,
                dtype=dtype,
                device=device,
                student=facts.name,
                vocab_size=facts.vocab_size,
                tokenizer=tokenizer,
            )
            for split, examples in data.examples.items():
                _ask(teacher, name, split, plain(examples), section, steps=data.steps)


def _tokenizer(config: RunConfig) -> Any:  # Any: a transformers tokenizer
    """The one that the run will have."""
    if isinstance(config.language_model, Preset):
        return new_tokenizer(config.language_model, recipe_for(config).open_data().texts())
    if (found := tokenizer_of(config.language_model)) is None:
        raise ModelError(f"{config.model} has no tokenizer, so it cannot read records")
    return found


def _ask(
    teacher: LanguageModel,
    name: str,
    split: str,
    examples: StoredExamples,
    section: DistillObjective,
    *,
    steps: StepSettings,
) -> None:
    assert section.offline is not None
    path, top_k = teaching_path(name, examples, section), min(section.offline.top_k, teacher.vocab_size)
    log.info("%s: asking %s for the %d likeliest of %d targets", split, name, top_k, examples.supervised)
    facts = {
        "teacher": name,
        "weights": weights_mark(name),
        "config": config_mark(name),
        "vocab_size": teacher.vocab_size,
        "top_k": top_k,
    }
    write_teaching(path, _in_order(_answers(teacher, examples, steps, top_k)), facts)
    log.info("%s: %.1f MB in %s", split, path.stat().st_size / 1e6, path)


def _answers(
    teacher: LanguageModel, examples: StoredExamples, steps: StepSettings, top_k: int
) -> Iterator[tuple[int, bytes]]:
    """The place of each example and what is stored of its targets, in the order of the micro-batches."""
    with evaluating(teacher):
        for places, batch in one_pass(examples, steps):
            here = batch.to(teacher.device)
            likeliest = top_logprobs(teacher.states(here), teacher.head(), top_k=top_k)
            ids, logprobs = (values.cpu().numpy() for values in likeliest)
            ends = np.cumsum(np.bincount(batch.examples.numpy(), minlength=len(places)))
            for place, stop, start in zip(places, ends, (0, *ends), strict=False):
                yield place, as_bytes(Taught(ids[start:stop], logprobs[start:stop]))


def _in_order(answers: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    """By place: micro-batches mix examples of one step only, so that few wait."""
    waiting: dict[int, bytes] = {}
    following = 0
    for place, content in answers:
        waiting[place] = content
        while following in waiting:
            yield waiting.pop(following)
            following += 1
