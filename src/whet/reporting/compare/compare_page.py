"""Runs beside each other, as one HTML page."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from whet.config.metric_direction import falls
from whet.errors import ConfigError
from whet.reporting.charts import CHARTS_STYLE, NOT_DRAWN, TRAINING, chart_grid
from whet.reporting.compare.compare_text import (
    STATISTICS,
    best_place,
    best_text,
    spread_text,
    statistics_rows,
)
from whet.reporting.compare.overlay_charts import interval_chart, overlay_charts, swept_charts
from whet.reporting.formatting import format_elapsed
from whet.reporting.html_page import html_page, html_table, html_text
from whet.reporting.run.run_facts import steps_text
from whet.reporting.svg import COLOURS
from whet.storage import replace_text
from whet.studies.compare_runs import RunComparison, RunGroup, seed_of, setting_text

_MOST_CHARTS = 18

_STYLE = (
    CHARTS_STYLE
    + """
.legend span { display: inline-block; margin-right: 1.2rem; font-size: .9rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 50%; margin-right: .35rem; }
.numbers td, .numbers th + th { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.best td, .best th { font-weight: 600; color: var(--ink); }
"""
)


def write_comparison(found: RunComparison, path: str | Path) -> Path:
    """Write the page; what is there is replaced."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"{path} does not end in .html", hint="the comparison is a page, and replaces what is there"
        )
    replace_text(Path(path), comparison_page(found))
    return Path(path)


def comparison_page(found: RunComparison) -> str:
    """The whole page; the same for the same files."""
    sections = [f"<section id='{name}'>{html}</section>" for name, html in _sections(found)]
    facts = [
        (
            "judged by",
            f"{found.metric.replace('_', ' ')}, {'lower' if falls(found.metric) else 'higher'} is better",
        ),
        (
            "runs",
            f"{len(found.runs):,} in {len(found.groups):,} groups; runs of a group differ in their seed only",
        ),
        ("result", best_text(found)),
    ]
    heading = f"<h1>{html_text(_title(found))}</h1>{html_table((n, v) for n, v in facts if v)}"
    listed = "".join(f"<li>{html_text(note)}</li>" for note in [*found.notes, *_problems(found)])
    notes = f"<div class='problems'><b>with care</b><ul>{listed}</ul></div>" if listed else ""
    return html_page([heading, notes, *sections], title="whet compare", style=_STYLE)


def _title(found: RunComparison) -> str:
    names = [run.name for run in found.runs]
    return " · ".join(names) if len(names) <= 3 else f"{len(names)} runs compared"


def _problems(found: RunComparison) -> Iterator[str]:
    for run in found.runs:
        yield from (f"{run.name}: {problem}" for problem in run.problems)


def _sections(found: RunComparison) -> Iterator[tuple[str, str]]:
    yield "results", f"<h2>Results</h2>{_results(found)}"
    if swept := swept_charts(found):
        yield "swept", f"<h2>What was varied</h2>{''.join(swept)}"
    shown = _drawn_groups(found)
    charts = overlay_charts(shown, _drawn_metrics(found))
    if charts:
        left = len(found.groups) - len(shown)
        said = (
            f"<p class='quiet'>the first group and the best; {left:,} more are not drawn</p>" if left else ""
        )
        first, rest = charts[0], charts[1:]
        yield "curves", f"<h2>Curves</h2>{_legend(shown)}{said}{first}{chart_grid(rest)}"
    if found.metrics[1:]:
        rows = [(name, *(spread_text(g.scores(name)) for g in found.groups)) for name in found.metrics[1:]]
        yield "metrics", f"<h2>Other metrics</h2>{_table(('', *_names(found)), rows)}"
    if found.differences:
        rows = [(key, *map(setting_text, values)) for key, values in found.differences.items()]
        yield "config", f"<h2>What differs in the configs</h2>{_table(('', *_names(found)), rows)}"
    yield "runs", f"<h2>Runs</h2>{_runs(found)}"


def _names(found: RunComparison) -> list[str]:
    return [group.name for group in found.groups]


def _results(found: RunComparison) -> str:
    table = _table(STATISTICS, statistics_rows(found), strong=best_place(found))
    said = (
        "<p class='quiet'>Differences are to the first group. Hedges g is the difference in pooled standard "
        "deviations, corrected for small samples; p is that of a paired t-test over the seeds both have, "
        "corrected by Holm's rule.</p>"
    )
    several = any(len(group.values(found.metric)) > 1 for group in found.groups)
    return table + (said if several else "") + interval_chart(found)


def _drawn_groups(found: RunComparison) -> list[RunGroup]:
    """As many as there are colours: the first, and the best."""
    if len(found.groups) <= len(COLOURS):
        return found.groups
    sign = 1 if falls(found.metric) else -1
    others = [
        (sign * scores.mean, n)
        for n, g in enumerate(found.groups)
        if n and (scores := g.scores(found.metric))
    ]
    return [found.groups[0], *(found.groups[n] for _, n in sorted(others)[: len(COLOURS) - 1])]


def _drawn_metrics(found: RunComparison) -> list[str]:
    """What they are judged by, the losses, how training went, then all else."""
    names = [found.metric, "eval_loss", "loss", *TRAINING, *(n for n in found.metrics if n not in NOT_DRAWN)]
    return list(dict.fromkeys(names))[:_MOST_CHARTS]


def _legend(groups: Sequence[RunGroup]) -> str:
    marks = (
        f"<span><i style='background: {colour}'></i>{html_text(group.name)}</span>"
        for group, colour in zip(groups, COLOURS, strict=False)
    )
    return f"<p class='legend'>{''.join(marks)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], strong: int | None = None) -> str:
    heading = "".join(f"<th>{html_text(name)}</th>" for name in head)
    lines = "".join(
        f"<tr{' class=best' if place == strong else ''}><th>{html_text(row[0])}</th>"
        f"{''.join(f'<td>{html_text(cell)}</td>' for cell in row[1:])}</tr>"
        for place, row in enumerate(rows)
    )
    return f"<div class='scroll'><table class='grid numbers'><tr>{heading}</tr>{lines}</table></div>"


def _runs(found: RunComparison) -> str:
    rows = [
        (
            run.name,
            group.name,
            str(seed_of(run)),
            run.status,
            steps_text(run),
            format_elapsed((run.summary or {}).get("seconds")),
        )
        for group in found.groups
        for run in group.runs
    ]
    return _table(("run", "group", "seed", "status", "steps", "time"), rows)
