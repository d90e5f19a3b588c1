"""Compare groups of runs on the benchmark tasks that were evaluated for them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from whet.evaluation.task_result import TaskResult
from whet.runs.run_files import RunFiles
from whet.studies.paired_items import ItemComparison, compare_items
from whet.studies.statistics import holm, mean

Setting = tuple[str, str, int, int | None, bool]  # task, version, shots, limit, chat


@dataclass(frozen=True)
class BenchmarkComparison:
    """One metric of one task in all groups."""

    task: str  # with its settings, where they are not the task's own
    metric: str
    higher_is_better: bool
    values: list[float | None]  # the mean over the runs of each group; None: not evaluated
    stderrs: list[float | None]  # of single runs, as the harness computes them
    paired: list[ItemComparison | None]  # each group against the first; None for the first itself
    p_adjusted: list[float | None]  # Holm's correction over the groups


def compare_benchmarks(groups: Sequence[Sequence[RunFiles]]) -> list[BenchmarkComparison]:
    """Return the tasks that at least two groups have results for, the latest result of each run."""
    return compare_task_results([[run.evaluations for run in runs] for runs in groups])


def compare_task_results(groups: Sequence[Sequence[Sequence[TaskResult]]]) -> list[BenchmarkComparison]:
    """Return the tasks that at least two groups of models have results for, the latest of each model."""
    latest = [[_latest_results(results) for results in models] for models in groups]
    settings = list(dict.fromkeys(key for runs in latest for results in runs for key in results))
    comparisons = []
    for setting in settings:
        results = [[run[setting] for run in runs if setting in run] for runs in latest]
        if sum(bool(group) for group in results) < 2:
            continue
        metrics = dict.fromkeys(name for group in results for result in group for name in result.scores)
        comparisons += [_compare(setting, metric, results) for metric in metrics]
    return comparisons


def _latest_results(results: Sequence[TaskResult]) -> dict[Setting, TaskResult]:
    return {
        (result.task, result.version, result.shots, result.limit, result.chat): result for result in results
    }


def _compare(setting: Setting, metric: str, results: Sequence[Sequence[TaskResult]]) -> BenchmarkComparison:
    scores = [[result.scores[metric] for result in group if metric in result.scores] for group in results]
    items = [_mean_item_scores(group, metric) for group in results]
    first = next(group for group in scores if group)
    paired = [None, *(compare_items(items[0], each) for each in items[1:])]
    return BenchmarkComparison(
        task=_title(setting),
        metric=metric,
        higher_is_better=first[0].higher_is_better,
        values=[mean([score.value for score in group]) if group else None for group in scores],
        stderrs=[group[0].stderr if len(group) == 1 else None for group in scores],
        paired=paired,
        p_adjusted=_adjusted_p_values(paired),
    )


def _adjusted_p_values(paired: Sequence[ItemComparison | None]) -> list[float | None]:
    adjusted = iter(holm([each.p for each in paired if each is not None]))
    return [None if each is None else next(adjusted) for each in paired]


def _mean_item_scores(results: Sequence[TaskResult], metric: str) -> Mapping[str, float]:
    """Return the score of each item, averaged over the runs of a group."""
    scores: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for item, score in zip(result.item_ids, result.item_scores.get(metric, ()), strict=False):
            scores[item].append(score)
    return {item: mean(values) for item, values in scores.items() if len(values) == len(results)}


def _title(setting: Setting) -> str:
    task, _, shots, limit, chat = setting
    parts = [
        f"{shots}-shot" if shots else "",
        f"first {limit:,} items" if limit is not None else "",
        "chat" if chat else "",
    ]
    details = ", ".join(part for part in parts if part)
    return f"{task} ({details})" if details else task


def benchmarks_json(comparisons: Sequence[BenchmarkComparison]) -> list[dict[str, Any]]:  # Any: JSON values
    """Return the comparisons as JSON values."""
    return [
        {
            **{name: value for name, value in vars(comparison).items() if name != "paired"},
            "against_first": [
                None if each is None else {**asdict(each), "difference": each.difference}
                for each in comparison.paired
            ],
        }
        for comparison in comparisons
    ]
