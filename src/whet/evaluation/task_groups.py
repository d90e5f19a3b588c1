"""Totals of groups of benchmark tasks, as lm-evaluation-harness aggregates them."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from whet.evaluation.task_result import Score, TaskResult

GroupObject = Any  # Any: a group of the harness, which has no types


def group_results(
    groups: Mapping[str, GroupObject], results: Mapping[str, TaskResult], *, stored: Sequence[TaskResult] = ()
) -> Iterator[tuple[TaskResult, bool]]:
    """Yield the total of each group that defines one, and whether it is new.

    Args:
        groups: groups by name, as `load_tasks` returns them.
        results: the results of all tasks of the groups, by name.
        stored: results that are not new.
    """
    known = {result.key: result for result in stored}
    for name, group in groups.items():
        members = [results[task.task_name] for task in group.get_all_tasks()]
        if not group.has_aggregation or not members:
            continue
        key = _group_key(group, members)
        if key in known:
            yield known[key], False
        else:
            yield _aggregate(name, group, members, key=key), True


def _group_key(group: GroupObject, members: Sequence[TaskResult]) -> str:
    parts = [group.name, group.version, group.aggregate_metric_list, [member.key for member in members]]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _aggregate(name: str, group: GroupObject, members: Sequence[TaskResult], *, key: str) -> TaskResult:
    totals = group.aggregate({member.task: _harness_metrics(member) for member in members})
    higher = {_full_name(name): score.higher_is_better for m in members for name, score in m.scores.items()}
    scores = {}
    for full_name, value in totals.items():
        metric, _, filter_name = full_name.partition(",")
        if not filter_name or metric.endswith("_stderr"):
            continue
        stderr = totals.get(f"{metric}_stderr,{filter_name}")
        scores[_short_name(full_name)] = Score(
            float(value), None if isinstance(stderr, str | None) else float(stderr), higher[full_name]
        )
    shots = {member.shots for member in members}
    return TaskResult(
        key=key,
        task=name,
        version=str(group.version),
        shots=shots.pop() if len(shots) == 1 else 0,
        items=sum(member.items for member in members),
        limit=members[0].limit,
        chat=members[0].chat,
        scores=scores,
        item_ids=[f"{member.task} {item}" for member in members for item in member.item_ids],
        item_scores=_item_scores(group, members, scores),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        tasks=[member.task for member in members],
    )


def _harness_metrics(result: TaskResult) -> dict[str, Any]:  # Any: numbers, and "N/A" as in the harness
    metrics: dict[str, Any] = {"sample_len": result.items}
    for name, score in result.scores.items():
        metric, _, filter_name = _full_name(name).partition(",")
        metrics[f"{metric},{filter_name}"] = score.value
        metrics[f"{metric}_stderr,{filter_name}"] = "N/A" if score.stderr is None else score.stderr
    return metrics


def _item_scores(
    group: GroupObject, members: Sequence[TaskResult], scores: Mapping[str, Score]
) -> dict[str, list[float]]:
    """Return the scores of all items, for totals that are means over the items."""
    weighted = {each.metric for each in group.aggregate_metric_list if each.weight_by_size}
    return {
        name: [score for member in members for score in member.item_scores[name]]
        for name in scores
        if name.partition(",")[0] in weighted and all(name in member.item_scores for member in members)
    }


def _full_name(name: str) -> str:
    """Return METRIC,FILTER; a score without a filter has the filter "none"."""
    return name if "," in name else f"{name},none"


def _short_name(full_name: str) -> str:
    return full_name.removesuffix(",none")
