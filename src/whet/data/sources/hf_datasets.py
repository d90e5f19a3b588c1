"""Read Hugging Face datasets: directories written by `save_to_disk`, and datasets by name."""

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from whet.data.sources.compressed_files import missing_extra_error
from whet.data.sources.readers import (
    Columns,
    Position,
    Shard,
    SourceContent,
    SourceRow,
    digest_files,
    digest_text,
    rename_row,
)
from whet.data.sources.splits import SPLIT_ALIASES, Split, select_split_name
from whet.data.sources.tables import iter_table_rows
from whet.errors import DataError
from whet.lazy_import import load_object

PREFIX, STREAM_PREFIX = "hf:", "hf-stream:"
_BATCH = 256
_IDENTIFY = "whet.data.sources.shards:identify_files"  # only streams use it


class HubDataset(NamedTuple):
    """The parts of a spec `hf:NAME[:CONFIG][:SPLIT]`."""

    name: str
    config: str | None
    split: str | None


def is_saved_dataset(directory: Path) -> bool:
    """Return whether a directory was written by `save_to_disk`."""
    single = (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    return single or (directory / "dataset_dict.json").is_file()


def saved_has_split(directory: Path, split: Split) -> bool:
    """Return whether a saved directory contains this split."""
    return (directory / "dataset_dict.json").is_file() and any(
        (directory / name).is_dir() for name in SPLIT_ALIASES[split]
    )


def saved_content(directory: Path, split: Split) -> SourceContent:
    """Return the rows of a directory written by `save_to_disk`: one split, or all if it has no splits."""

    @cache
    def dataset() -> Any:  # Any: an optional library
        datasets = _import_datasets(str(directory))
        try:
            loaded = datasets.load_from_disk(str(directory))
        except Exception as error:  # datasets raises whatever its readers raise
            raise DataError(f"{directory} cannot be read by datasets: {error}") from error
        return (
            loaded[select_split_name(split, loaded, str(directory))] if isinstance(loaded, dict) else loaded
        )

    return SourceContent(
        rows=lambda: dataset_rows(dataset(), str(directory)),
        digest=lambda: digest_files(_cache_files(dataset())),
        shards=lambda columns: dataset_shards(dataset(), str(directory), columns),
        identity=lambda: load_object(_IDENTIFY)(_cache_files(dataset())),
    )


def hub_content(spec: str, split: Split) -> SourceContent:
    """Return the rows of a named dataset: downloaded once (`hf:`), or streamed per pass (`hf-stream:`)."""
    is_streamed = spec.startswith(STREAM_PREFIX)
    name = parse_hub_spec(spec)

    @cache
    def split_name() -> str:
        return name.split or _find_split(name, split, spec)

    @cache
    def dataset() -> Any:  # Any: an optional library
        return _load(name, split_name(), spec, streaming=is_streamed)

    def digest() -> str:
        if is_streamed:  # the digest must not read the stream
            return digest_text(f"{name.name} {name.config} {split_name()} {_version(name, spec)}")
        # a slice of a split has the same files as the complete split
        return digest_text(f"{split_name()} {digest_files(_cache_files(dataset()))}")

    def identity() -> str:
        files = "" if is_streamed else load_object(_IDENTIFY)(_cache_files(dataset()))
        return digest() if is_streamed else digest_text(f"{split_name()} {files}")

    return SourceContent(
        rows=lambda: dataset_rows(dataset(), spec),
        digest=digest,
        shards=lambda columns: dataset_shards(dataset(), spec, columns),
        identity=identity,
    )


def _cache_files(dataset: Any) -> list[Path]:  # Any: an optional library
    return [Path(file["filename"]) for file in dataset.cache_files]


def parse_hub_spec(spec: str) -> HubDataset:
    """Parse a spec into its parts.

    A single part after the name is a configuration, unless it is the name of a split.
    """
    _, _, rest = spec.partition(":")
    name, *parts = re.split(r":(?![^\[]*\])", rest)  # not the colon of train[:100]
    if not name or len(parts) > 2:
        raise DataError(
            f"{spec!r} is not a valid Hugging Face dataset spec",
            hint="write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT",
        )
    known = {alias for aliases in SPLIT_ALIASES.values() for alias in aliases}
    if len(parts) == 1 and (parts[0] in known or "[" in parts[0]):
        parts = ["", *parts]
    config, split = (*parts, "", "")[:2]
    return HubDataset(name, config or None, split or None)


def _import_datasets(source: str) -> Any:  # Any: an optional library
    try:
        import datasets
    except ImportError as error:
        raise missing_extra_error(source, error) from error
    return datasets


def _find_split(name: HubDataset, split: Split, spec: str) -> str:
    datasets = _import_datasets(spec)
    _check_offline(name, spec)
    try:
        names = datasets.get_dataset_split_names(name.name, name.config)
    except Exception as error:  # datasets raises whatever its readers and the network raise
        raise _unreadable_error(spec, error) from error
    return select_split_name(split, names, spec)


def _load(name: HubDataset, split: str, spec: str, *, streaming: bool) -> Any:  # Any: an optional library
    datasets = _import_datasets(spec)
    _check_offline(name, spec)
    try:
        return datasets.load_dataset(name.name, name.config, split=split, streaming=streaming)
    except Exception as error:  # datasets raises whatever its readers and the network raise
        raise _unreadable_error(spec, error) from error


def _version(name: HubDataset, spec: str) -> str:
    """Return an identifier of the current records: a digest of the dataset's files, or the builder's hash."""
    if (directory := Path(name.name)).is_dir():
        return digest_files(sorted(path for path in directory.rglob("*") if path.is_file()))
    datasets = _import_datasets(spec)
    _check_offline(name, spec)
    try:
        return str(datasets.load_dataset_builder(name.name, name.config).hash)
    except Exception as error:  # datasets raises whatever the network raises
        raise _unreadable_error(spec, error) from error


def _check_offline(name: HubDataset, spec: str) -> None:
    """Raise an error if a download is needed offline: `datasets` only reads HF_HUB_OFFLINE."""
    offline = os.environ.get("WHET_OFFLINE", "0") not in ("", "0")
    if offline and os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and not Path(name.name).exists():
        raise DataError(
            f"{spec} is not on this machine, and WHET_OFFLINE is set",
            hint="unset it, or also set HF_HUB_OFFLINE to use the cache of datasets",
        )


def _unreadable_error(spec: str, error: Exception) -> DataError:
    return DataError(
        f"{spec} cannot be read by datasets: {error}",
        hint="check the name, the configuration, the split and the network connection",
    )


def dataset_rows(
    dataset: Any,  # Any: an optional library
    name: str,
    *,
    origin: Callable[[int], str] | None = None,
    start: int = 0,
) -> Iterator[SourceRow]:
    """Yield the rows of a dataset in batches, from the row `start`, counted from 0.

    `origin` maps the row number, counted from 1, to a location. The default is `name#1`, `name#2`, ...
    """
    number = 0
    try:
        if start and hasattr(dataset, "__len__"):  # not streamed: rows are found without reading others
            number = min(start, len(dataset))
            dataset = dataset.select(range(number, len(dataset)))
        for table in dataset.with_format("arrow").iter(batch_size=_BATCH):
            skipped = min(max(0, start - number), table.num_rows)
            first = number + skipped + 1
            yield from iter_table_rows(table.slice(skipped), name, start=first, origin=origin)
            number += table.num_rows
    except Exception as error:  # datasets raises whatever its readers and the network raise
        raise _unreadable_error(name, error) from error


def dataset_shards(
    dataset: Any,  # Any: an optional library
    name: str,
    columns: Columns,
    *,
    origin: Callable[[int], str] | None = None,
) -> list[Shard]:
    """Return the shards of a streamed dataset, which are its files, or a downloaded dataset as one shard.

    `origin` is as in `dataset_rows`; rows of the second of several shards are `name#2:1`, `name#2:2`, ...
    """
    count = 1 if hasattr(dataset, "__len__") else dataset.num_shards

    def shard(index: int) -> Shard:
        def rows(position: Position) -> Iterator[tuple[SourceRow, Position]]:
            start = position[0] if position else 0
            part = dataset if count == 1 else dataset.shard(num_shards=count, index=index)
            part_name = name if count == 1 else f"{name}#{index + 1}:"
            located = origin or (lambda number: f"{part_name}{'#' * (count == 1)}{number}")
            read = dataset_rows(part, name, origin=located, start=start)
            for number, row in enumerate(read, start=start + 1):
                yield rename_row(row, columns), (number,)

        return Shard(rows)

    return [shard(index) for index in range(count)]
