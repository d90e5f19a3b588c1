"""Datasets of the Hugging Face `datasets` library: saved directories, and sets by name."""

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from whet.data.sources.compressed_files import missing_extra
from whet.data.sources.readers import Content, SourceRow, digest_files, digest_text
from whet.data.sources.splits import NAMES, Split, pick
from whet.data.sources.tables import from_table
from whet.errors import DataError

PREFIX, STREAM_PREFIX = "hf:", "hf-stream:"
_BATCH = 256


class Name(NamedTuple):
    """What `hf:NAME[:CONFIG][:SPLIT]` says."""

    name: str
    config: str | None
    split: str | None


def is_saved(directory: Path) -> bool:
    """Whether a directory was written by `save_to_disk`."""
    single = (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    return single or (directory / "dataset_dict.json").is_file()


def saved_has_split(directory: Path, split: Split) -> bool:
    """Whether a saved directory has a split of its own for this use."""
    return (directory / "dataset_dict.json").is_file() and any(
        (directory / name).is_dir() for name in NAMES[split]
    )


def saved_content(directory: Path, split: Split) -> Content:
    """A directory written by `save_to_disk`: its split, or all of it where it has none."""

    @cache
    def dataset() -> Any:  # Any: an optional library
        datasets = _library(str(directory))
        try:
            found = datasets.load_from_disk(str(directory))
        except Exception as error:  # the library raises what its readers raise
            raise DataError(f"{directory} cannot be read by datasets: {error}") from error
        return found[pick(split, found, str(directory))] if isinstance(found, dict) else found

    return Content(
        rows=lambda: dataset_rows(dataset(), str(directory)),
        digest=lambda: digest_files([Path(file["filename"]) for file in dataset().cache_files]),
    )


def hub_content(spec: str, split: Split) -> Content:
    """A set by its name, downloaded once (`hf:`) or read over the network at each pass (`hf-stream:`)."""
    streamed = spec.startswith(STREAM_PREFIX)
    name = parse_name(spec)

    @cache
    def chosen() -> str:
        return name.split or _find_split(name, split, spec)

    @cache
    def dataset() -> Any:  # Any: an optional library
        return _load(name, chosen(), spec, streaming=streamed)

    def digest() -> str:
        if streamed:  # nothing is read for it
            return digest_text(f"{name.name} {name.config} {chosen()} {_version(name, spec)}")
        files = [Path(file["filename"]) for file in dataset().cache_files]
        return digest_text(
            f"{chosen()} {digest_files(files)}"
        )  # a slice of a split has the files of all of it

    return Content(rows=lambda: dataset_rows(dataset(), spec), digest=digest)


def parse_name(spec: str) -> Name:
    """The parts of a spec. One part after the name is a configuration, unless it is called like a split."""
    _, _, rest = spec.partition(":")
    name, *parts = re.split(r":(?![^\[]*\])", rest)  # not the colon of train[:100]
    if not name or len(parts) > 2:
        raise DataError(
            f"{spec!r} is no Hugging Face dataset",
            hint="write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT",
        )
    known = {alias for aliases in NAMES.values() for alias in aliases}
    if len(parts) == 1 and (parts[0] in known or "[" in parts[0]):
        parts = ["", *parts]
    config, split = (*parts, "", "")[:2]
    return Name(name, config or None, split or None)


def _library(what: str) -> Any:  # Any: an optional library
    try:
        import datasets
    except ImportError as error:
        raise missing_extra(what, error) from error
    return datasets


def _find_split(name: Name, split: Split, spec: str) -> str:
    datasets = _library(spec)
    _refuse_network(name, spec)
    try:
        names = datasets.get_dataset_split_names(name.name, name.config)
    except Exception as error:  # the library raises what its readers and the network raise
        raise _unreadable(spec, error) from error
    return pick(split, names, spec)


def _load(name: Name, split: str, spec: str, *, streaming: bool) -> Any:  # Any: an optional library
    datasets = _library(spec)
    _refuse_network(name, spec)
    try:
        return datasets.load_dataset(name.name, name.config, split=split, streaming=streaming)
    except Exception as error:  # the library raises what its readers and the network raise
        raise _unreadable(spec, error) from error


def _version(name: Name, spec: str) -> str:
    """What tells the records of a set from those that it had before: its files, or the hub's commit."""
    if (directory := Path(name.name)).is_dir():
        return digest_files(sorted(path for path in directory.rglob("*") if path.is_file()))
    datasets = _library(spec)
    _refuse_network(name, spec)
    try:
        return str(datasets.load_dataset_builder(name.name, name.config).hash)
    except Exception as error:  # as above
        raise _unreadable(spec, error) from error


def _refuse_network(name: Name, spec: str) -> None:
    """`datasets` does not know WHET_OFFLINE; HF_HUB_OFFLINE keeps it to what it has."""
    offline = os.environ.get("WHET_OFFLINE", "0") not in ("", "0")
    if offline and os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and not Path(name.name).exists():
        raise DataError(
            f"{spec} is not on this machine, and WHET_OFFLINE is set",
            hint="unset it, or set HF_HUB_OFFLINE too to use what datasets has downloaded",
        )


def _unreadable(spec: str, error: Exception) -> DataError:
    return DataError(
        f"{spec} cannot be read by datasets: {error}",
        hint="check its name, configuration and split, and the network",
    )


def dataset_rows(
    dataset: Any,  # Any: an optional library
    place: str,
    *,
    origin: Callable[[int], str] | None = None,
) -> Iterator[SourceRow]:
    """Yield the rows of a set, a batch at a time; `origin` says where row 1, 2, ... is, if not `place#1`."""
    number = 0
    try:
        for table in dataset.with_format("arrow").iter(batch_size=_BATCH):
            yield from from_table(table, place, start=number + 1, origin=origin)
            number += table.num_rows
    except Exception as error:  # the library raises what its readers and the network raise
        raise _unreadable(place, error) from error
