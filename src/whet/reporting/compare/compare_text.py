"""Runs beside each other, for a terminal."""

from collections.abc import Sequence

from whet.config.metric_direction import falls
from whet.data.inspect.token_text import visible
from whet.reporting.formatting import format_number
from whet.studies.compare_runs import Against, RunComparison, SeedScores, setting_text

_MOST_OTHERS = 12
_MOST_COLUMNS = 4
_LONGEST_CELL = 40
STATISTICS = ("group", "runs", "mean", "std", "95% interval", "difference", "Hedges g", "p (Holm)")


def comparison_text(found: RunComparison) -> str:
    """Tables: what they are judged by, what else they measured, what differs in their configs."""
    parts = [f"{found.metric}, {'lower' if falls(found.metric) else 'higher'} is better", _statistics(found)]
    if verdict := best_text(found):
        parts.append(verdict)
    names = [group.name for group in found.groups]
    wide = len(names) > _MOST_COLUMNS  # then a line a group, else a line a metric
    if others := found.metrics[1:]:
        shown = others[: _MOST_COLUMNS if wide else _MOST_OTHERS]
        rows = [("also", *names)]
        rows += [(name, *(spread_text(group.scores(name)) for group in found.groups)) for name in shown]
        left = f"\n{len(others) - len(shown)} more: see --json" if len(others) > len(shown) else ""
        parts.append(_columns(list(zip(*rows, strict=True)) if wide else rows) + left)
    if found.differences:
        rows = [("config", *names)]
        rows += [(key, *map(_cut, values)) for key, values in found.differences.items()]
        parts.append(_columns(list(zip(*rows, strict=True)) if wide else rows))
    parts += [f"note: {visible(note)}" for note in found.notes]
    return "\n\n".join(parts)


def _statistics(found: RunComparison) -> str:
    rows = list(statistics_rows(found))
    used = [column for column in range(len(STATISTICS)) if column < 3 or any(row[column] for row in rows)]
    return _columns([tuple(row[column] for column in used) for row in (STATISTICS, *rows)])


def statistics_rows(found: RunComparison) -> list[tuple[str, ...]]:
    """A line a group, under the headings of STATISTICS; what is not known is empty."""
    against = found.against_first(found.metric)
    return [
        (group.name, str(len(group.runs)), *_score_cells(group.scores(found.metric)), *_against_cells(each))
        for group, each in zip(found.groups, against, strict=True)
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


def _against_cells(against: Against | None) -> tuple[str, str, str]:
    if against is None:
        return "", "", ""
    effect = "" if against.hedges_g is None else f"{against.hedges_g:+.2f}"
    p = "" if against.p_adjusted is None else f"{against.p_adjusted:.2g}"
    return f"{'+' if against.difference >= 0 else ''}{format_number(against.difference)}", effect, p


def spread_text(scores: SeedScores | None) -> str:
    """A mean, with its standard deviation where there is one."""
    if scores is None:
        return "-"
    return format_number(scores.mean) + ("" if scores.std is None else f" ± {format_number(scores.std)}")


def best_place(found: RunComparison) -> int | None:
    """Which group has the best mean, of those that did not diverge; None where all are equal or alone.

    None, too, where the metric is another quantity in each group.
    """
    if found.unlike:
        return None
    known = {
        place: scores.mean
        for place, group in enumerate(found.groups)
        if (scores := group.scores(found.metric)) is not None and not group.diverged(found.metric)
    }
    if len(set(known.values())) < 2:
        return None
    return (min if falls(found.metric) else max)(known, key=known.__getitem__)


def best_text(found: RunComparison) -> str:
    """Which group is best, and whether it can be told from the first."""
    if found.unlike:
        return f"no best: the groups cannot be ranked by {found.metric}; choose another number with --metric"
    place = best_place(found)
    if place is None:
        return ""
    said = f"best: {found.groups[place].name}"
    against = found.against_first(found.metric)[place]
    if against is None:
        return said
    if against.p_adjusted is None:
        return f"{said} (not tested: that needs two seeds that both have)"
    surely = "differs" if against.p_adjusted < 0.05 else "cannot be told apart"
    first = found.groups[0].name
    return f"{said}; it {surely} from {first} (paired t-test, p = {against.p_adjusted:.2g} after Holm)"


def _cut(value: object) -> str:
    text = setting_text(value)
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    cells = [[visible(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
