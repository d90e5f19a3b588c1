"""Rename the columns of a source to whet's field names, as data.columns asks for."""

from collections.abc import Iterator

from whet.data.sources.readers import Columns, SourceContent, SourceRow, digest_text, rename_fields
from whet.data.sources.record_formats import describe_fields
from whet.data.sources.shards import identify, shards_of
from whet.errors import DataError


def rename_columns(content: SourceContent, columns: Columns, *, name: str) -> SourceContent:
    """Return a source whose fields have whet's names. Its digest covers the mapping."""
    rename = content.rename or (lambda mapping: _renamed_rows(content, mapping))
    return SourceContent(
        rows=lambda: _checked_rows(rename(columns), columns, name=name),
        digest=lambda: digest_text(f"{content.digest()} columns {sorted(columns.items())}"),
        shards=lambda _: shards_of(content, columns),
        identity=lambda: digest_text(f"{identify(content)} columns {sorted(columns.items())}"),
    )


def _renamed_rows(content: SourceContent, columns: Columns) -> Iterator[SourceRow]:
    for row in content.rows():
        yield row if isinstance(row, DataError) else (row[0], rename_fields(row[1], columns))


def _checked_rows(rows: Iterator[SourceRow], columns: Columns, *, name: str) -> Iterator[SourceRow]:
    """Yield the rows; after the last one, raise an error for a column that no record has."""
    unseen, example = set(columns), None
    for row in rows:
        if not isinstance(row, DataError):
            example = row[1] if example is None else example
            unseen -= row[1].keys() if unseen else set()
        yield row
    if unseen and example is not None:
        target = min(unseen)
        raise DataError(
            f"{name}: no record has the column {columns[target]!r} that data.columns names for {target}; the "
            f"first record has the fields {describe_fields(example)}",
            hint="data.columns maps whet's name to the name in the source, as in {prompt: question}",
        )
