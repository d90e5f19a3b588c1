"""Matplotlib figures as inline SVG in the page's text color, without external references."""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from typing import Any

from whet.errors import ConfigError

_INK = "#010203"  # placeholder color, replaced by currentColor
# distinguishable, and visible on light and dark backgrounds
COLORS = (
    *("#3d85c6", "#d9822b", "#4a9e5c", "#c94f4f", "#8e6bbf"),
    *("#a0785a", "#d072b0", "#808890", "#a8a32e", "#2ea8b8"),
)
BLUE, ORANGE = COLORS[:2]

_SETTINGS = {
    "svg.fonttype": "none",  # keeps text searchable and in the page's font
    "svg.hashsalt": "whet",  # deterministic ids: equal figures give equal bytes
    "text.parse_math": False,  # dollar signs in class names are not math
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#808080",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}


@contextlib.contextmanager
def figure_style() -> Iterator[Any]:  # Any: matplotlib has no types
    """Yield matplotlib's Figure class with the page style active; draw and call `svg` inside the context."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib", hint="pip install 'whet[report]'") from error
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update(_SETTINGS)
        warnings.simplefilter("ignore")  # missing glyphs do not matter: the browser's font draws them
        yield Figure


def svg(figure: Any, *, name: str, label: str) -> str:  # Any: a matplotlib figure
    """Return a figure as an SVG element; `name` prefixes its ids, to keep them unique on the page."""
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    opening, inner = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None
    inner = inner.replace("xlink:href", "href").replace(_INK, "currentColor")
    # a style element would apply to the entire page
    inner = re.sub(r"<style[^>]*>.*?</style>", "", inner, flags=re.S)
    used = {match[1] or match[2] for match in re.finditer(r'url\(#([^)]+)\)|href="#([^"]+)"', inner)}
    inner = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", inner)
    inner = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", inner)
    return f'<svg {box[0]} role="img" aria-label="{label}">{inner.strip()}'
