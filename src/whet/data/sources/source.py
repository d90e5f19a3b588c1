"""Open the records of a config: files, directories, datasets, synthetic data, and mixtures of them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

from whet.config.data import Format, FormatName, Weight, WeightedSource
from whet.config.placeholder import parse_placeholder
from whet.data.sources.chat_messages import without_fields
from whet.data.sources.compressed_files import is_archive, missing_path_error
from whet.data.sources.readers import Columns, Shard, SourceContent, SourceRow, digest_text, files_content
from whet.data.sources.record_formats import find_format, normalize_record
from whet.data.sources.splits import Split, archive_content, directory_content, glob_content, has_split
from whet.errors import DataError
from whet.lazy_import import load_object

if TYPE_CHECKING:
    from whet.data.sources.python_rows import PythonRows

OnBad = Literal["error", "skip"]
SourceSpec = str | Sequence[str] | Sequence[WeightedSource]
GivenRows = Mapping[str, "PythonRows"]  # records passed from Python, by placeholder name

# marker files of special directories, and the "module:function" that reads the directory
DIRECTORY_READERS = {
    "quality_decisions.db": "whet.recipes.quality.ledgers:ledgers_content",
    "quality_outcomes.db": "whet.recipes.quality.ledgers:ledgers_content",
}

HUB_PREFIXES = ("hf:", "hf-stream:")
_HUB_ADDRESSES = ("hf://datasets/", "hf://")  # other spellings of hf:
MAX_REASONS = 100  # for `whet data --check`, which lists them
MAX_LOGGED_REASONS = 5  # in a log line


@dataclass(frozen=True)
class Record:
    """A record with its origin, for example `train.jsonl:17`."""

    fields: dict[str, Any]  # Any: JSON values
    origin: str
    record_format: FormatName | None = None  # None if not yet validated, see `validate_record`
    unread_fields: tuple[str, ...] = ()  # fields that the format does not turn into text


def validate_record(record: Record, record_format: Format = "auto") -> Record:
    """Return a record with its format, its fields validated and normalized."""
    format_name = None if record_format == "auto" else record_format
    try:
        detected, fields = normalize_record(record.fields, format_name)
        unread = find_format(record.fields, format_name).unread(record.fields)
    except DataError as error:
        raise DataError(f"{record.origin}: {error.message}", hint=error.hint) from None
    return Record(fields, record.origin, detected, tuple(name for name in unread if name in fields))


@dataclass
class Skipped:
    """The number of bad records that were skipped, and the reasons for the first of them."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)
    hint: str | None = None  # how to fix the first of them

    def add(self, error: DataError) -> None:
        """Count one more bad record."""
        if not self.count:
            self.hint = error.hint
        self.count += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(error.message)

    def summary(self) -> str:
        """Return the count and the first reasons as one line."""
        shown = self.reasons[:MAX_LOGGED_REASONS]
        more = "; ..." if self.count > len(shown) else ""
        return f"{self.count} bad record{'s' * (self.count != 1)} skipped ({'; '.join(shown)}{more})"

    def as_error(self, name: str) -> DataError:
        """Return the error for a source whose records are all bad."""
        prefix = f"all {self.count:,} records are bad; the first error: " if self.count > 1 else ""
        first = self.reasons[0]
        return DataError(f"{prefix}{first}" if name in first else f"{name}: {prefix}{first}", hint=self.hint)


class Source(Protocol):
    """Records in a fixed order.

    Each iteration reads them from the start, a few at a time. A source without records raises a DataError.
    """

    name: str

    def __iter__(self) -> Iterator[Record]: ...

    @property
    def skipped(self) -> Skipped:
        """The bad records skipped so far."""

    def digest(self) -> str:
        """Return the SHA-256 of the content, in hexadecimal."""


class SingleSource:
    """The records of one file, split, dataset or synthetic source."""

    def __init__(
        self, name: str, content: SourceContent, *, form: Format, on_bad: OnBad, ignore: Collection[str] = ()
    ) -> None:
        self.name = name
        self.skipped = Skipped()
        self.ignore = frozenset(ignore)
        self._content = content
        self._form = form
        self._on_bad = on_bad

    def __iter__(self) -> Iterator[Record]:
        skipped = Skipped()
        empty = True
        for row in self._content.rows():
            record = self.to_record(row)
            if isinstance(record, Record):
                empty = False
                yield record
            elif self._on_bad == "error":
                raise record
            else:
                skipped.add(record)
                if skipped.count > self.skipped.count:  # later passes see the same bad records
                    self.skipped = skipped
        if empty:
            raise (
                skipped.as_error(self.name)
                if skipped.count
                else DataError(f"{self.name} contains no records")
            )

    def rows(self) -> Iterator[SourceRow]:
        """Return the rows as they are in the source, with all fields, before any validation."""
        return self._content.rows()

    def digest(self) -> str:
        """Return the digest of the content and of the ignored field names."""
        digest = self._content.digest()
        return digest_text(f"{digest} without {sorted(self.ignore)}") if self.ignore else digest

    def shards(self) -> Sequence[Shard]:
        """Return the parts that a stream reads, each from any position."""
        from whet.data.sources.shards import shards_of

        return shards_of(self._content)

    def identity(self) -> str:
        """Return a digest that is cheap to compute, of the content and of the ignored field names."""
        from whet.data.sources.shards import identify

        return digest_text(f"{identify(self._content)} without {sorted(self.ignore)}")

    def to_record(self, row: SourceRow) -> Record | DataError:
        """Return a row as a validated record, or the error that makes it unusable."""
        if isinstance(row, DataError):
            return row
        origin, fields = row
        if self.ignore:
            fields = without_fields(fields, self.ignore)
        try:
            return validate_record(Record(fields, origin), self._form)
        except DataError as error:
            return error


class CombinedSource:
    """Several sources, one after the other or mixed by weight. Only streams have weights that change."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[Weight] | None = None) -> None:
        self.sources = sources
        self.weights = weights
        self._checked = False  # whether the length of a pass was checked
        names = [source.name for source in sources]
        if weights is None:
            self.name = " + ".join(names)
        else:
            parts = zip(describe_shares(weights), names, strict=True)
            self.name = " + ".join(f"{share} {name}" for share, name in parts)

    def __iter__(self) -> Iterator[Record]:
        if self.weights is None:
            return (record for source in self.sources for record in source)
        from whet.data.sources.source_mixing import check_pass, mix

        weights = [weight for weight in self.weights if isinstance(weight, int | float)]
        if not self._checked:
            check_pass(self.sources, weights, [source.name for source in self.sources])
            self._checked = True
        return mix(self.sources, weights)

    @property
    def skipped(self) -> Skipped:
        """The skipped records of all sources."""
        parts = [source.skipped for source in self.sources]
        reasons = [reason for part in parts for reason in part.reasons]
        hint = next((part.hint for part in parts if part.count), None)
        return Skipped(sum(part.count for part in parts), reasons[:MAX_REASONS], hint)

    def digest(self) -> str:
        """Return the digest of the digests and weights of the sources."""
        return digest_text(repr([[source.digest() for source in self.sources], self.weights]))


def open_source(
    spec: SourceSpec,
    *,
    split: Split = "train",
    form: Format = "auto",
    on_bad: OnBad = "error",
    ignore: Collection[str] = (),
    columns: Columns = MappingProxyType({}),
    given: GivenRows = MappingProxyType({}),
    seed: int = 0,
) -> Source:
    """Open the source that a config names.

    Args:
        spec: A path, a glob, `hf:NAME`, `synth:NAME`, a placeholder, or a list of these, optionally with
            weights or epochs.
        split: The split to read if the source has several.
        form: The record format to require; `auto` detects the format of each record.
        on_bad: `error` raises a DataError for a bad record; `skip` skips it and counts it in `skipped`.
        ignore: Names of fields that are removed from all records and messages.
        columns: Names of fields to rename: whet's name -> the name in the source. A source of a weighted
            list can have its own.
        given: Records passed from Python, for placeholders of the form `python:NAME:HASH`.
        seed: Seed of the fraction of a source that `epochs` selects.

    Returns:
        A source that reads its records from the start on each iteration.

    Raises:
        DataError: The source does not exist, or its format is not supported.
    """
    if isinstance(spec, str):
        content = _placeholder_content(spec, given) or _content(spec, split)
        if columns:
            from whet.data.sources.columns import rename_columns

            content = rename_columns(content, columns, name=spec)
        return SingleSource(spec, content, form=form, on_bad=on_bad, ignore=ignore)
    parts = [
        (part, columns) if isinstance(part, str) else (part.source, part.columns or columns) for part in spec
    ]
    sources = [
        open_source(
            part, split=split, form=form, on_bad=on_bad, ignore=ignore, columns=part_columns, given=given
        )
        for part, part_columns in parts
    ]
    if any(isinstance(part, WeightedSource) and part.epochs is not None for part in spec):
        from whet.data.sources.source_epochs import RepeatedSource

        epochs = [part.epochs or 1 for part in spec if isinstance(part, WeightedSource)]
        parts_with_epochs = enumerate(zip(sources, epochs, strict=True))
        return CombinedSource(
            [RepeatedSource(source, n, seed=seed, index=index) for index, (source, n) in parts_with_epochs]
        )
    weights = [part.weight for part in spec if isinstance(part, WeightedSource) and part.weight is not None]
    return CombinedSource(sources, weights or None)


def describe_shares(weights: Sequence[Weight]) -> list[str]:
    """Return the share of each source as text, or its weights if they change during the run."""
    total = sum(weight for weight in weights if isinstance(weight, int | float))
    if any(isinstance(weight, Mapping) for weight in weights):
        return [
            "/".join(
                f"{value:.3g}" for value in (weight.values() if isinstance(weight, Mapping) else [weight])
            )
            for weight in weights
        ]
    return [f"{weight / total:.3g}" for weight in weights if isinstance(weight, int | float)]


def is_source(value: SourceSpec | float | None) -> TypeGuard[SourceSpec]:
    """Return whether the value of a data key names a source; a number holds out a part of data.train."""
    return value is not None and not isinstance(value, int | float)


def directory_has_split(spec: SourceSpec, split: Split) -> bool:
    """Return whether a directory contains a split, judged by its file names."""
    if not isinstance(spec, str) or not (directory := Path(spec).expanduser()).is_dir():
        return False
    from whet.data.sources.hf_datasets import saved_has_split

    return saved_has_split(directory, split) or has_split(directory, split)


def _placeholder_content(spec: str, given: GivenRows) -> SourceContent | None:
    """Return the records of a placeholder, or None if the spec is not a placeholder."""
    if (placeholder := parse_placeholder(spec)) is None:
        return None
    if (rows := given.get(placeholder.name)) is None:
        raise DataError(
            f"{spec} is a placeholder for records from Python, which were not passed",
            hint=f"pass them to whet.train or whet.resume: data={{{placeholder.name!r}: rows}}",
        )
    return rows.content()


def _content(spec: str, split: Split) -> SourceContent:
    if spec.startswith("synth:"):
        from whet.data.synthetic.generators import identity

        return SourceContent(rows=lambda: _synthetic_rows(spec), digest=lambda: digest_text(identity(spec)))
    if spec.startswith(HUB_PREFIXES):
        from whet.data.sources.hf_datasets import hub_content

        address = next((prefix for prefix in _HUB_ADDRESSES if spec.startswith(prefix)), "hf:")
        return hub_content(f"hf:{spec.removeprefix(address)}" if "//" in address else spec, split)
    if "://" in spec:
        from whet.data.sources.remote_files import check_address, local_path, remote_content

        if check_address(spec) != "file":
            return remote_content(spec)
        spec = local_path(spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _directory_content(path, split)
    return (None if path.exists() else glob_content(spec)) or _file_content(path, split)


def _directory_content(path: Path, split: Split) -> SourceContent:
    from whet.data.sources.hf_datasets import is_saved_dataset, saved_content

    if is_saved_dataset(path):
        return saved_content(path, split)
    for name, reader in DIRECTORY_READERS.items():
        if (path / name).exists():
            content: SourceContent = load_object(reader)(path)
            return content
    return directory_content(path, split)


def _file_content(path: Path, split: Split) -> SourceContent:
    if not path.exists():
        raise missing_path_error(path)
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file; records are read more than once, so a pipe cannot be used"
        )
    content = files_content([path])
    return archive_content(path, split) if is_archive(path) else content


def _synthetic_rows(spec: str) -> Iterator[SourceRow]:
    from whet.data.synthetic.generators import generate

    for number, fields in enumerate(generate(spec), start=1):
        yield f"{spec}#{number}", fields
