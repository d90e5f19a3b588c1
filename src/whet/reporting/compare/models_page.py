"""The comparison of models as one HTML page."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from whet.errors import ConfigError
from whet.reporting.compare.models_text import HEADINGS, NOTE
from whet.reporting.html_page import html_lines, html_page, html_text
from whet.reporting.text.benchmark_text import comparison_rows
from whet.storage import replace_text
from whet.studies.compare_models import ModelComparison

_STYLE = """
.grid td, .grid th { padding-right: 1.2rem; vertical-align: top; }
.numbers td { font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { margin: 0; white-space: pre-wrap; font: inherit; }
"""


def write_models_page(comparison: ModelComparison, path: str | Path) -> Path:
    """Write the comparison as an HTML page, overwriting an existing file, and return its path."""
    check_page_name(path)
    replace_text(Path(path), models_page(comparison))
    return Path(path)


def check_page_name(path: str | Path) -> None:
    """Raise ConfigError if a path is not that of an HTML page."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"{path} does not end in .html",
            hint="the comparison is an HTML page, and overwrites an existing file",
        )


def models_page(comparison: ModelComparison) -> str:
    """Return the page as HTML; equal comparisons give equal pages."""
    notes = "".join(f"<p>{html_text(note)}</p>" for note in comparison.notes)
    rows = [
        [html_text(cell) for cell in row] for row in comparison_rows(comparison.metrics, comparison.names)
    ]
    table = f"{_table(HEADINGS, rows, 'grid numbers')}<p class='quiet'>{html_text(NOTE)}</p>"
    parts = [
        f"<h1>{html_text(' · '.join(comparison.names))}</h1>{notes}",
        f"<section id='metrics'><h2>Metrics</h2>{table}</section>",
        *_samples(comparison),
    ]
    return html_page(parts, title="whet compare", style=_STYLE)


def _samples(comparison: ModelComparison) -> Iterator[str]:
    if not comparison.samples:
        return
    rows = [
        [_block(text) for text in (sample.prompt, sample.expected, *sample.answers)]
        for sample in comparison.samples
    ]
    table = _table(("prompt", "expected", *comparison.names), rows, "grid")
    yield f"<section id='samples'><h2>Samples</h2>{table}</section>"


def _block(text: str) -> str:
    return f"<pre>{html_lines(text)}</pre>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], classes: str) -> str:
    """Return a table whose cells are HTML."""
    heading = "".join(f"<th>{html_text(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table class='{classes}'><tr>{heading}</tr>{lines}</table></div>"
