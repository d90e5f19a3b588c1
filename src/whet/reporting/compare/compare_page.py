"""The comparison of runs as one HTML page."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from whet.config.metric_direction import lower_is_better
from whet.errors import ConfigError
from whet.reporting.charts import CHARTS_STYLE, NOT_DRAWN, TRAINING, chart_grid
from whet.reporting.compare.compare_text import (
    STATISTICS,
    best_index,
    best_text,
    spread_text,
    statistics_rows,
)
from whet.reporting.compare.overlay_charts import interval_chart, overlay_charts, swept_charts
from whet.reporting.formatting import format_elapsed
from whet.reporting.html_page import html_page, html_table, html_text
from whet.reporting.run.run_facts import steps_text
from whet.reporting.svg import COLORS
from whet.reporting.text.benchmark_text import COMPARISON_HEADINGS, COMPARISON_NOTE, comparison_rows
from whet.storage import replace_text
from whet.studies.compare_runs import RunComparison, RunGroup, seed_of, setting_text

_MAX_CHARTS = 18

_STYLE = (
    CHARTS_STYLE
    + """
.legend span { display: inline-block; margin-right: 1.2rem; font-size: .9rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 50%; margin-right: .35rem; }
.numbers td, .numbers th + th { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.best td, .best th { font-weight: 600; color: var(--ink); }
"""
)


def write_comparison(comparison: RunComparison, path: str | Path) -> Path:
    """Write the comparison as an HTML page, overwriting an existing file, and return its path."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"{path} does not end in .html",
            hint="the comparison is an HTML page, and overwrites an existing file",
        )
    replace_text(Path(path), comparison_page(comparison))
    return Path(path)


def comparison_page(comparison: RunComparison) -> str:
    """Return the page as HTML; equal run files give equal pages."""
    sections = [f"<section id='{name}'>{html}</section>" for name, html in _sections(comparison)]
    direction = "lower" if lower_is_better(comparison.metric) else "higher"
    count = f"{len(comparison.runs):,} in {len(comparison.groups):,} groups"
    facts = [
        ("metric", f"{comparison.metric.replace('_', ' ')}, {direction} is better"),
        ("runs", f"{count}; runs of a group differ only in their seed"),
        ("result", best_text(comparison)),
    ]
    heading = f"<h1>{html_text(_title(comparison))}</h1>{html_table((n, v) for n, v in facts if v)}"
    items = "".join(f"<li>{html_text(note)}</li>" for note in [*comparison.notes, *_problems(comparison)])
    notes = f"<div class='problems'><b>warnings</b><ul>{items}</ul></div>" if items else ""
    return html_page([heading, notes, *sections], title="whet compare", style=_STYLE)


def _title(comparison: RunComparison) -> str:
    names = [run.name for run in comparison.runs]
    return " · ".join(names) if len(names) <= 3 else f"{len(names)} runs compared"


def _problems(comparison: RunComparison) -> Iterator[str]:
    for run in comparison.runs:
        yield from (f"{run.name}: {problem}" for problem in run.problems)


def _sections(comparison: RunComparison) -> Iterator[tuple[str, str]]:
    yield "results", f"<h2>Results</h2>{_results(comparison)}"
    if comparison.benchmarks:
        rows = list(comparison_rows(comparison.benchmarks, _names(comparison)))
        note = f"<p class='quiet'>{html_text(COMPARISON_NOTE)}</p>"
        yield "benchmarks", f"<h2>Benchmarks</h2>{_table(COMPARISON_HEADINGS, rows)}{note}"
    if swept := swept_charts(comparison):
        yield "swept", f"<h2>Effect of the settings</h2>{''.join(swept)}"
    shown = _drawn_groups(comparison)
    charts = overlay_charts(shown, _drawn_metrics(comparison))
    if charts:
        omitted = len(comparison.groups) - len(shown)
        note = (
            f"<p class='quiet'>the first group and the best ones; {omitted:,} more are not drawn</p>"
            if omitted
            else ""
        )
        first, rest = charts[0], charts[1:]
        yield "curves", f"<h2>Curves</h2>{_legend(shown)}{note}{first}{chart_grid(rest)}"
    if comparison.metrics[1:]:
        rows = [
            (name, *(spread_text(g.scores(name)) for g in comparison.groups))
            for name in comparison.metrics[1:]
        ]
        yield "metrics", f"<h2>Other metrics</h2>{_table(('', *_names(comparison)), rows)}"
    if comparison.differences:
        rows = [(key, *map(setting_text, values)) for key, values in comparison.differences.items()]
        yield "config", f"<h2>Config differences</h2>{_table(('', *_names(comparison)), rows)}"
    yield "runs", f"<h2>Runs</h2>{_runs(comparison)}"


def _names(comparison: RunComparison) -> list[str]:
    return [group.name for group in comparison.groups]


def _results(comparison: RunComparison) -> str:
    table = _table(STATISTICS, statistics_rows(comparison), best_row=best_index(comparison))
    note = (
        "<p class='quiet'>Differences are relative to the first group. Hedges g is the difference in pooled "
        "standard deviations, corrected for small samples. p is from a paired t-test over the shared seeds, "
        "with Holm's correction.</p>"
    )
    has_seeds = any(len(group.values(comparison.metric)) > 1 for group in comparison.groups)
    return table + (note if has_seeds else "") + interval_chart(comparison)


def _drawn_groups(comparison: RunComparison) -> list[RunGroup]:
    """Return at most as many groups as there are colors: the first one and the best ones."""
    if len(comparison.groups) <= len(COLORS):
        return comparison.groups
    sign = 1 if lower_is_better(comparison.metric) else -1
    ranked = [
        (sign * scores.mean, n)
        for n, g in enumerate(comparison.groups)
        if n and (scores := g.scores(comparison.metric))
    ]
    return [comparison.groups[0], *(comparison.groups[n] for _, n in sorted(ranked)[: len(COLORS) - 1])]


def _drawn_metrics(comparison: RunComparison) -> list[str]:
    """Return the metrics to draw: the comparison's metric, the losses, training metrics, then all others."""
    names = [
        comparison.metric,
        "eval_loss",
        "loss",
        *TRAINING,
        *(n for n in comparison.metrics if n not in NOT_DRAWN),
    ]
    return list(dict.fromkeys(names))[:_MAX_CHARTS]


def _legend(groups: Sequence[RunGroup]) -> str:
    marks = (
        f"<span><i style='background: {color}'></i>{html_text(group.name)}</span>"
        for group, color in zip(groups, COLORS, strict=False)
    )
    return f"<p class='legend'>{''.join(marks)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], best_row: int | None = None) -> str:
    heading = "".join(f"<th>{html_text(name)}</th>" for name in head)
    lines = "".join(
        f"<tr{' class=best' if index == best_row else ''}><th>{html_text(row[0])}</th>"
        f"{''.join(f'<td>{html_text(cell)}</td>' for cell in row[1:])}</tr>"
        for index, row in enumerate(rows)
    )
    return f"<div class='scroll'><table class='grid numbers'><tr>{heading}</tr>{lines}</table></div>"


def _runs(comparison: RunComparison) -> str:
    rows = [
        (
            run.name,
            group.name,
            str(seed_of(run)),
            run.status,
            steps_text(run),
            format_elapsed((run.summary or {}).get("seconds")),
        )
        for group in comparison.groups
        for run in group.runs
    ]
    return _table(("run", "group", "seed", "status", "steps", "time"), rows)
