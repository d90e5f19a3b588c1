"""The report of `whet data clean` as text."""

from collections.abc import Iterator

from whet.data.clean.clean_report import REASONS, CleanReport, Removal
from whet.errors import shorten

_NOUNS = {
    "bad record": "bad records",
    "contaminated": "contaminated",
    "exact duplicate": "exact duplicates",
    "near duplicate": "near duplicates",
}


def report_lines(report: CleanReport) -> Iterator[str]:
    """Yield the counts, a table by reason with an example of each, and the files."""
    for name, count in report.evaluation_records.items():
        yield f"{name}: {count:,} evaluation record{'s' * (count != 1)}"
    removed = report.records - report.kept
    records = f"{report.records:,} record{'s' * (report.records != 1)}"
    yield f"{report.source}: {records}, {report.kept:,} kept, {removed:,} removed"
    counts = {reason: report.removed[reason] for reason in REASONS if reason in report.removed}
    for reason, count in counts.items():
        name = f"{_NOUNS[reason]:<{max(len(_NOUNS[each]) for each in counts)}}"
        number = f"{count:>{len(f'{max(counts.values()):,}')},}"
        yield f"  {name}  {number}  {count / report.records:5.1%}  {_example(report.examples[reason])}"
    if report.output is None:
        yield "dry run: nothing was written"
    else:
        yield f"written: {report.output}, {report.removed_file}"


def _example(removal: Removal) -> str:
    if removal.error is not None:
        return f"such as {shorten(removal.error)}"
    text = f"such as {removal.origin} = {removal.duplicate_of}"
    if removal.similarity is not None:
        return f"such as {removal.origin} ~ {removal.duplicate_of}, similarity {removal.similarity:.2f}"
    return text if removal.overlap is None else f'{text}: "{shorten(removal.overlap)}"'
