"""The comparison of runs as text tables."""

from whet.config.metric_direction import lower_is_better
from whet.data.inspect.token_text import to_visible_text
from whet.reporting.formatting import align_columns, format_number
from whet.reporting.text.benchmark_text import COMPARISON_HEADINGS, COMPARISON_NOTE, comparison_rows
from whet.studies.compare_runs import GroupDifference, RunComparison, SeedScores, setting_text

_MAX_OTHER_METRICS = 12
_MAX_COLUMNS = 4
_MAX_CELL_LENGTH = 40
STATISTICS = ("group", "runs", "mean", "std", "95% interval", "difference", "Hedges g", "p (Holm)")


def comparison_text(comparison: RunComparison) -> str:
    """Return tables of the compared metric, the other metrics and the config differences."""
    parts = [
        f"{comparison.metric}, {'lower' if lower_is_better(comparison.metric) else 'higher'} is better",
        _statistics(comparison),
    ]
    if verdict := best_text(comparison):
        parts.append(verdict)
    names = [group.name for group in comparison.groups]
    transposed = len(names) > _MAX_COLUMNS  # one line per group instead of one per metric
    if others := comparison.metrics[1:]:
        shown = others[: _MAX_COLUMNS if transposed else _MAX_OTHER_METRICS]
        rows = [("other metrics", *names)]
        rows += [(name, *(spread_text(group.scores(name)) for group in comparison.groups)) for name in shown]
        omitted = f"\n{len(others) - len(shown)} more metrics: see --json" if len(others) > len(shown) else ""
        parts.append(align_columns(list(zip(*rows, strict=True)) if transposed else rows) + omitted)
    if comparison.differences:
        rows = [("config", *names)]
        rows += [(key, *map(_truncate, values)) for key, values in comparison.differences.items()]
        parts.append(align_columns(list(zip(*rows, strict=True)) if transposed else rows))
    if comparison.benchmarks:
        rows = [COMPARISON_HEADINGS, *comparison_rows(comparison.benchmarks, names)]
        parts.append(f"{align_columns(rows)}\n{COMPARISON_NOTE}")
    parts += [f"note: {to_visible_text(note)}" for note in comparison.notes]
    return "\n\n".join(parts)


def _statistics(comparison: RunComparison) -> str:
    rows = list(statistics_rows(comparison))
    used = [column for column in range(len(STATISTICS)) if column < 3 or any(row[column] for row in rows)]
    return align_columns([tuple(row[column] for column in used) for row in (STATISTICS, *rows)])


def statistics_rows(comparison: RunComparison) -> list[tuple[str, ...]]:
    """Return one row per group, under the headings of STATISTICS; unknown values are empty."""
    differences = comparison.differences_to_first(comparison.metric)
    return [
        (
            group.name,
            str(len(group.runs)),
            *_score_cells(group.scores(comparison.metric)),
            *_difference_cells(difference),
        )
        for group, difference in zip(comparison.groups, differences, strict=True)
    ]


def _score_cells(scores: SeedScores | None) -> tuple[str, str, str]:
    if scores is None:
        return "-", "", ""
    std = "" if scores.std is None else format_number(scores.std)
    ends = scores.interval
    return (
        format_number(scores.mean),
        std,
        f"{format_number(ends[0])} to {format_number(ends[1])}" if ends else "",
    )


def _difference_cells(difference: GroupDifference | None) -> tuple[str, str, str]:
    if difference is None:
        return "", "", ""
    effect = "" if difference.hedges_g is None else f"{difference.hedges_g:+.2f}"
    p = "" if difference.p_adjusted is None else f"{difference.p_adjusted:.2g}"
    return f"{'+' if difference.difference >= 0 else ''}{format_number(difference.difference)}", effect, p


def spread_text(scores: SeedScores | None) -> str:
    """Return the mean, with the standard deviation if there are several values."""
    if scores is None:
        return "-"
    return format_number(scores.mean) + ("" if scores.std is None else f" ± {format_number(scores.std)}")


def best_index(comparison: RunComparison) -> int | None:
    """Return the index of the group with the best mean, ignoring groups that diverged.

    None if fewer than two means differ, or if the groups cannot be compared by the metric.
    """
    if comparison.incomparable_keys:
        return None
    means = {
        index: scores.mean
        for index, group in enumerate(comparison.groups)
        if (scores := group.scores(comparison.metric)) is not None and not group.diverged(comparison.metric)
    }
    if len(set(means.values())) < 2:
        return None
    return (min if lower_is_better(comparison.metric) else max)(means, key=means.__getitem__)


def best_text(comparison: RunComparison) -> str:
    """Return which group is best, and whether it differs significantly from the first."""
    if comparison.incomparable_keys:
        return (
            f"not ranked: the groups are not comparable by {comparison.metric}; choose another with --metric"
        )
    index = best_index(comparison)
    if index is None:
        return ""
    verdict = f"best: {comparison.groups[index].name}"
    difference = comparison.differences_to_first(comparison.metric)[index]
    if difference is None:
        return verdict
    if difference.p_adjusted is None:
        return f"{verdict} (not tested for significance: this needs at least two shared seeds)"
    significance = "differs" if difference.p_adjusted < 0.05 else "does not differ"
    first = comparison.groups[0].name
    test = f"paired t-test, p = {difference.p_adjusted:.2g} after Holm"
    return f"{verdict}; it {significance} significantly from {first} ({test})"


def _truncate(value: object) -> str:
    text = setting_text(value)
    return text if len(text) <= _MAX_CELL_LENGTH else f"{text[: _MAX_CELL_LENGTH - 1]}…"
