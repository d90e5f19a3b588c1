"""Heat maps of expert load: the share of tokens per expert over the steps, one panel per layer."""

from collections.abc import Sequence

import numpy as np

from whet.data.inspect.token_text import to_visible_text
from whet.reporting.charts import figure_element
from whet.reporting.html_page import html_text
from whet.reporting.svg import figure_style, svg
from whet.runs.metric_series import as_number
from whet.runs.run_files import JsonObject

MAX_LAYERS = 8
_MAX_COLUMNS = 240  # columns of a heat map; longer runs are averaged over neighboring steps
_COLUMNS = 2  # panels per row


def router_section(rows: Sequence[JsonObject]) -> str | None:
    """Return the heat maps with their caption as HTML, or None for a run without experts."""
    steps, shares, names = _shares(rows)
    if not steps:
        return None
    layers, experts = shares.shape[1:]
    shown = min(layers, MAX_LAYERS)
    selected = [round(n * (layers - 1) / max(1, shown - 1)) for n in range(shown)]  # evenly spaced
    caption = f"share of each of {experts:,} experts over the steps; a uniform share is {1 / experts:.1%}"
    if len(selected) < layers:
        caption += f"; {len(selected)} of {layers:,} layers are shown"
    titles = [names[layer] for layer in selected]
    picture = _picture(steps, shares[:, selected], titles)
    heading = f"<b>Expert load</b> <span class='quiet'>{html_text(caption)}</span>"
    return figure_element("router-load", picture, heading)


def _shares(rows: Sequence[JsonObject]) -> tuple[list[int], np.ndarray, list[str]]:
    """Return steps, shares [steps, layers, experts] and the layer names."""
    for key in ("router_share", "per_expert_share"):
        entries = [
            (row, table)
            for row in rows
            if "eval_s" not in row and (table := _table(row.get(key))) is not None
        ]
        if entries:
            last, shape = entries[-1][0], entries[-1][1].shape
            same_shape = [(row["step"], table) for row, table in entries if table.shape == shape]
            layers = last.get("router_layers")
            if key == "per_expert_share":
                names = ["all layers" if shape[0] == 1 and layers else "experts"]
            elif isinstance(layers, list) and len(layers) == shape[0]:
                names = [to_visible_text(f"layer {layer}") for layer in layers]
            else:
                names = [f"router {number}" for number in range(shape[0])]
            return [step for step, _ in same_shape], np.stack([table for _, table in same_shape]), names
    return [], np.zeros((0, 0, 0)), []


def _table(value: object) -> np.ndarray | None:
    """Return a [layers, experts] array, or None if the value is not such a table; non-finite becomes NaN."""
    if not isinstance(value, list) or not value:
        return None
    lines = value if all(isinstance(line, list) for line in value) else [value]
    if not lines[0] or any(len(line) != len(lines[0]) for line in lines):
        return None
    numbers = [[as_number(share) for share in line] for line in lines]
    table = np.array([[np.nan if n is None else n for n in line] for line in numbers], dtype=np.float64)
    table[~np.isfinite(table)] = np.nan
    return table


def _bin_steps(shares: np.ndarray) -> np.ndarray:
    """Average neighboring steps to at most _MAX_COLUMNS columns: [columns, layers, experts]."""
    if len(shares) <= _MAX_COLUMNS:
        return shares
    steps_per_bin = -(-len(shares) // _MAX_COLUMNS)  # equal bins, to keep the time axis linear
    starts = range(0, len(shares), steps_per_bin)
    return np.stack([shares[start : start + steps_per_bin].mean(0) for start in starts])


def _picture(steps: Sequence[int], shares: np.ndarray, names: Sequence[str]) -> str:
    shown = _bin_steps(shares)
    _, layers, experts = shown.shape
    lines = -(-layers // _COLUMNS)
    columns = min(_COLUMNS, layers)
    panel_height = min(2.4, max(1.3, 0.5 + 0.14 * experts))
    top = float(np.nanmax(shown)) if np.isfinite(shown).any() else 1.0
    extent = (steps[0] - 0.5, steps[-1] + 0.5, experts - 0.5, -0.5)
    with figure_style() as new_figure:
        figure = new_figure(figsize=(8.6, 0.4 + panel_height * lines), layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        for number, axes in enumerate(grid.flat):
            if number >= layers:
                axes.set_visible(False)
                continue
            image = axes.imshow(
                shown[:, number].T,
                aspect="auto",
                extent=extent,
                interpolation="none",
                vmin=0,
                vmax=max(top, 1e-9),
                cmap="viridis",
            )
            axes.set_title(names[number], fontsize=9)
            axes.yaxis.get_major_locator().set_params(integer=True, nbins=6)
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
            if number % columns == 0:
                axes.set_ylabel("expert")
            if number + columns >= layers:
                axes.set_xlabel("step")
                axes.tick_params(labelbottom=True)
        figure.colorbar(image, ax=grid, label="share", shrink=0.9, aspect=20 * lines)
        return svg(figure, name="router-load", label="share of each expert over the steps")
