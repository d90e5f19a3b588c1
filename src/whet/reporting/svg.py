"""Pictures for a page: matplotlib's SVG, in the page's own ink, with nothing in it that is fetched."""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from typing import Any

from whet.errors import ConfigError

_INK = "#010203"  # drawn in this, shown in the colour of the text around it
# to be told apart, and seen on white and on black
COLOURS = (
    *("#3d85c6", "#d9822b", "#4a9e5c", "#c94f4f", "#8e6bbf"),
    *("#a0785a", "#d072b0", "#808890", "#a8a32e", "#2ea8b8"),
)
BLUE, ORANGE = COLOURS[:2]

_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "svg.hashsalt": "whet",  # equal pictures are equal to the byte
    "text.parse_math": False,  # a dollar in somebody's class name is a dollar
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
def drawing() -> Iterator[Any]:  # Any: matplotlib has no types
    """Matplotlib's Figure, in the style of a page; draw and call `svg` inside."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib", hint="pip install 'whet[report]'") from error
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # whatever somebody's matplotlibrc says
        matplotlib.rcParams.update(_SETTINGS)
        warnings.simplefilter("ignore")  # a letter its font lacks: the reader's has it
        yield Figure


def svg(figure: Any, *, name: str, label: str) -> str:  # Any: a matplotlib figure
    """The figure as an element of a page; `name` keeps its ids apart from those of others."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    opening, inner = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None
    inner = inner.replace("xlink:href", "href").replace(_INK, "currentColor")
    inner = re.sub(r"<style[^>]*>.*?</style>", "", inner, flags=re.S)  # it would be the whole page's
    used = {found[1] or found[2] for found in re.finditer(r'url\(#([^)]+)\)|href="#([^"]+)"', inner)}
    inner = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", inner)
    inner = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", inner)
    return f'<svg {box[0]} role="img" aria-label="{label}">{inner.strip()}'
