"""`whet teach`: store teachers' top-k log-probabilities, for distillation without a teacher in memory."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from whet.config.objectives.distill import DistillObjective
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.batches import iter_batches_once
from whet.data.packing import StepSettings
from whet.data.run_data import RunData
from whet.data.tokens.examples import StoredExamples
from whet.data.tokens.teacher_logprobs import TeacherTargets, targets_to_bytes, write_teacher_logprobs
from whet.errors import ConfigError, ModelError
from whet.hardware import choose_device, choose_precision
from whet.model_io.fingerprints import config_file_digest, weight_files_digest
from whet.model_io.tokenizer import load_model_tokenizer, new_tokenizer
from whet.models.language_model import LanguageModel, eval_mode
from whet.ops.kl_divergence import top_logprobs
from whet.planning.model_facts import model_facts
from whet.recipes.frozen_models import load_teacher
from whet.recipes.registry import recipe_for, record_needs
from whet.recipes.teachers import require_examples, teacher_logprobs_path

log = logging.getLogger("whet")


def store_teacher_logprobs(config: RunConfig) -> None:
    """Compute the log-probabilities of a config's offline teachers, and store them next to the tokens."""
    parts = {
        name: part
        for name, part in (config.parts() or {"": config}).items()
        if isinstance(part.objective, DistillObjective) and part.objective.offline is not None
    }
    if not parts:
        raise ConfigError(
            "this config has no offline teacher",
            hint="set objective: {kind: distill, teacher: NAME, offline: {top_k: 64}}",
        )
    tokenizer = _tokenizer(config)
    facts = model_facts(config.language_model, tokens=len(tokenizer))
    device = choose_device(config.run.device)
    dtype = choose_precision(config.run.precision, device).frozen
    for part in parts.values():
        section = part.objective
        assert isinstance(section, DistillObjective)
        data = RunData(part, record_needs(part))
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
                _store_logprobs(teacher, name, split, require_examples(examples), section, steps=data.steps)


def _tokenizer(config: RunConfig) -> Any:  # Any: a transformers tokenizer
    """Return the tokenizer that the run will use."""
    if isinstance(config.language_model, Preset):
        return new_tokenizer(config.language_model, recipe_for(config).open_data().training_texts())
    if (tokenizer := load_model_tokenizer(config.language_model)) is None:
        raise ModelError(f"{config.model} has no tokenizer, so it cannot read records")
    return tokenizer


def _store_logprobs(
    teacher: LanguageModel,
    name: str,
    split: str,
    examples: StoredExamples,
    section: DistillObjective,
    *,
    steps: StepSettings,
) -> None:
    assert section.offline is not None
    path, top_k = (
        teacher_logprobs_path(name, examples, section),
        min(section.offline.top_k, teacher.vocab_size),
    )
    log.info(
        "%s: computing the top %d tokens of %s for %d supervised tokens",
        split,
        top_k,
        name,
        examples.supervised,
    )
    facts = {
        "teacher": name,
        "weights": weight_files_digest(name),
        "config": config_file_digest(name),
        "vocab_size": teacher.vocab_size,
        "top_k": top_k,
    }
    write_teacher_logprobs(path, _sort_by_index(_compute_logprobs(teacher, examples, steps, top_k)), facts)
    log.info("%s: %.1f MB in %s", split, path.stat().st_size / 1e6, path)


def _compute_logprobs(
    teacher: LanguageModel, examples: StoredExamples, steps: StepSettings, top_k: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the index of each example and its encoded log-probabilities, in micro-batch order."""
    with eval_mode(teacher):
        for indices, batch in iter_batches_once(examples, steps):
            device_batch = batch.to(teacher.device)
            top_tokens = top_logprobs(teacher.states(device_batch), teacher.head(), top_k=top_k)
            ids, logprobs = (values.cpu().numpy() for values in top_tokens)
            ends = np.cumsum(np.bincount(batch.examples.numpy(), minlength=len(indices)))
            for index, stop, start in zip(indices, ends, (0, *ends), strict=False):
                yield index, targets_to_bytes(TeacherTargets(ids[start:stop], logprobs[start:stop]))


def _sort_by_index(chunks: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield chunks in index order; few are buffered, because micro-batches only reorder within a step."""
    waiting: dict[int, bytes] = {}
    next_index = 0
    for index, chunk in chunks:
        waiting[index] = chunk
        while next_index in waiting:
            yield waiting.pop(next_index)
            next_index += 1
