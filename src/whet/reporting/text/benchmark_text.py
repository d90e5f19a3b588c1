"""Results of benchmark tasks as a text table and as cells of a page."""

from collections.abc import Iterator, Sequence

from whet.evaluation.task_result import Score, TaskResult
from whet.reporting.formatting import align_columns
from whet.studies.compare_benchmarks import BenchmarkComparison
from whet.studies.paired_items import ItemComparison

COMPARISON_HEADINGS = ("task", "metric", "group", "value", "difference", "95% interval", "p (Holm)", "test")
COMPARISON_NOTE = (
    "Differences are to the first group, over the items that both have; the interval is a paired bootstrap "
    "over items. McNemar A:B: only the first group solved A items, only this group solved B."
)
HEADINGS = ("task", "version", "shots", "items", "metric", "value", "stderr", "overlap", "without overlap")


def results_text(results: Sequence[TaskResult]) -> str:
    """Return a table with one line per metric of each task."""
    rows = [HEADINGS, *result_rows(results)]
    used = len(HEADINGS) if any(result.contamination for result in results) else -2
    return align_columns([row[:used] for row in rows])


def result_rows(results: Sequence[TaskResult]) -> Iterator[tuple[str, ...]]:
    """Yield one row per metric, under HEADINGS; a task is named once."""
    for result in results:
        facts = (result.task, result.version, _shots_text(result), _items_text(result))
        for index, (name, score) in enumerate(result.scores.items()):
            yield (
                *(facts if index == 0 else ("", "", "", "")),
                name,
                *_score_cells(score),
                *_contamination_cells(result, name),
            )


def _shots_text(result: TaskResult) -> str:
    return f"{result.shots}, chat" if result.chat else str(result.shots)


def _items_text(result: TaskResult) -> str:
    return f"{result.items:,}" if result.limit is None else f"first {result.items:,}"


def _score_cells(score: Score) -> tuple[str, str]:
    return f"{score.value:.4f}", "" if score.stderr is None else f"± {score.stderr:.4f}"


def _contamination_cells(result: TaskResult, metric: str) -> tuple[str, str]:
    """Return the fraction of items that overlap with training data, and the metric over the others."""
    contamination = result.contamination
    if contamination is None:
        return "", ""
    clean = contamination.clean_scores.get(metric)
    return (
        f"{contamination.overlapping:,} of {contamination.items:,}",
        "-" if clean is None else f"{clean:.4f}",
    )


def comparison_rows(
    comparisons: Sequence[BenchmarkComparison], names: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield one row per group of each metric, under COMPARISON_HEADINGS; names are those of the groups."""
    for comparison in comparisons:
        columns = zip(
            names,
            comparison.values,
            comparison.stderrs,
            comparison.paired,
            comparison.p_adjusted,
            strict=True,
        )
        for index, (name, value, stderr, paired, p) in enumerate(columns):
            title = (comparison.task, comparison.metric) if index == 0 else ("", "")
            yield (*title, name, _value_text(value, stderr), *_paired_cells(paired, p))


def _value_text(value: float | None, stderr: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")


def _paired_cells(paired: ItemComparison | None, p: float | None) -> tuple[str, str, str, str]:
    if paired is None or p is None:
        return "", "", "", ""
    low, high = paired.interval
    counts = "" if paired.only_first is None else f" {paired.only_first}:{paired.only_second}"
    test = f"{paired.test}{counts}, {paired.items:,} items"
    return f"{paired.difference:+.4f}", f"{low:+.4f} to {high:+.4f}", _p_text(p), test


def _p_text(p: float) -> str:
    return f"{p:.2g}" if p >= 1e-12 else "<1e-12"  # smaller ones are lost in rounding
