"""The comparison of models as text."""

from collections.abc import Iterator

from whet.data.inspect.token_text import to_visible_text
from whet.reporting.formatting import align_columns
from whet.reporting.text.benchmark_text import COMPARISON_HEADINGS, comparison_rows
from whet.studies.compare_models import ModelComparison

HEADINGS = tuple("model" if heading == "group" else heading for heading in COMPARISON_HEADINGS)
NOTE = (
    "Values have their standard error. Differences are to the first model, over the same items; the interval "
    "is a paired bootstrap over items. McNemar A:B: only the first model solved A items, only this one B."
)
_MAX_ANSWER_LENGTH = 400


def models_text(comparison: ModelComparison) -> str:
    """Return the table of metrics, the samples, and the notes."""
    rows = list(comparison_rows(comparison.metrics, comparison.names))
    parts = [align_columns([HEADINGS, *rows]), NOTE] if rows else ["no metric could be compared"]
    parts += _samples(comparison)
    parts += [f"note: {note}" for note in comparison.notes]
    return "\n\n".join(parts)


def _samples(comparison: ModelComparison) -> Iterator[str]:
    for number, sample in enumerate(comparison.samples, start=1):
        answers = zip(comparison.names, sample.answers, strict=True)
        lines = [("prompt", sample.prompt), ("expected", sample.expected), *answers]
        width = max(len(to_visible_text(label)) for label, _ in lines)
        yield f"sample {number}\n" + "\n".join(
            f"  {to_visible_text(label).ljust(width)}  {_shorten(to_visible_text(text))}"
            for label, text in lines
        )


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_ANSWER_LENGTH else f"{text[: _MAX_ANSWER_LENGTH - 1]}…"
