"""Line charts of a run's metrics, one small chart per metric, as HTML figures."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from whet.data.inspect.token_text import to_visible_text
from whet.reporting.formatting import format_number
from whet.reporting.html_page import html_text
from whet.reporting.svg import BLUE, ORANGE, figure_style, svg
from whet.runs.metric_series import Metric, Series, downsample, smooth

MAX_CHARTS = 36
# metrics of the training section, with their titles
TRAINING = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU (share of the device's peak)",
    "peak_gib": "peak memory, GiB",
}
# metrics without a chart in the metrics section: drawn elsewhere, durations, or counters
NOT_DRAWN = {
    *(
        "loss",
        "eval_loss",
        "eval_perplexity",
        "tokens",
        "supervised_tokens",
        "tokens_total",
        "supervised_tokens_total",
    ),
    *("step_s", "elapsed_s", "elapsed_ms", "final_loss", "eval_s", "probe_s", "router_dropped_tokens"),
    *(
        "steps_per_s",
        "mean_tokens_per_s",
        "flops_total",
        "tflops_per_s",
    ),  # the same quantities as drawn metrics, in other units
}
CHARTS_STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(17rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 1rem 0; break-inside: avoid; overflow-x: auto; }
figure.large svg { min-width: 36rem; }
.charts figure { margin: 0; }
.charts + .charts { margin-top: 1rem; }
.charts.wide { grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); }
figcaption { font-size: .9rem; margin-bottom: .2rem; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; }
svg text { font-family: system-ui, sans-serif !important; }
.grid th, .grid td { border-top: 1px solid var(--line); padding: .3rem 1rem .3rem 0; vertical-align: top; }
.grid { width: 100%; font-size: .9rem; margin-bottom: .9rem; }
.grid td { white-space: pre-wrap; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } h2, h3 { break-after: avoid; }
  tr { break-inside: avoid; } .charts { grid-template-columns: repeat(3, 1fr); }
  .charts.wide { grid-template-columns: repeat(2, 1fr); } figure.large svg { min-width: 0; } }
"""
_UNSMOOTHED = {"lr", "peak_gib"}  # no noise to remove
_SMALL = 3.2, 2.0  # inches
_LARGE_FROM = 5 * 72  # points: wider figures scroll on narrow screens instead of shrinking their text


def loss_charts(metrics: dict[str, Metric]) -> list[str]:
    """Return the chart of the training and evaluation loss, or an empty list."""
    loss = Metric(metrics.get("loss", Metric()).train, metrics.get("eval_loss", Metric()).evaluation)
    return [chart("loss", "loss", loss, size=(8.6, 3.0))] if loss.has_points else []


def training_charts(metrics: dict[str, Metric], *, planned_gib: float | None = None) -> list[str]:
    """Return charts of learning rate, gradient norm, throughput and memory (with the planned peak)."""
    return [
        chart(name, title, metrics[name], planned=planned_gib if name == "peak_gib" else None)
        for name, title in TRAINING.items()
        if name in metrics and metrics[name].has_points
    ]


def other_charts(metrics: dict[str, Metric]) -> tuple[list[str], int]:
    """Return charts of the objective's metrics, and the number of metrics beyond MAX_CHARTS."""
    drawable = _merge_evaluations(
        {
            name: metric
            for name, metric in metrics.items()
            if metric.has_points and name not in {*TRAINING, *NOT_DRAWN} and not name.startswith("exp_")
        }
    )
    shown = list(drawable)[:MAX_CHARTS]
    charts = [chart(name, name.replace("_", " "), drawable[name]) for name in shown]
    return charts, len(drawable) - len(shown)


def _merge_evaluations(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Move `eval_x` into the chart of `x` if both exist and neither has both series already."""
    merged = dict(metrics)
    for name, metric in metrics.items():
        eval_metric = metrics.get(f"eval_{name}")
        if eval_metric is not None and not metric.evaluation.values and not eval_metric.train.values:
            merged[name] = Metric(metric.train, eval_metric.evaluation)
            del merged[f"eval_{name}"]
    return merged


def chart_grid(charts: Iterable[str]) -> str:
    """Return a grid of small charts."""
    return f"<div class='charts'>{''.join(charts)}</div>"


def figure_element(name: str, picture: str, caption: str) -> str:
    """Return a figure element with its caption (HTML) above the picture."""
    view_box = re.search(r'viewBox="\S+ \S+ ([\d.]+)', picture)
    large = " class='large'" if view_box and float(view_box[1]) > _LARGE_FROM else ""
    return f"<figure id='chart-{escape(name)}'{large}><figcaption>{caption}</figcaption>{picture}</figure>"


def element_id(name: str) -> str:
    """Return a metric's name as a valid HTML id; other characters become their code points."""
    return re.sub(r"[^a-zA-Z0-9_]", lambda match: f"-{ord(match[0])}-", name)


def chart(
    name: str,
    title: str,
    metric: Metric,
    *,
    size: tuple[float, float] = _SMALL,
    planned: float | None = None,
) -> str:
    """Return the figure of a metric over the steps, with a horizontal line at the planned value, if any."""
    key = element_id(name)
    label = escape(to_visible_text(f"{title} over the steps of the run"), quote=True)
    with figure_style() as new_figure:
        figure = new_figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        _draw(axes, metric, smoothed=name not in _UNSMOOTHED)
        if planned is not None:
            axes.axhline(planned, color=ORANGE, linestyle="--", linewidth=1.2, label="planned")
            axes.legend(loc="best", fontsize=8)
        picture = svg(figure, name=key, label=label)
    return figure_element(key, picture, _caption(title, metric, planned))


def _draw(axes: Any, metric: Metric, *, smoothed: bool) -> None:  # Any: matplotlib has no types
    both = bool(metric.train.values and metric.evaluation.values)
    if metric.train.values:
        average = smooth(metric.train.values) if smoothed else None
        _draw_training(axes, metric.train, average, label="training" if both else None)
    if metric.evaluation.values:
        steps, values = downsample(metric.evaluation.steps, metric.evaluation.values)
        label = "evaluation" if both else None
        has_markers = len(values) <= 40
        axes.plot(
            steps,
            values,
            color=ORANGE,
            linewidth=1.5,
            label=label,
            marker="o" if has_markers else None,
            markersize=3,
        )
    finish_axes(axes, [*metric.train.values, *metric.evaluation.values])
    if both:
        axes.legend(loc="best", fontsize=8)


def finish_axes(axes: Any, values: Sequence[float]) -> None:  # Any: matplotlib has no types
    """Set the grid, margins and ticks of a plot of `values` over steps."""
    axes.grid(visible=True)
    axes.margins(x=0.02, y=0.08)
    _widen_constant(axes, values)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.yaxis.get_major_locator().set_params(nbins=5)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))


def _widen_constant(axes: Any, values: Sequence[float]) -> None:  # Any: matplotlib has no types
    """Center a constant metric, so that the y axis does not magnify rounding errors."""
    low, high = min(values), max(values)
    magnitude = max(abs(low), abs(high))
    if high - low <= 1e-6 * magnitude:
        axes.set_ylim(low - (0.1 * magnitude or 1), high + (0.1 * magnitude or 1))


def _draw_training(
    axes: Any,  # Any: matplotlib has no types
    series: Series,
    average: list[float] | None,
    *,
    label: str | None,
) -> None:
    alpha = 0.35 if average else 1.0
    marker = "o" if len(series.values) == 1 else None
    axes.plot(
        *downsample(series.steps, series.values),
        color=BLUE,
        alpha=alpha,
        linewidth=1.0 if average else 1.5,
        marker=marker,
        label=None if average else label,
    )
    if average:
        axes.plot(*downsample(series.steps, average), color=BLUE, linewidth=1.5, label=label)


def _caption(title: str, metric: Metric, planned: float | None) -> str:
    parts = []
    for series, kind in ((metric.train, "training"), (metric.evaluation, "evaluation")):
        if series.values:
            first, last = format_number(series.values[0]), format_number(series.values[-1])
            change = last if len(series.values) == 1 else f"{first} → {last}"
            both = metric.train.values and metric.evaluation.values
            parts.append(f"{kind} {change}" if both else change)
    if planned is not None:
        parts.append(f"planned {format_number(planned)}")
    if metric.omitted_points:
        parts.append(f"{metric.omitted_points:,} non-finite values not drawn")
    return f"<b>{html_text(title)}</b> <span class='quiet'>{html_text('; '.join(parts))}</span>"
