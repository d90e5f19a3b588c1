"""What teachers said of the data before a run (`whet teach`), found again."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from whet.config.objectives.distill import DistillObjective
from whet.data.tokens.examples import StoredExamples, StoredPairs
from whet.data.tokens.teacher_logprobs import Teaching, open_teaching
from whet.errors import DataError
from whet.model_io.fingerprints import config_mark, weights_mark
from whet.recipes.frozen_models import refuse_other_size

log = logging.getLogger("whet")

Examples = Mapping[str, StoredExamples | StoredPairs]


def find_teachings(
    examples: Examples, section: DistillObjective, *, student: str, vocab_size: int
) -> dict[str, list[Teaching]]:
    """What `whet teach` wrote for each split, by teacher; one error where it is missing or no longer true."""
    return {
        split: [
            _teaching(name, split, plain(found), section, student=student, vocab_size=vocab_size)
            for name, _ in section.teachers
        ]
        for split, found in examples.items()
    }


def _teaching(
    name: str,
    split: str,
    examples: StoredExamples,
    section: DistillObjective,
    *,
    student: str,
    vocab_size: int,
) -> Teaching:
    found = open_teaching(teaching_path(name, examples, section), examples.supervised_counts())
    if found is None:
        raise DataError(
            f"what {name} says of the {split} records is not in the store (or of other ones: their tokens, "
            "data.max_length and offline.top_k all count)",
            hint="write it with: whet teach CONFIG",
        )
    refuse_other_size(name, found.facts["vocab_size"], student, vocab_size)
    now = {"weights": weights_mark(name), "config": config_mark(name)}
    for what, mark in now.items():
        if mark is not None and mark != found.facts.get(what, mark):
            raise DataError(
                f"{name} has other {what} than when it was asked about the {split} records",
                hint="ask it again with: whet teach CONFIG",
            )
    log.info("%s: what %s says, from the store", split, name)
    return found


def teaching_path(name: str, examples: StoredExamples, section: DistillObjective) -> Path:
    """Beside the tokens, by teacher and by what was cut out of the store."""
    assert section.offline is not None
    key = hashlib.sha256(f"{name} {section.offline.top_k} ".encode())
    key.update(np.stack((examples.starts, examples.stops)).tobytes())
    return examples.store.directory / f"teacher-{key.hexdigest()[:32]}.bin"


def plain(examples: StoredExamples | StoredPairs) -> StoredExamples:
    """Distillation learns from examples one by one."""
    assert isinstance(examples, StoredExamples)  # pairs are for preferences
    return examples
