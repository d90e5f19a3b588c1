"""The data of a run as one HTML page: loss masks, lengths, packing and problems."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from whet.data.inspect.data_facts import Bin, DataView, Sample, SplitFacts
from whet.data.inspect.problems import Problem
from whet.data.inspect.step_facts import DisplayedRow
from whet.data.inspect.token_text import Piece, to_visible_text
from whet.reporting.data.data_wording import model_line, sample_title, split_rows, step_rows, tokenizer_rows
from whet.reporting.html_page import html_lines, html_page, html_table, html_text

_STYLE = """
:root { --supervised: #c9edcf; --supervised-ink: #0b4a1a; --special: #7a2ea0; --context: #d7d9dc;
  --padding: #f0c9c4; }
@media screen and (prefers-color-scheme: dark) { :root { --supervised: #1d4a2a; --supervised-ink: #c5f2cf;
  --special: #d59cf0; --context: #484d54; --padding: #5c2f2b; } }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .2rem .8rem; margin-top:
  .8rem; align-items: center; font-variant-numeric: tabular-nums; font-size: .9rem; max-width: 44rem; }
.bars b { font-weight: 400; text-align: right; }
.bars i { display: block; height: .9rem; background: var(--bar); border-radius: 2px; min-width: 1px; }
.tokens { font: 14px/1.75 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; margin: 0;
  padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 6px; color: var(--quiet); }
.tokens span { box-shadow: inset -1px 0 var(--line); }
.l { background: var(--supervised); color: var(--supervised-ink); }
.s { color: var(--special); font-weight: 600; }
.w { color: var(--ink); font-weight: 600; font-size: .8em; vertical-align: super; }
.bars i.cut { background: var(--padding); }
.more { display: block; color: var(--quiet); font-style: italic; padding: .4rem 0; }
.legend > span { display: inline-block; margin-right: 1.2rem; }
.legend i { display: inline-block; width: 1.1em; height: 1.1em; vertical-align: -.2em; margin-right:
  .4em; }
.row { display: flex; height: 1.5rem; margin: .25rem 0; }
.row > span { display: flex; margin-right: 2px; border-radius: 2px; overflow: hidden; min-width: 2px; }
.row i { display: block; }
.supervised { background: var(--bar); }
.context { background: var(--context); }
.padding { background: var(--padding); }
.fine { border-left: 4px solid var(--bar); padding: .4rem 1.1rem; margin: 1.2rem 0; }
"""


def data_page(view: DataView, problems: Sequence[Problem], *, title: str) -> str:
    """Return the page as HTML."""
    parts = [
        f"<h1>Training data</h1><p class='quiet'>{html_text(title)}</p>",
        _problems(problems),
        html_table([("model", model_line(view)), *tokenizer_rows(view)]),
        *_template(view),
        *(_split(split, view) for split in view.splits),
        f"<h2>Steps</h2>{html_table(step_rows(view))}",
        *_micro_batch(view),
    ]
    return html_page(parts, title=f"{title}: training data", style=_STYLE)


def _problems(problems: Sequence[Problem]) -> str:
    if not problems:
        return "<p class='fine'>No problems found.</p>"
    return f"<div class='problems'>{''.join(map(_problem, problems))}</div>"


def _problem(problem: Problem) -> str:
    hint = f" <span class='quiet'>{html_text(problem.hint)}</span>" if problem.hint else ""
    items = "".join(f"<li>{html_text(detail)}</li>" for detail in problem.details)
    return (
        f"<p><b>{'error' if problem.is_fatal else 'warning'}</b> {html_text(problem.message)}.{hint}</p>"
        f"{f'<ul>{items}</ul>' if items else ''}"
    )


def _template(view: DataView) -> Iterable[str]:
    if view.tokenizer is not None and view.tokenizer.template is not None:
        template = html_lines(view.tokenizer.template)
        yield f"<details><summary>chat template</summary><pre class='tokens'>{template}</pre></details>"


def _split(split: SplitFacts, view: DataView) -> str:
    legend = (
        "<p class='legend'><span><i class='l'></i>supervised</span>"
        "<span><i class='context'></i>context</span><span class='s'>⟨special token⟩</span></p>"
    )
    samples = "".join(map(_sample, split.samples))
    return (
        f"<h2>{html_text(split.name)}: {html_text(split.source)}</h2>{html_table(split_rows(split, view))}"
        f"<h3>Tokens per record</h3>{_bars(split.bins, view.config.data.max_length)}"
        f"{legend if samples else ''}{samples}"
    )


def _bars(bins: Sequence[Bin], max_length: int) -> str:
    largest = max(each.count for each in bins)
    bars = (
        f"<b>{each.label}</b><i{' class=cut' if each.low > max_length else ''}"
        f" style='width:{100 * each.count / largest:.2f}%'></i><span>{each.count:,}</span>"
        for each in bins
    )
    label = f"longer than data.max_length {max_length:,}"
    note = f"<p class='legend'><span><i class='padding'></i>{label}</span></p>"
    return f"<div class='bars'>{''.join(bars)}</div>{note if bins[-1].low > max_length else ''}"


def _sample(sample: Sample) -> str:
    more = (
        f"<span class='more'>… {sample.omitted_tokens:,} more tokens …</span>"
        if sample.omitted_tokens
        else ""
    )
    pieces = f"{_pieces(sample.head)}{more}{_pieces(sample.tail)}"
    return f"<h3>{html_text(sample_title(sample))}</h3><pre class='tokens'>{pieces}</pre>"


def _pieces(pieces: Sequence[Piece]) -> str:
    """Return tokens as HTML, with the loss weight in front of tokens that have another one than 1."""
    runs = []
    for weight, run in groupby(pieces, key=lambda piece: piece.weight if piece.supervised else 1.0):
        runs.append("" if weight == 1 else f"<b class='w'>{weight:g}\u00d7</b>")
        runs += map(_piece, run)
    return "".join(runs)


def _piece(piece: Piece) -> str:
    """Return a token as HTML. Invisible characters are already escaped, so its line breaks are kept."""
    kinds = " ".join(name for name, is_set in (("l", piece.supervised), ("s", piece.special)) if is_set)
    ids = " ".join(map(str, piece.ids))
    weight = f"; weight {piece.weight:g}" if piece.supervised and piece.weight != 1 else ""
    return f"<span class='{kinds}' title='{ids}{weight}'>{escape(piece.text)}</span>"


def _micro_batch(view: DataView) -> Iterable[str]:
    plan = view.steps
    if plan is None:
        return
    yield (
        "<h2>First micro-batch</h2><p class='legend'><span><i class='supervised'></i>supervised</span>"
        "<span><i class='context'></i>context</span><span><i class='padding'></i>padding</span></p>"
    )
    width = max(sum(d.length for d in row.documents) + row.padding for row in plan.displayed_rows)
    yield from (_row(row, width) for row in plan.displayed_rows)
    more = (
        f"; {plan.rows - len(plan.displayed_rows):,} more rows are not drawn"
        if plan.rows > len(plan.displayed_rows)
        else ""
    )
    yield f"<p class='quiet'>{width:,} positions wide; one block per example{more}</p>"


def _row(row: DisplayedRow, width: int) -> str:
    blocks = []
    for document in row.documents:
        spans = "".join(
            f"<i class='{'supervised' if supervised else 'context'}' style='flex:{length}'></i>"
            for length, supervised in document.runs
        )
        title = escape(f"{to_visible_text(document.origin)}: {document.length:,} positions", quote=True)
        size = _share(document.length, width)
        blocks.append(f"<span style='width:{size}' title='{title}'>{spans}</span>")
    if row.padding:
        blocks.append(f"<span class='padding' style='width:{_share(row.padding, width)}'></span>")
    return f"<div class='row'>{''.join(blocks)}</div>"


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.3f}%"
