"""What probes found: a plot a number; of what is known by layer, lines or, with many layers, a map."""

from collections.abc import Sequence
from html import escape

import numpy as np

from whet.data.inspect.token_text import visible
from whet.reporting.charts import chart, chart_grid, element_id, figure_element, finish_axes
from whet.reporting.html_page import html_text
from whet.reporting.svg import COLOURS, drawing, svg
from whet.runs.metric_series import Metric, as_number
from whet.runs.run_files import Values

PREFIX, LAYERS = "exp_", "_layer"
_MOST_LINES = 6  # layers that can be told apart as lines
_MOST_CHARTS = 24
_SIZE = 4.2, 2.4  # inches
_WIDE = 10  # highest / lowest from which colours follow the logarithm: else one value takes them all
# the number of a layer, by its name now and in older runs: the map shows it
_NOT_DRAWN = {"exp_grad_norm_largest_layer", "exp_grad_norm_max_layer"}
_TITLES = {
    "grad_norm": "gradient norm",
    "simple_noise_scale": "simple noise scale",
    "grad_noise_scale": "gradient noise scale",
    "grad_noise": "gradient noise",
    "grad_signal": "gradient signal",
    "weight_norm": "weight norm",
    "weight_distance": "distance from the first weights",
    "weight_delta": "way from the first weights",
    "act_norm_ratio": "activation norm, last layer to first",
    "act_norm": "activation norm",
    "act_sparsity": "activation sparsity",
    "attn_entropy": "attention entropy",
    "effective_rank": "effective rank",
}


def probe_section(rows: Sequence[Values], metrics: dict[str, Metric]) -> str | None:
    """All probes; None for a run without."""
    layered = [picture for name in _layered(rows) if (picture := _layers_chart(name, rows))]
    scalars = [
        chart(name, probe_title(name), metric)
        for name, metric in metrics.items()
        if name.startswith(PREFIX) and name not in _NOT_DRAWN and metric.drawable and any(metric.train.values)
    ]
    if not layered and not scalars:
        return None
    by_layer = "".join(layered[:_MOST_CHARTS])
    return f"<div class='charts wide'>{by_layer}</div>{chart_grid(scalars[:_MOST_CHARTS])}"


def probe_title(name: str) -> str:
    """A probe's key in words."""
    key = name.removeprefix(PREFIX)
    for prefix, title in _TITLES.items():
        if key == prefix or key.startswith(f"{prefix}_"):
            rest = key.removeprefix(prefix).replace("_", " ").strip()
            rest = {"rest": "outside the layers", "layer": "by layer", "std": "spread"}.get(rest, rest)
            return f"{title}, {rest}" if rest else title
    return key.replace("_", " ")


def _layered(rows: Sequence[Values]) -> list[str]:
    return list(
        dict.fromkeys(
            name
            for row in rows
            for name, value in row.items()
            if name.startswith(PREFIX) and name.endswith(LAYERS) and isinstance(value, list) and value
        )
    )


def _layers_chart(name: str, rows: Sequence[Values]) -> str:
    """Layers over steps; empty where nothing can be drawn."""
    steps, table = _table(name, rows)
    if not steps or not np.isfinite(table).any():
        return ""
    key, title = element_id(name), probe_title(name)
    layers = table.shape[1]
    low, high = np.nanmin(table), np.nanmax(table)
    logarithmic = 0 < low < high / _WIDE
    with drawing() as new_figure:
        figure = new_figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        if layers <= _MOST_LINES:
            for layer in range(layers):
                alone = "o" if len(steps) == 1 else None
                axes.plot(steps, table[:, layer], color=COLOURS[layer], label=f"layer {layer}", marker=alone)
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
        label = escape(visible(f"{title} over the steps of the run"), quote=True)
        picture = svg(figure, name=key, label=label)
    return figure_element(key, picture, f"<b>{html_text(title)}</b>")


def _table(name: str, rows: Sequence[Values]) -> tuple[list[int], np.ndarray]:
    """Steps, and values [steps, layers]; what is not known is NaN, and not drawn."""
    found = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), list)]
    if not found:
        return [], np.zeros((0, 0))
    layers = len(found[-1][1])
    alike = [(step, values) for step, values in found if len(values) == layers]
    numbers = [[as_number(value) for value in values] for _, values in alike]
    table = np.array([[np.nan if n is None else n for n in line] for line in numbers], dtype=np.float64)
    table[~np.isfinite(table)] = np.nan
    return [step for step, _ in alike], table
