"""Heat maps of what routers do: the share of each expert, step by step, a panel a layer."""

from collections.abc import Sequence

import numpy as np

from whet.data.inspect.token_text import visible
from whet.reporting.charts import figure_element
from whet.reporting.html_page import html_text
from whet.reporting.svg import drawing, svg
from whet.runs.metric_series import as_number
from whet.runs.run_files import Values

MOST_LAYERS = 8
_MOST_COLUMNS = 240  # steps side by side; of a longer run, means of neighbours
_COLUMNS = 2  # panels side by side


def router_section(rows: Sequence[Values]) -> str | None:
    """The maps and what they show; None for a run without experts."""
    steps, shares, names = _shares(rows)
    if not steps:
        return None
    layers, experts = shares.shape[1:]
    shown = min(layers, MOST_LAYERS)
    chosen = [round(place * (layers - 1) / max(1, shown - 1)) for place in range(shown)]  # first to last
    said = f"share of each of {experts:,} experts over the steps; an even one is {1 / experts:.1%}"
    if len(chosen) < layers:
        said += f"; {len(chosen)} of {layers:,} layers are shown"
    titles = [names[place] for place in chosen]
    picture = _picture(steps, shares[:, chosen], titles)
    caption = f"<b>Load of the experts</b> <span class='quiet'>{html_text(said)}</span>"
    return figure_element("router-load", picture, caption)


def _shares(rows: Sequence[Values]) -> tuple[list[int], np.ndarray, list[str]]:
    """Steps, shares [steps, layers, experts] and the layers' names."""
    for key in ("router_share", "per_expert_share"):
        found = [
            (row, table)
            for row in rows
            if "eval_s" not in row and (table := _table(row.get(key))) is not None
        ]
        if found:
            last, shape = found[-1][0], found[-1][1].shape
            alike = [(row["step"], table) for row, table in found if table.shape == shape]
            layers = last.get("router_layers")
            if key == "per_expert_share":
                names = ["all layers" if shape[0] == 1 and layers else "experts"]
            elif isinstance(layers, list) and len(layers) == shape[0]:
                names = [visible(f"layer {layer}") for layer in layers]
            else:
                names = [f"router {number}" for number in range(shape[0])]
            return [step for step, _ in alike], np.stack([table for _, table in alike]), names
    return [], np.zeros((0, 0, 0)), []


def _table(value: object) -> np.ndarray | None:
    """[layers, experts], or None for what is no such table; what is not finite is NaN, left blank."""
    if not isinstance(value, list) or not value:
        return None
    lines = value if all(isinstance(line, list) for line in value) else [value]
    if not lines[0] or any(len(line) != len(lines[0]) for line in lines):
        return None
    numbers = [[as_number(share) for share in line] for line in lines]
    table = np.array([[np.nan if n is None else n for n in line] for line in numbers], dtype=np.float64)
    table[~np.isfinite(table)] = np.nan
    return table


def _binned(shares: np.ndarray) -> np.ndarray:
    """No more columns than can be told apart: [columns, layers, experts]."""
    if len(shares) <= _MOST_COLUMNS:
        return shares
    together = -(-len(shares) // _MOST_COLUMNS)  # as many steps in each column, or time would be uneven
    return np.stack([shares[start : start + together].mean(0) for start in range(0, len(shares), together)])


def _picture(steps: Sequence[int], shares: np.ndarray, names: Sequence[str]) -> str:
    shown = _binned(shares)
    _, layers, experts = shown.shape
    lines = -(-layers // _COLUMNS)
    columns = min(_COLUMNS, layers)
    high = min(2.4, max(1.3, 0.5 + 0.14 * experts))
    top = float(np.nanmax(shown)) if np.isfinite(shown).any() else 1.0
    extent = (steps[0] - 0.5, steps[-1] + 0.5, experts - 0.5, -0.5)
    with drawing() as new_figure:
        figure = new_figure(figsize=(8.6, 0.4 + high * lines), layout="constrained")
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
