"""Plots of a model's internals: attention maps, and bar charts over layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from whet.data.inspect.token_text import to_visible_text
from whet.errors import ConfigError
from whet.reporting.svg import BLUE, figure_style

DPI = 120
_COLUMNS = 4
_MAX_LABELS = 32  # tokens that fit along the axes of a map


def draw_attention(
    maps: Mapping[int, torch.Tensor],
    path: str | Path,
    *,
    layer: int,
    row: int = 0,
    labels: Sequence[str] | None = None,
) -> Path:
    """Plot the attention weights of every head of one layer.

    Args:
        maps: Attention weights by layer, as returned by `attention_maps`.
        path: The picture to write; its suffix selects the format (.png, .svg or .pdf).
        layer: The layer to draw.
        row: The row of the batch to draw.
        labels: The tokens of the row, shown along the axes if there are at most 32.

    Returns:
        The path of the picture.

    Raises:
        ConfigError: If `maps` does not have the layer, matplotlib is missing or the format is not supported.
    """
    if layer not in maps:
        raise ConfigError(
            f"layer {layer} has no attention map", hint=f"available layers: {', '.join(map(str, maps))}"
        )
    heads = maps[layer][row].detach().float().cpu().numpy()  # [heads, queries, keys]
    names = (
        None if labels is None or len(labels) > _MAX_LABELS else [to_visible_text(label) for label in labels]
    )
    with figure_style() as new_figure:
        columns = min(_COLUMNS, len(heads))
        rows = -(-len(heads) // columns)
        figure = new_figure(figsize=(2.6 * columns, 2.7 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for head, axes in enumerate(grid.flat):
            if head >= len(heads):
                axes.axis("off")
                continue
            axes.imshow(heads[head], cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"layer {layer}, head {head}")
            if names is not None:
                axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
                axes.set_yticks(range(len(names)), names, fontsize=6)
        return _save(figure, path)


def draw_layers(values: Mapping[str, float], path: str | Path, *, title: str) -> Path:
    """Plot one value per layer as a bar chart, such as activation norms or probe accuracies.

    Args:
        values: Values by layer name, in the order of the bars.
        path: The picture to write; its suffix selects the format (.png, .svg or .pdf).
        title: The title of the chart.

    Returns:
        The path of the picture.

    Raises:
        ConfigError: If `values` is empty, matplotlib is missing or the format is not supported.
    """
    if not values:
        raise ConfigError("there are no layers to draw")
    with figure_style() as new_figure:
        figure = new_figure(figsize=(max(4.0, 0.25 * len(values)), 3.0), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(values)), list(values.values()), color=BLUE)
        axes.set_xticks(
            range(len(values)), [to_visible_text(name) for name in values], rotation=90, fontsize=7
        )
        axes.set_title(to_visible_text(title))
        return _save(figure, path)


def _save(figure: Any, path: str | Path) -> Path:  # Any: matplotlib has no types
    path = Path(path)
    try:
        figure.savefig(path, dpi=DPI)
    except ValueError as error:  # unsupported format
        raise ConfigError(f"{path}: {error}", hint="use a path that ends in .png, .svg or .pdf") from error
    return path
