"""Charts of several runs: overlaid curves (one color per group, thin lines per run) and swept settings."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from whet.data.inspect.token_text import to_visible_text
from whet.reporting.charts import TRAINING, element_id, figure_element, finish_axes
from whet.reporting.html_page import html_text
from whet.reporting.svg import BLUE, COLORS, figure_style, svg
from whet.runs.metric_series import Series, downsample, smooth
from whet.studies.compare_runs import RunComparison, RunGroup, curves_of, setting_name

_LARGE, _SMALL = (8.6, 3.0), (3.2, 2.0)  # inches
_SMOOTH = {"loss", "grad_norm", "tokens_per_s", "mfu"}
_LOG_RATIO = 10.0  # max / min from which the x axis is logarithmic


def overlay_charts(groups: Sequence[RunGroup], names: Sequence[str]) -> list[str]:
    """Return one chart per metric that the groups have; the first one is large."""
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
    """Return the evaluation series if there is one, else the training series, smoothed if it is noisy."""
    if metric.evaluation.values:
        return metric.evaluation
    average = smooth(metric.train.values) if name in _SMOOTH else None
    return Series(metric.train.steps, average) if average else metric.train


def _overlay(name: str, lines: Sequence[Sequence[Series]], *, size: tuple[float, float]) -> str:
    title = TRAINING.get(name, name.replace("_", " "))
    with figure_style() as new_figure:
        figure = new_figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for group, color in zip(lines, COLORS, strict=False):
            for series in group:
                is_single = len(group) == 1
                marker = "o" if len(series.values) <= 40 and size == _LARGE else None
                axes.plot(
                    *downsample(series.steps, series.values),
                    color=color,
                    linewidth=1.5 if is_single else 0.8,
                    alpha=1.0 if is_single else 0.4,
                    marker=marker if is_single else None,
                    markersize=3,
                )
            if len(group) > 1 and (average := _mean_series(group)).values:
                axes.plot(*downsample(average.steps, average.values), color=color, linewidth=1.8)
        finish_axes(axes, [value for group in lines for series in group for value in series.values])
        label = escape(to_visible_text(f"{title} of the runs over their steps"), quote=True)
        picture = svg(figure, name=element_id(name), label=label)
    return figure_element(element_id(name), picture, f"<b>{html_text(title)}</b>")


def _mean_series(group: Sequence[Series]) -> Series:
    """Return the mean over the runs, at the steps that all of them have."""
    tables = [dict(zip(series.steps, series.values, strict=True)) for series in group]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    return Series(steps, [math.fsum(table[step] for table in tables) / len(tables) for step in steps])


def interval_chart(comparison: RunComparison) -> str:
    """Return the chart of every group's mean and confidence interval, with one dot per run."""
    shown = [(group, scores) for group in comparison.groups if (scores := group.scores(comparison.metric))]
    with figure_style() as new_figure:
        figure = new_figure(figsize=(8.6, 0.7 + 0.3 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for index, (group, scores) in enumerate(shown):
            color = COLORS[comparison.groups.index(group) % len(COLORS)]
            if (ends := scores.interval) is not None:
                axes.plot(ends, (index, index), color=color, linewidth=2.2)
                axes.plot(
                    scores.values, [index] * len(scores.values), "o", color=color, markersize=3, alpha=0.5
                )
            axes.plot([scores.mean], [index], "o", color=color, markersize=6)
        axes.set_yticks(range(len(shown)), [to_visible_text(group.name) for group, _ in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(comparison.metric.replace("_", " "))
        picture = svg(figure, name="intervals", label="mean and 95% confidence interval per group")
    caption = (
        "<b>Mean and 95% confidence interval per group</b> <span class='quiet'>small dots are runs</span>"
    )
    return figure_element("intervals", picture, caption)


def swept_charts(comparison: RunComparison) -> list[str]:
    """Return charts of the metric over each numeric setting that differs, one line per other setting."""
    charts = []
    for key, values in comparison.differences.items():
        lines: dict[str, list[tuple[float, RunGroup]]] = {}
        for value, group in zip(values, comparison.groups, strict=True):
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                lines.setdefault(setting_name(group.setting, without=key), []).append((float(value), group))
        if len({value for line in lines.values() for value, _ in line}) >= 3:
            charts.append(_swept_chart(key, comparison.metric, lines))
    return charts


def _swept_chart(key: str, metric: str, lines: Mapping[str, Sequence[tuple[float, RunGroup]]]) -> str:
    # random search gives many lines of few points: draw only the points
    draw_lines = len(lines) <= len(COLORS)
    with figure_style() as new_figure:
        figure = new_figure(figsize=_LARGE, layout="constrained")
        axes = figure.subplots()
        for number, (name, line) in enumerate(lines.items()):
            color = COLORS[number] if draw_lines else BLUE
            points = [(value, score) for value, group in line for score in group.values(metric)]
            axes.plot(*zip(*points, strict=True), "o", color=color, markersize=3.5, alpha=0.6)
            means = sorted((value, scores.mean) for value, group in line if (scores := group.scores(metric)))
            if draw_lines:
                axes.plot(
                    *zip(*means, strict=True), color=color, linewidth=1.5, label=to_visible_text(name) or None
                )
        axes.grid(visible=True)
        settings = [value for line in lines.values() for value, _ in line]
        if min(settings) > 0 and max(settings) / min(settings) >= _LOG_RATIO:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        axes.set_xlabel(to_visible_text(key))
        axes.set_ylabel(to_visible_text(metric.replace("_", " ")))
        if draw_lines and len(lines) > 1:
            axes.legend(loc="best", fontsize=8)
        name = f"swept-{element_id(key)}"
        picture = svg(figure, name=name, label=escape(to_visible_text(f"{metric} over {key}"), quote=True))
    return figure_element(
        name, picture, f"<b>{html_text(metric.replace('_', ' '))} over {html_text(key)}</b>"
    )
