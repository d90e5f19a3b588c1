"""The frame of every HTML page: one file, no scripts, no network requests, all text escaped."""

from collections.abc import Iterable
from html import escape

from whet.data.inspect.token_text import to_visible_text

# defense in depth for untrusted text: even unescaped markup could not run or load anything
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #1d1f21; --quiet: #676b70; --line: #dcdcd6;
  --link: #2a6db0; --bar: #4a8f5c; --bad: #b3261e; --bad-paper: #fdf0ee; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #17191c; --ink: #e4e4e0; --quiet: #9a9fa6;
  --line: #34383d; --link: #7fb4ea; --bar: #5aa56e; --bad: #ff8a80; --bad-paper: #2c1d1c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 5rem; background: var(--paper); color:
  var(--ink); font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
.quiet { color: var(--quiet); }
table { border-collapse: collapse; }
th { text-align: left; font-weight: 500; color: var(--quiet); padding: .12rem 1.5rem .12rem 0;
  vertical-align: top; white-space: nowrap; }
td { padding: .12rem 0; }
.scroll { overflow-x: auto; }
@media (max-width: 40rem) { th { white-space: normal; overflow-wrap: normal; padding-right: .8rem; } }
.problems { background: var(--bad-paper); border-left: 4px solid var(--bad); padding: .8rem 1.1rem;
  margin: 1.2rem 0; border-radius: 0 6px 6px 0; }
.problems ul { margin: .3rem 0; padding-left: 1.2rem; }
.problems b { color: var(--bad); }
@media print { :root { color-scheme: light; --paper: #fff; } }
details { margin: .6rem 0; }
summary { cursor: pointer; }
"""


def html_page(parts: Iterable[str], *, title: str, style: str) -> str:
    """Return a complete page from HTML fragments; `style` is CSS in addition to the common style sheet."""
    head = (
        f"<meta charset='utf-8'><meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html_text(title)}</title><style>{_STYLE}{style}</style>"
    )
    body = "\n".join(parts)
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def html_text(text: str) -> str:
    """Escape a single-line text, with control characters made visible."""
    return escape(to_visible_text(text))


def html_lines(text: str) -> str:
    """Escape a multi-line text for a `pre` element, keeping its line breaks."""
    return "\n".join(map(html_text, text.split("\n")))


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a two-column table of names and values."""
    lines = (f"<tr><th>{html_text(name)}</th><td>{html_text(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(lines)}</table>"
