"""Open the teacher log-probabilities that `whet teach` stored."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from whet.config.objectives.distill import DistillObjective
from whet.data.tokens.examples import StoredExamples, StoredPairs
from whet.data.tokens.teacher_logprobs import TeacherLogprobs
from whet.data.tokens.teacher_logprobs import open_teacher_logprobs as open_logprobs_file
from whet.data.tokens.token_store import TokenStore
from whet.errors import DataError
from whet.model_io.fingerprints import config_file_digest, weight_files_digest
from whet.recipes.frozen_models import check_same_vocab_size

log = logging.getLogger("whet")

Examples = Mapping[str, StoredExamples | StoredPairs]


def open_teacher_logprobs(
    examples: Examples, section: DistillObjective, *, student: str, vocab_size: int
) -> dict[str, list[TeacherLogprobs]]:
    """Return the stored log-probabilities of all teachers for each split.

    Args:
        examples: The examples of each split.
        section: The `objective` section of the config.
        student: The name of the trained model, for messages.
        vocab_size: The vocabulary size of the trained model.

    Raises:
        DataError: They are missing, or the teacher or the examples have changed since.
    """
    return {
        split: [
            _open(
                name, split, require_examples(split_examples), section, student=student, vocab_size=vocab_size
            )
            for name, _ in section.teachers
        ]
        for split, split_examples in examples.items()
    }


def _open(
    name: str,
    split: str,
    examples: StoredExamples,
    section: DistillObjective,
    *,
    student: str,
    vocab_size: int,
) -> TeacherLogprobs:
    logprobs = open_logprobs_file(
        teacher_logprobs_path(name, examples, section), examples.supervised_counts()
    )
    if logprobs is None:
        raise DataError(
            f"there are no stored log-probabilities of {name} for the {split} records "
            "(they depend on the tokens, data.max_length and offline.top_k)",
            hint="compute them with: whet teach CONFIG",
        )
    check_same_vocab_size(name, logprobs.facts["vocab_size"], student, vocab_size)
    current_marks = {"weights": weight_files_digest(name), "config": config_file_digest(name)}
    for part, mark in current_marks.items():
        if mark is not None and mark != logprobs.facts.get(part, mark):
            raise DataError(
                f"the {part} of {name} changed after its log-probabilities of {split} were stored",
                hint="compute them again with: whet teach CONFIG",
            )
    log.info("%s: using stored log-probabilities of %s", split, name)
    return logprobs


def teacher_logprobs_path(name: str, examples: StoredExamples, section: DistillObjective) -> Path:
    """Return the file of a teacher's log-probabilities, next to the tokens of the examples.

    Its name depends on the teacher, on top_k, and on how the stored tokens are split into examples.
    """
    assert section.offline is not None
    assert isinstance(examples.store, TokenStore)  # offline teachers do not support data.stream
    key = hashlib.sha256(f"{name} {section.offline.top_k} ".encode())
    key.update(np.stack((examples.starts, examples.stops)).tobytes())
    return examples.store.directory / f"teacher-{key.hexdigest()[:32]}.bin"


def require_examples(examples: StoredExamples | StoredPairs) -> StoredExamples:
    """Return the examples, which must not be preference pairs: distillation does not support those."""
    assert isinstance(examples, StoredExamples)
    return examples
