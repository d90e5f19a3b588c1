"""Where records come from: files, directories, datasets, whet's own generators, and mixtures of them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from whet.config.data import WeightedSource
from whet.config.placeholder import parse_placeholder
from whet.data.sources.chat_messages import without_fields
from whet.data.sources.compressed_files import not_found
from whet.data.sources.readers import Content, SourceRow, digest_text, files_content
from whet.data.sources.record_formats import ShapeName, find_shape, shaped
from whet.data.sources.splits import Split, directory_content, has_split
from whet.errors import DataError
from whet.lazy_import import load_object

if TYPE_CHECKING:
    from whet.data.sources.python_rows import PythonRows

OnBad = Literal["error", "skip"]
Format = ShapeName | Literal["auto"]
Spec = str | Sequence[str] | Sequence[WeightedSource]
GivenRows = Mapping[str, "PythonRows"]  # records passed from Python, by the name of their placeholder

# directories with such a file, and the "module:function" that reads their content
DIRECTORY_READERS = {
    "quality_decisions.db": "whet.recipes.quality.ledgers:ledgers_content",
    "quality_outcomes.db": "whet.recipes.quality.ledgers:ledgers_content",
}

HUB_PREFIXES = ("hf:", "hf-stream:")
REASONS_KEPT = 100  # for `whet data --check`, which lists them
REASONS_SHOWN = 5  # where bad records are only mentioned


@dataclass(frozen=True)
class Record:
    """One record, and where it stood."""

    fields: dict[str, Any]  # Any: JSON values
    origin: str
    shape: ShapeName | None = None  # None: not yet checked, see `checked`
    unread: tuple[str, ...] = ()  # fields that the shape makes no text of


def checked(record: Record, form: Format = "auto") -> Record:
    """The record with its shape, its fields checked and in their one form."""
    wanted = None if form == "auto" else form
    try:
        shape, fields = shaped(record.fields, wanted)
        unread = find_shape(record.fields, wanted).unread(record.fields)
    except DataError as error:
        raise DataError(f"{record.origin}: {error.message}", hint=error.hint) from None
    return Record(fields, record.origin, shape, tuple(name for name in unread if name in fields))


@dataclass
class Skipped:
    """How many bad records were passed over, and what was wrong with the first of them."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)
    hint: str | None = None  # what to do about the first of them

    def add(self, error: DataError) -> None:
        """Count one more."""
        if not self.count:
            self.hint = error.hint
        self.count += 1
        if len(self.reasons) < REASONS_KEPT:
            self.reasons.append(error.message)

    def summary(self) -> str:
        """The count and the first reasons, for a person."""
        shown = self.reasons[:REASONS_SHOWN]
        more = "; ..." if self.count > len(shown) else ""
        return f"{self.count} bad record{'s' * (self.count != 1)} skipped ({'; '.join(shown)}{more})"

    def as_error(self, name: str) -> DataError:
        """The error where a source has bad records and no others."""
        many = f"all {self.count:,} records are bad, the first one: " if self.count > 1 else ""
        first = self.reasons[0]
        return DataError(f"{many}{first}" if name in first else f"{name}: {many}{first}", hint=self.hint)


class Source(Protocol):
    """Records in a fixed order. Each iteration reads them anew, a few at a time; none is a DataError."""

    name: str

    def __iter__(self) -> Iterator[Record]: ...

    @property
    def skipped(self) -> Skipped:
        """The bad records passed over so far."""

    def digest(self) -> str:
        """What tells this content from another: SHA-256, in hexadecimal."""


class OneSource:
    """The records of one file, split, dataset or generator."""

    def __init__(
        self, name: str, content: Content, *, form: Format, on_bad: OnBad, ignore: Collection[str] = ()
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
            record = self._record(row)
            if isinstance(record, Record):
                empty = False
                yield record
            elif self._on_bad == "error":
                raise record
            else:
                skipped.add(record)
                if skipped.count > self.skipped.count:  # a second pass meets the same ones again
                    self.skipped = skipped
        if empty:
            raise skipped.as_error(self.name) if skipped.count else DataError(f"{self.name} holds no records")

    def digest(self) -> str:
        """Of what is read: the content, and which fields of it are left out."""
        digest = self._content.digest()
        return digest_text(f"{digest} without {sorted(self.ignore)}") if self.ignore else digest

    def _record(self, row: SourceRow) -> Record | DataError:
        if isinstance(row, DataError):
            return row
        origin, fields = row
        if self.ignore:
            fields = without_fields(fields, self.ignore)
        try:
            return checked(Record(fields, origin), self._form)
        except DataError as error:
            return error


class SeveralSources:
    """Sources one after the other, or mixed by weight."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float] | None = None) -> None:
        self.sources = sources
        self.weights = weights
        self._checked = False  # whether a pass is known to be of a sane length
        names = [source.name for source in sources]
        if weights is None:
            self.name = " + ".join(names)
        else:
            shares = [f"{weight / sum(weights):.3g}" for weight in weights]
            self.name = " + ".join(f"{share} {name}" for share, name in zip(shares, names, strict=True))

    def __iter__(self) -> Iterator[Record]:
        if self.weights is None:
            return (record for source in self.sources for record in source)
        from whet.data.sources.source_mixing import check_pass, mix

        if not self._checked:
            check_pass(self.sources, self.weights, [source.name for source in self.sources])
            self._checked = True
        return mix(self.sources, self.weights)

    @property
    def skipped(self) -> Skipped:
        """Of all sources together."""
        parts = [source.skipped for source in self.sources]
        reasons = [reason for part in parts for reason in part.reasons]
        hint = next((part.hint for part in parts if part.count), None)
        return Skipped(sum(part.count for part in parts), reasons[:REASONS_KEPT], hint)

    def digest(self) -> str:
        """Of the sources' digests and weights."""
        return digest_text(repr([[source.digest() for source in self.sources], self.weights]))


def open_source(
    spec: Spec,
    *,
    split: Split = "train",
    form: Format = "auto",
    on_bad: OnBad = "error",
    ignore: Collection[str] = (),
    given: GivenRows = MappingProxyType({}),
) -> Source:
    """The source that a config names; `split` is taken where the name stands for several.

    `form` forces a shape. A bad record is raised, or with `skip` passed over and counted in `skipped`. The
    fields in `ignore` are read as if they were not there. A placeholder, python:NAME:HASH, is looked up in
    `given`.
    """
    if isinstance(spec, str):
        content = _given_content(spec, given) or _content(spec, split)
        return OneSource(spec, content, form=form, on_bad=on_bad, ignore=ignore)
    parts = [part if isinstance(part, str) else part.source for part in spec]
    sources = [
        open_source(part, split=split, form=form, on_bad=on_bad, ignore=ignore, given=given) for part in parts
    ]
    weights = [part.weight for part in spec if isinstance(part, WeightedSource)]
    return SeveralSources(sources, weights or None)


def holds_split(spec: Spec, split: Split) -> bool:
    """Whether a directory has a split, judged by the names in it."""
    if not isinstance(spec, str) or not (directory := Path(spec).expanduser()).is_dir():
        return False
    from whet.data.sources.hf_datasets import saved_has_split

    return saved_has_split(directory, split) or has_split(directory, split)


def _given_content(spec: str, given: GivenRows) -> Content | None:
    """Return the records that a placeholder stands for; None where the spec is no placeholder."""
    if (placeholder := parse_placeholder(spec)) is None:
        return None
    if (rows := given.get(placeholder.name)) is None:
        raise DataError(
            f"{spec} stands for records that are passed from Python, and they are not here",
            hint=f"whet.train and whet.resume take them: data={{{placeholder.name!r}: rows}}",
        )
    return rows.content()


def _content(spec: str, split: Split) -> Content:
    if spec.startswith("synth:"):
        from whet.data.synthetic.generators import identity

        return Content(rows=lambda: _generated(spec), digest=lambda: digest_text(identity(spec)))
    if spec.startswith(HUB_PREFIXES):
        from whet.data.sources.hf_datasets import hub_content

        return hub_content(spec, split)
    path = Path(spec).expanduser()
    if path.is_dir():
        from whet.data.sources.hf_datasets import is_saved, saved_content

        if is_saved(path):
            return saved_content(path, split)
        for name, reader in DIRECTORY_READERS.items():
            if (path / name).exists():
                content: Content = load_object(reader)(path)
                return content
        return directory_content(path, split)
    if not path.exists():
        raise not_found(path)
    if not path.is_file():
        raise DataError(f"{path} is not a file: records are read more than once, so a pipe will not do")
    return files_content([path])


def _generated(spec: str) -> Iterator[SourceRow]:
    from whet.data.synthetic.generators import generate

    for number, fields in enumerate(generate(spec), start=1):
        yield f"{spec}#{number}", fields
