"""Clean records: remove bad ones, duplicates, and those that repeat evaluation sets.

One pass over the records, in their order. A record is compared with the records before it that were kept, so
every removed duplicate repeats a record of the output.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from whet.data.clean.clean_report import CleanReport, Removal
from whet.data.clean.evaluation_overlap import EvaluationIndex
from whet.data.clean.near_duplicates import DEFAULT_SHINGLE, DEFAULT_THRESHOLD, NearDuplicateIndex
from whet.data.clean.parquet_file import convert_to_parquet
from whet.data.clean.record_turns import Turn, exact_key, record_turns, split_parts
from whet.data.clean.word_ngrams import DEFAULT_NGRAM
from whet.data.sources.readers import SourceRow
from whet.data.sources.source import Record, SingleSource, open_source
from whet.data.sources.splits import Split
from whet.data.sources.strict_json import JsonFields
from whet.errors import ConfigError, DataError
from whet.storage import create_file_atomically

_SUFFIXES = (".jsonl", ".ndjson", ".parquet")


@dataclass
class _Checks:
    """The records that were kept so far, as each check needs them."""

    near: NearDuplicateIndex | None
    evaluation: list[EvaluationIndex] = field(default_factory=list)
    exact: dict[bytes, int] = field(default_factory=dict)  # key -> kept record
    origins: dict[int, str] = field(default_factory=dict)  # of the kept records

    def check(self, index: int, origin: str, turns: list[Turn]) -> Removal | None:
        """Return why a record is removed, or keep it and return None."""
        for evaluation in self.evaluation:
            if overlap := evaluation.search(turns):
                other = evaluation.origins[overlap.record]
                return Removal(origin, "contaminated", duplicate_of=other, overlap=overlap.text)
        key = exact_key(turns)
        if (first := self.exact.get(key)) is not None:
            return Removal(origin, "exact duplicate", duplicate_of=self.origins[first])
        if self.near is not None and (near := self.near.add(index, split_parts(turns))):
            other = self.origins[near.record]
            return Removal(origin, "near duplicate", duplicate_of=other, similarity=round(near.similarity, 4))
        self.exact[key], self.origins[index] = index, origin
        return None


def clean_data(
    source: str | Path | Iterable[str | Path],
    output: str | Path | None = None,
    *,
    removed: str | Path | None = None,
    against: Iterable[str | Path] = (),
    near: bool = True,
    threshold: float = DEFAULT_THRESHOLD,
    shingle: int = DEFAULT_SHINGLE,
    ngram: int = DEFAULT_NGRAM,
    skip_bad: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> CleanReport:
    """Remove duplicates, and records that repeat evaluation sets. The kept records are written unchanged.

    The first of several duplicates is kept. Two records are exact duplicates if their texts are equal, apart
    from white space and Unicode form. They are near duplicates if each of their parts (prompt, answer) has at
    least the Jaccard similarity `threshold`; labels must be equal. MinHash LSH finds the candidates.

    Args:
        source: The records: a file, a glob, a directory (its train split), hf:NAME, or several of these.
        output: The file to write, .jsonl or .parquet. It must not exist. None only returns the report.
        removed: The JSON Lines file that lists the removed records. By default OUTPUT with the suffix
            .removed.jsonl.
        against: Evaluation sets (for a directory, its test split). A record is removed if it shares `ngram`
            words in sequence with one of their records, or has the same prompt.
        near: Whether to remove near duplicates (needs `whet[clean]`).
        threshold: The Jaccard similarity of near duplicates, above 0 and at most 1.
        shingle: The number of words of a shingle, the element of the sets that are compared.
        ngram: The number of words that make an overlap with an evaluation record.
        skip_bad: Remove bad records instead of raising an error.
        progress: Called with the number of records read so far.

    Returns:
        The number of records that were kept, and removed by reason.

    Raises:
        WhetError: A source or an argument is invalid, a file exists, or no record would be kept.
    """
    specs = [source] if isinstance(source, str | Path) else list(source)
    report = CleanReport(
        source=" + ".join(map(str, specs)),
        output=None if output is None else Path(output).expanduser(),
        removed_file=None if output is None else _removed_file(Path(output), removed),
        settings={"near": near, "threshold": threshold, "shingle": shingle, "ngram": ngram},
    )
    _check_targets(report)
    sources = [_open(spec, "train") for spec in specs]  # report a wrong name before reading the others
    sets = [_open(spec, "test") for spec in against]
    checks = _Checks(NearDuplicateIndex(threshold=threshold, shingle=shingle) if near else None)
    for evaluation_set in sets:
        index = EvaluationIndex(_records(evaluation_set), ngram=ngram)
        checks.evaluation.append(index)
        report.evaluation_records[evaluation_set.name] = len(index.origins)
    rows = (row for each in sources for row in each.rows())
    with _open_outputs(report) as (write_kept, write_removed):
        for origin, fields, removal in _select(rows, checks, skip_bad=skip_bad):
            report.records += 1
            progress(report.records)
            if removal is None:
                write_kept(_to_line(fields, origin))
            else:
                report.add(removal)
                write_removed(_to_line(removal.to_json(), origin))
        _check_kept(report)
    return report


def _select(
    rows: Iterable[SourceRow], checks: _Checks, *, skip_bad: bool
) -> Iterator[tuple[str, JsonFields, Removal | None]]:
    """Yield each record with the reason for which it is removed, or None."""
    for index, row in enumerate(rows):
        try:
            if isinstance(row, DataError):
                raise row
            origin, fields = row
            turns = record_turns(Record(fields, origin))
        except DataError as error:
            if not skip_bad:
                raise DataError(
                    error.message, hint=error.hint or "fix it, or remove bad records with --skip-bad"
                ) from error
            origin = error.message.partition(": ")[0]
            yield origin, {}, Removal(origin, "bad record", error=error.message)
        else:
            yield origin, fields, checks.check(index, origin, turns)


def _open(spec: str | Path, split: Split) -> SingleSource:
    source = open_source(str(spec), split=split)
    assert isinstance(source, SingleSource)
    return source


def _records(source: SingleSource) -> Iterator[Record]:
    for row in source.rows():
        if isinstance(row, DataError):
            raise row
        yield Record(row[1], row[0])


def _removed_file(output: Path, removed: str | Path | None) -> Path:
    name = output.with_suffix(".removed.jsonl") if removed is None else Path(removed)
    return name.expanduser()


def _check_targets(report: CleanReport) -> None:
    if report.output is None or report.removed_file is None:
        return
    if report.output.suffix not in _SUFFIXES:
        raise ConfigError(
            f"{report.output}: records are written as JSON Lines or Parquet",
            hint=f"choose a name that ends with {' or '.join(_SUFFIXES)}",
        )
    if report.output.absolute() == report.removed_file.absolute():
        raise ConfigError(f"{report.output}: the removed records need a file of their own")
    for path in (report.output, report.removed_file):
        if path.exists():
            raise ConfigError(f"{path} already exists", hint="choose another name, or remove it")


def _check_kept(report: CleanReport) -> None:
    if not report.records:
        raise DataError(f"{report.source} contains no records")
    if not report.kept:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in report.removed.items())
        raise DataError(
            f"{report.source}: no record would be kept ({counts})",
            hint=report.warning() or "is an evaluation set the same as the input?",
        )


Write = Callable[[str], object]


@contextlib.contextmanager
def _open_outputs(report: CleanReport) -> Iterator[tuple[Write, Write]]:
    """Yield functions that write a line to the output and to the list of removed records.

    Both files appear under their names when they are complete, and not at all after an error.
    """
    if report.output is None or report.removed_file is None:
        yield (lambda _: None), (lambda _: None)
        return
    is_parquet = report.output.suffix == ".parquet"
    with contextlib.ExitStack() as stack:
        staging = stack.enter_context(create_file_atomically(report.output))
        removed = stack.enter_context(create_file_atomically(report.removed_file))
        lines = staging.with_name(f"{staging.name}.jsonl") if is_parquet else staging
        stack.callback(lambda: lines.unlink(missing_ok=True) if is_parquet else None)
        with _open_text(lines) as kept_file, _open_text(removed) as removed_file:
            yield kept_file.write, removed_file.write
        if is_parquet:
            convert_to_parquet(lines, staging, name=str(report.output))


def _open_text(path: Path) -> IO[str]:
    return path.open("w", encoding="utf-8", newline="\n")


def _to_line(fields: JsonFields, origin: str) -> str:
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError as error:
        hint = "JSON cannot represent it; remove the value"
        raise DataError(f"{origin}: a field is NaN or infinite", hint=hint) from error
