"""The loss and the answer of a model per record, as results that can be compared record by record."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from whet.data.batches import iter_batches_once
from whet.data.tokens.tokenize import Question
from whet.evaluation.evaluate_model import ModelEvaluation
from whet.evaluation.exact_match import compare_answers
from whet.evaluation.task_result import Score, TaskResult
from whet.models.language_model import eval_mode
from whet.ops.logprobs import token_logprobs

# name of a check, and its score of each answer
Checks = Sequence[tuple[str, Callable[[Sequence[str], Sequence[Question]], list[float]]]]


@dataclass(frozen=True)
class RecordLosses:
    """Sums over the supervised tokens of each record."""

    ids: list[str]  # [records]
    losses: np.ndarray  # [records] negative log-likelihoods, weighted if the records have weights
    weights: np.ndarray  # [records] numbers of tokens, or sums of their weights
    byte_counts: np.ndarray | None  # [records]; None: the records have weights


def record_losses(evaluation: ModelEvaluation) -> RecordLosses:
    """Compute the loss of each record; windows of a split record are added up."""
    examples, model, sizes = evaluation.examples, evaluation.model, evaluation.token_bytes
    count = int(examples.records.max()) + 1
    losses, weights, byte_counts = np.zeros(count), np.zeros(count), np.zeros(count)
    has_weights = False
    with eval_mode(model):
        for indices, batch in iter_batches_once(examples, evaluation.settings):
            on_device = batch.to(model.device)
            targets = on_device.supervised_targets
            logprobs = token_logprobs(model.states(on_device), model.head(), targets).double().cpu().numpy()
            token_weights = batch.supervised_weights
            has_weights |= token_weights is not None
            scale = np.ones(len(logprobs)) if token_weights is None else token_weights.double().numpy()
            record = examples.records[np.asarray(indices)[batch.examples.numpy()]]  # [supervised tokens]
            np.add.at(losses, record, -logprobs * scale)
            np.add.at(weights, record, scale)
            np.add.at(byte_counts, record, sizes[targets.cpu().numpy()])
    used = np.flatnonzero(weights)
    return RecordLosses(
        _unique([examples.store.origin(int(index)) for index in used]),
        losses[used],
        weights[used],
        None if has_weights or not byte_counts[used].all() else byte_counts[used],
    )


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number after repeated ones."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def ratio_scores(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Return one score per record whose mean is sum(numerators) / sum(denominators).

    A loss per token is a ratio of two sums over records. The scores are its linearization (delta method), so
    that their standard error and their paired differences are those of the ratio.
    """
    ratio = numerators.sum() / denominators.sum()
    scores: np.ndarray = ratio + (numerators - ratio * denominators) / denominators.mean()
    return scores


def loss_results(losses: RecordLosses, *, task: str, data_version: str, key: str) -> list[TaskResult]:
    """Return the loss and the perplexity per token, and the bits per byte.

    Results are only compared if their versions are equal. Losses per token are comparable between models that
    split the records into the same tokens, bits per byte between all models.
    """
    per_token = ratio_scores(losses.losses, losses.weights)
    loss = float(per_token.mean())
    perplexity = math.exp(min(loss, 700.0))
    metrics = {"loss": per_token, "perplexity": perplexity * (1 + per_token - loss)}
    tokens = hashlib.sha256(losses.weights.tobytes()).hexdigest()[:8]
    results = [_result(f"{key}-token", task, f"{data_version}-{tokens}", losses.ids, metrics, lower=True)]
    if losses.byte_counts is not None:
        bits = ratio_scores(losses.losses / math.log(2), losses.byte_counts)
        results.append(
            _result(
                f"{key}-byte", task, f"{data_version}-bytes", losses.ids, {"bits_per_byte": bits}, lower=True
            )
        )
    return results


def answer_result(
    answers: Sequence[str],
    questions: Sequence[Question],
    checks: Checks,
    *,
    task: str,
    data_version: str,
    key: str,
    max_tokens: int,
) -> TaskResult:
    """Return exact match and the checks of the answers, which have at most `max_tokens` tokens."""
    correct = compare_answers(answers, questions).correct
    metrics = {"exact_match": np.asarray(correct, dtype=float)}
    metrics |= {name: np.asarray(check(answers, questions), dtype=float) for name, check in checks}
    ids = _unique([question.origin for question in questions])
    return _result(f"{key}-answers", task, f"{data_version}-{max_tokens}", ids, metrics, lower=False)


def _result(
    key: str, task: str, version: str, ids: list[str], metrics: dict[str, np.ndarray], *, lower: bool
) -> TaskResult:
    scores = {
        name: Score(float(values.mean()), _stderr(values), higher_is_better=not lower)
        for name, values in metrics.items()
    }
    return TaskResult(
        key=key,
        task=task,
        version=version,
        shots=0,
        items=len(ids),
        limit=None,
        chat=False,
        scores=scores,
        item_ids=ids,
        item_scores={name: values.tolist() for name, values in metrics.items()},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _stderr(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def evaluation_key(weights: str, evaluation: ModelEvaluation, settings: object) -> str:
    """Return a hash of everything that the results of a model on records depend on."""
    questions = [(question.tokens, question.answer) for question in evaluation.questions]
    windows = [evaluation.examples.starts.tolist(), evaluation.examples.stops.tolist()]
    parts = [weights, evaluation.examples.store.digest, windows, questions, settings]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]
