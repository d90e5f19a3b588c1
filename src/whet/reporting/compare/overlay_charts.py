"""Curves of several runs in one plot, and what a sweep found: a colour a group, a faint line a run."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from whet.data.inspect.token_text import visible
from whet.reporting.charts import TRAINING, element_id, figure_element, finish_axes
from whet.reporting.html_page import html_text
from whet.reporting.svg import BLUE, COLOURS, drawing, svg
from whet.runs.metric_series import Series, smoothed, thinned
from whet.studies.compare_runs import RunComparison, RunGroup, curves_of, setting_name

_LARGE, _SMALL = (8.6, 3.0), (3.2, 2.0)  # inches
_SMOOTH = {"loss", "grad_norm", "tokens_per_s", "mfu"}
_LONG_SCALE = 10.0  # highest / lowest from which a logarithmic scale shows more


def overlay_charts(groups: Sequence[RunGroup], names: Sequence[str]) -> list[str]:
    """A plot for each of some metrics, the first of them large."""
    curves = [[curves_of(run) for run in group.runs] for group in groups]
    charts: list[str] = []
    for name in names:
        lines = [
            [series for run in group if name in run and (series := _series(run[name], name)).values]
            for group in curves
        ]
        if any(lines):
            charts.append(_overlay(name, lines, size=_SMALL if charts else _LARGE))
    return charts


def _series(metric: Any, name: str) -> Series:  # Any: a Metric
    """Of evaluations where there are some; of training, without its noise."""
    if metric.evaluation.values:
        return metric.evaluation
    average = smoothed(metric.train.values) if name in _SMOOTH else None
    return Series(metric.train.steps, average) if average else metric.train


def _overlay(name: str, lines: Sequence[Sequence[Series]], *, size: tuple[float, float]) -> str:
    title = TRAINING.get(name, name.replace("_", " "))
    with drawing() as new_figure:
        figure = new_figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for group, colour in zip(lines, COLOURS, strict=False):
            for series in group:
                alone = len(group) == 1
                marker = "o" if len(series.values) <= 40 and size == _LARGE else None
                axes.plot(
                    *thinned(series.steps, series.values),
                    color=colour,
                    linewidth=1.5 if alone else 0.8,
                    alpha=1.0 if alone else 0.4,
                    marker=marker if alone else None,
                    markersize=3,
                )
            if len(group) > 1 and (middle := _middle(group)).values:
                axes.plot(*thinned(middle.steps, middle.values), color=colour, linewidth=1.8)
        finish_axes(axes, [value for group in lines for series in group for value in series.values])
        label = escape(visible(f"{title} of the runs over their steps"), quote=True)
        picture = svg(figure, name=element_id(name), label=label)
    return figure_element(element_id(name), picture, f"<b>{html_text(title)}</b>")


def _middle(group: Sequence[Series]) -> Series:
    """The mean over the runs, at the steps that all of them have."""
    tables = [dict(zip(series.steps, series.values, strict=True)) for series in group]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    return Series(steps, [math.fsum(table[step] for table in tables) / len(tables) for step in steps])


def interval_chart(found: RunComparison) -> str:
    """What each group came to: a dot a run, and the mean with its interval."""
    shown = [(group, scores) for group in found.groups if (scores := group.scores(found.metric))]
    with drawing() as new_figure:
        figure = new_figure(figsize=(8.6, 0.7 + 0.3 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for place, (group, scores) in enumerate(shown):
            colour = COLOURS[found.groups.index(group) % len(COLOURS)]
            if (ends := scores.interval) is not None:
                axes.plot(ends, (place, place), color=colour, linewidth=2.2)
                axes.plot(
                    scores.values, [place] * len(scores.values), "o", color=colour, markersize=3, alpha=0.5
                )
            axes.plot([scores.mean], [place], "o", color=colour, markersize=6)
        axes.set_yticks(range(len(shown)), [visible(group.name) for group, _ in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(found.metric.replace("_", " "))
        picture = svg(figure, name="intervals", label="mean and 95% interval of each group")
    said = (
        "<b>What each group came to</b> <span class='quiet'>a small dot a run; the mean, and the interval in"
    )
    return figure_element("intervals", picture, f"{said} which it lies with 95% confidence</span>")


def swept_charts(found: RunComparison) -> list[str]:
    """The metric over each number that the configs differ in, a line for each setting of all else."""
    charts = []
    for key, values in found.differences.items():
        lines: dict[str, list[tuple[float, RunGroup]]] = {}
        for value, group in zip(values, found.groups, strict=True):
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                lines.setdefault(setting_name(group.setting, without=key), []).append((float(value), group))
        if len({value for line in lines.values() for value, _ in line}) >= 3:
            charts.append(_swept(key, found.metric, lines))
    return charts


def _swept(key: str, metric: str, lines: Mapping[str, Sequence[tuple[float, RunGroup]]]) -> str:
    # many lines with a few points each are no lines: random draws
    joined = len(lines) <= len(COLOURS)
    with drawing() as new_figure:
        figure = new_figure(figsize=_LARGE, layout="constrained")
        axes = figure.subplots()
        for number, (name, line) in enumerate(lines.items()):
            colour = COLOURS[number] if joined else BLUE
            points = [(value, score) for value, group in line for score in group.values(metric)]
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=3.5, alpha=0.6)
            means = sorted((value, scores.mean) for value, group in line if (scores := group.scores(metric)))
            if joined:
                axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.5, label=visible(name) or None)
        axes.grid(visible=True)
        places = [value for line in lines.values() for value, _ in line]
        if min(places) > 0 and max(places) / min(places) >= _LONG_SCALE:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        axes.set_xlabel(visible(key))
        axes.set_ylabel(visible(metric.replace("_", " ")))
        if joined and len(lines) > 1:
            axes.legend(loc="best", fontsize=8)
        name = f"swept-{element_id(key)}"
        picture = svg(figure, name=name, label=escape(visible(f"{metric} over {key}"), quote=True))
    return figure_element(
        name, picture, f"<b>{html_text(metric.replace('_', ' '))} over {html_text(key)}</b>"
    )
