"""Pictures of what goes on inside a model: attention maps, and numbers by layer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from whet.data.inspect.token_text import visible
from whet.errors import ConfigError
from whet.reporting.svg import BLUE, drawing

DPI = 120
_COLUMNS = 4
_NAMED = 32  # tokens that still fit beside a map


def draw_attention(
    maps: Mapping[int, torch.Tensor],
    path: str | Path,
    *,
    layer: int,
    row: int = 0,
    labels: Sequence[str] | None = None,
) -> Path:
    """The heads of one layer, as `attention_maps` gives them, for one row of the tokens."""
    if layer not in maps:
        raise ConfigError(f"there is no map of layer {layer}", hint=f"there are: {', '.join(map(str, maps))}")
    heads = maps[layer][row].detach().float().cpu().numpy()  # [heads, queries, keys]
    names = None if labels is None or len(labels) > _NAMED else [visible(label) for label in labels]
    with drawing() as new_figure:
        columns = min(_COLUMNS, len(heads))
        lines = -(-len(heads) // columns)
        figure = new_figure(figsize=(2.6 * columns, 2.7 * lines), layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(heads):
                axes.axis("off")
                continue
            axes.imshow(heads[place], cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"layer {layer}, head {place}")
            if names is not None:
                axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
                axes.set_yticks(range(len(names)), names, fontsize=6)
        return _saved(figure, path)


def draw_layers(values: Mapping[str, float], path: str | Path, *, title: str) -> Path:
    """One number a layer, such as the size of its output or what a probe reads in it, in the order given."""
    if not values:
        raise ConfigError("there is no layer to draw")
    with drawing() as new_figure:
        figure = new_figure(figsize=(max(4.0, 0.25 * len(values)), 3.0), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(values)), list(values.values()), color=BLUE)
        axes.set_xticks(range(len(values)), [visible(name) for name in values], rotation=90, fontsize=7)
        axes.set_title(visible(title))
        return _saved(figure, path)


def _saved(figure: Any, path: str | Path) -> Path:  # Any: matplotlib has no types
    path = Path(path)
    try:
        figure.savefig(path, dpi=DPI)
    except ValueError as error:  # a format it does not know
        raise ConfigError(f"{path}: {error}", hint="a name that ends in .png, .svg or .pdf") from error
    return path
