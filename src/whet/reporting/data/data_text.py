"""The data of a run as text: colored on a terminal, elsewhere with brackets around supervised tokens."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from whet.data.inspect.data_facts import Bin, DataView, Sample, SplitFacts
from whet.data.inspect.problems import Problem
from whet.data.inspect.step_facts import DisplayedRow
from whet.data.inspect.token_text import Piece, to_visible_text
from whet.reporting.data.data_wording import model_line, sample_title, split_rows, step_rows, tokenizer_rows

_SUPERVISED, _CONTEXT, _SPECIAL, _PADDING = "bold green", "dim", "magenta", "dim red"
_WEIGHT = "yellow"
_BAR, _ROW = 40, 72  # columns
_BLOCKS = " ▏▎▍▌▋▊▉█"
_MAX_DETAILS = 5  # per problem, without --check


class DataText:
    """Prints the data of a run to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plain = not console.is_terminal or console.no_color or console.color_system is None

    def show_part(self, name: str) -> None:
        """Print the title of a part of a mix; a run that is not a mix has one part without a name."""
        if name:
            self._title(f"part {name}")

    def show(self, view: DataView) -> None:
        """Print everything except the problems."""
        self._rows([("model", model_line(view)), *tokenizer_rows(view)])
        for split in view.splits:
            self._title(f"{split.name}: {split.source}")
            self._rows(split_rows(split, view))
            for line in _bars(split.bins, view.config.data.max_length):
                self._line(line)
        self._title("steps")
        self._rows(step_rows(view))
        if any(split.samples for split in view.splits):
            self._samples(view)
        if view.steps is not None:
            self._title("first micro-batch")
            self._micro_batch(view.steps.displayed_rows, view.steps.rows)

    def show_plan(self, view: DataView) -> None:
        """Print the summary for a dry run: the model, the sizes of the splits and the steps."""
        self._rows([("model", model_line(view))])
        for split in view.splits:
            self._rows([(split.name, split.source), *split_rows(split, view)[:3]])
        self._rows(step_rows(view))

    def show_problems(self, problems: Sequence[Problem], *, every_record: bool) -> None:
        """Print the problems, each with all affected records (`every_record`) or the first few."""
        self._title(f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "no problems")
        for problem in problems:
            self._line(f"  {'error' if problem.is_fatal else 'warning'}: {problem.message}", style="bold red")
            if problem.hint:
                self._line(f"    hint: {problem.hint}")
            shown = problem.details if every_record else problem.details[:_MAX_DETAILS]
            for detail in shown:
                self._line(f"    {detail}")
            if len(shown) < len(problem.details):
                self._line("    ... (whet data --check lists all)")

    def _samples(self, view: DataView) -> None:
        self._title("samples")
        legend = Text("  ")
        for piece in (Piece("supervised", (), True), Piece("context", (), False)):
            legend.append_text(self._pieces([piece])).append("  ")
        self._console.print(legend.append(self._pieces([Piece("⟨special⟩", (), False, special=True)])))
        for split in view.splits:
            for sample in split.samples:
                self._sample(split, sample)

    def _sample(self, split: SplitFacts, sample: Sample) -> None:
        self._line("")
        self._line(f"  {split.name}, {sample_title(sample)}")
        text = self._pieces(sample.head)
        if sample.omitted_tokens:
            text.append(f"\n… {sample.omitted_tokens:,} more tokens …\n", style="italic")
            text.append_text(self._pieces(sample.tail))
        for line in text.split("\n", allow_blank=False):
            self._console.print(Text("    ").append_text(line))

    def _pieces(self, pieces: Sequence[Piece]) -> Text:
        text = Text()
        for weight, group in groupby(pieces, key=lambda piece: piece.weight if piece.supervised else 0.0):
            shown_weight = f"{weight:g}\u00d7" if weight not in (0, 1) else ""
            text.append(f"⟦{shown_weight}" if self._plain and weight else shown_weight, style=_WEIGHT)
            for piece in group:
                text.append(piece.text, style=_style(piece))
            text = _close_bracket(text) if self._plain and weight else text
        return text

    def _micro_batch(self, rows: Sequence[DisplayedRow], count: int) -> None:
        width = max(sum(d.length for d in row.documents) + row.padding for row in rows)
        scale = max(1.0, width / _ROW)
        legend = Text("  ").append("█", style=_SUPERVISED).append(" supervised  ").append("░", style=_CONTEXT)
        legend.append(" context  ").append("·", style=_PADDING).append(" padding  ").append("│ next example")
        self._console.print(legend.append(f"; {width:,} positions wide"))
        for row in rows:
            self._console.print(_draw_row(row, scale))
        if count > len(rows):
            self._line(f"  and {count - len(rows):,} more rows")

    def _title(self, text: str) -> None:
        self._console.print()
        self._line(text, style="bold")

    def _rows(self, rows: Sequence[tuple[str, str]]) -> None:
        for name, value in rows:
            self._line(f"  {name:<13}  {value}")

    def _line(self, text: str, *, style: str = "") -> None:
        self._console.print(Text(to_visible_text(text), style=style))


def _close_bracket(text: Text) -> Text:
    """Append the closing bracket, before a trailing line break if there is one."""
    if not text.plain.endswith("\n"):
        return text.append("⟧")
    text.right_crop(1)
    return text.append("⟧\n")


def _style(piece: Piece) -> str:
    if piece.special:
        return f"{_SPECIAL} underline" if piece.supervised else _SPECIAL
    return _SUPERVISED if piece.supervised else _CONTEXT


def _bars(bins: Sequence[Bin], max_length: int) -> Iterator[str]:
    """Yield the lines of a histogram; the bars of lengths above the limit are lighter."""
    largest = max(each.count for each in bins)
    labels = [each.label for each in bins]
    for label, each in zip(labels, bins, strict=True):
        eighths = -(-each.count * _BAR * 8 // largest)
        bar = "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()
        if each.low > max_length:
            bar = "▒" * -(-eighths // 8)
        yield f"  {label:>{max(map(len, labels))}}  {bar} {each.count:,}"
    if bins[-1].low > max_length:
        yield f"  ▒ longer than data.max_length {max_length:,}"


def _draw_row(row: DisplayedRow, scale: float) -> Text:
    """Return a row drawn to scale; every span gets at least one column, so that no example disappears."""
    text = Text("  ")
    for document in row.documents:
        for length, supervised in document.runs:
            columns = max(1, round(length / scale))
            text.append(("█" if supervised else "░") * columns, style=_SUPERVISED if supervised else _CONTEXT)
        text.append("│")
    return text.append("·" * round(row.padding / scale), style=_PADDING)
