"""Charts of probes: one per scalar, and lines (or a heat map for many layers) per layered metric."""

from collections.abc import Sequence
from html import escape

import numpy as np

from whet.data.inspect.token_text import to_visible_text
from whet.reporting.charts import chart, chart_grid, element_id, figure_element, finish_axes
from whet.reporting.html_page import html_text
from whet.reporting.svg import COLORS, figure_style, svg
from whet.runs.metric_series import Metric, as_number
from whet.runs.run_files import JsonObject

PREFIX, LAYERS = "exp_", "_layer"
_MAX_LINES = 6  # more layers become a heat map
_MAX_CHARTS = 24
_SIZE = 4.2, 2.4  # inches
_LOG_RATIO = 10  # max / min from which the color scale is logarithmic
# layer indices, under their current and their former name: the heat map shows them
_NOT_DRAWN = {"exp_grad_norm_largest_layer", "exp_grad_norm_max_layer"}
_TITLES = {
    "grad_norm": "gradient norm",
    "simple_noise_scale": "simple noise scale",
    "grad_noise_scale": "gradient noise scale",
    "grad_noise": "gradient noise",
    "grad_signal": "gradient signal",
    "weight_norm": "weight norm",
    "weight_distance": "distance from the initial weights",
    "weight_delta": "change from the initial weights",
    "act_norm_ratio": "activation norm, last layer / first layer",
    "act_norm": "activation norm",
    "act_sparsity": "activation sparsity",
    "attn_entropy": "attention entropy",
    "effective_rank": "effective rank",
}


def probe_section(rows: Sequence[JsonObject], metrics: dict[str, Metric]) -> str | None:
    """Return the charts of all probes as HTML, or None for a run without probes."""
    layered = [picture for name in _layered_metrics(rows) if (picture := _layers_chart(name, rows))]
    scalars = [
        chart(name, probe_title(name), metric)
        for name, metric in metrics.items()
        if name.startswith(PREFIX)
        and name not in _NOT_DRAWN
        and metric.has_points
        and any(metric.train.values)
    ]
    if not layered and not scalars:
        return None
    by_layer = "".join(layered[:_MAX_CHARTS])
    return f"<div class='charts wide'>{by_layer}</div>{chart_grid(scalars[:_MAX_CHARTS])}"


def probe_title(name: str) -> str:
    """Return the human-readable title of a probe metric."""
    key = name.removeprefix(PREFIX)
    for prefix, title in _TITLES.items():
        if key == prefix or key.startswith(f"{prefix}_"):
            rest = key.removeprefix(prefix).replace("_", " ").strip()
            rest = {"rest": "outside the layers", "layer": "by layer", "std": "standard deviation"}.get(
                rest, rest
            )
            return f"{title}, {rest}" if rest else title
    return key.replace("_", " ")


def _layered_metrics(rows: Sequence[JsonObject]) -> list[str]:
    return list(
        dict.fromkeys(
            name
            for row in rows
            for name, value in row.items()
            if name.startswith(PREFIX) and name.endswith(LAYERS) and isinstance(value, list) and value
        )
    )


def _layers_chart(name: str, rows: Sequence[JsonObject]) -> str:
    """Return the chart of a layered metric over steps, or an empty string if it has no finite values."""
    steps, table = _table(name, rows)
    if not steps or not np.isfinite(table).any():
        return ""
    key, title = element_id(name), probe_title(name)
    layers = table.shape[1]
    low, high = np.nanmin(table), np.nanmax(table)
    logarithmic = 0 < low < high / _LOG_RATIO
    with figure_style() as new_figure:
        figure = new_figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        if layers <= _MAX_LINES:
            for layer in range(layers):
                marker = "o" if len(steps) == 1 else None
                axes.plot(steps, table[:, layer], color=COLORS[layer], label=f"layer {layer}", marker=marker)
            finish_axes(axes, table[np.isfinite(table)].tolist())
            axes.legend(loc="best", fontsize=8)
        else:
            image = axes.imshow(
                table.T,
                aspect="auto",
                origin="lower",
                extent=(steps[0] - 0.5, max(steps[-1], steps[0] + 1) + 0.5, -0.5, layers - 0.5),
                interpolation="none",
                cmap="viridis",
                norm="log" if logarithmic else "linear",
            )
            axes.set_xlabel("step")
            axes.set_ylabel("layer")
            axes.yaxis.get_major_locator().set_params(integer=True, nbins=6)
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
            bar = figure.colorbar(image, ax=axes)
            if logarithmic:
                bar.ax.yaxis.set_major_formatter("{x:g}")
                bar.ax.yaxis.set_minor_formatter("")
        label = escape(to_visible_text(f"{title} over the steps of the run"), quote=True)
        picture = svg(figure, name=key, label=label)
    return figure_element(key, picture, f"<b>{html_text(title)}</b>")


def _table(name: str, rows: Sequence[JsonObject]) -> tuple[list[int], np.ndarray]:
    """Return steps and values [steps, layers]; missing and non-finite values are NaN and not drawn."""
    entries = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), list)]
    if not entries:
        return [], np.zeros((0, 0))
    layers = len(entries[-1][1])
    same_length = [(step, values) for step, values in entries if len(values) == layers]
    numbers = [[as_number(value) for value in values] for _, values in same_length]
    table = np.array([[np.nan if n is None else n for n in line] for line in numbers], dtype=np.float64)
    table[~np.isfinite(table)] = np.nan
    return [step for step, _ in same_length], table
