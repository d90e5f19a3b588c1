"""Directories that hold train, valid and test side by side."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from whet.data.sources.readers import READERS, Content, digest_text, files_content, split_name
from whet.errors import DataError

Split = Literal["train", "valid", "test"]
T = TypeVar("T")

NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev", "eval"),
    "test": ("test",),
}
LEARNED = ("train", "hard")  # the second: hard records of a curriculum


def learned(by_split: Mapping[str, T]) -> list[T]:
    """Of what there is for each split, that of the training set: all that a run learns from."""
    return [by_split[name] for name in LEARNED if name in by_split]


def pick(split: Split, names: Iterable[str], place: str) -> str:
    """The name under which a split goes, of those there are."""
    there = list(names)
    found = [name for name in there if name in NAMES[split]]
    if len(found) > 1:
        raise DataError(
            f"{place} has several {split} splits: {', '.join(found)}", hint="name the one that is meant"
        )
    if not found:
        raise DataError(f"{place} has no {split} split", hint=f"it has {_listed(there)}")
    return found[0]


def directory_content(directory: Path, split: Split) -> Content:
    """The file of a split in a directory, or its numbered parts (`train-00000-of-00002.parquet`)."""
    paths = _files_of(directory, split)
    content = files_content(paths)
    _, suffix = split_name(paths[0])
    if suffix == ".jsonl":
        return content
    # the directory's name does not tell how the same bytes are read
    return replace(content, digest=lambda: digest_text(f"{suffix} {content.digest()}"))


def has_split(directory: Path, split: Split) -> bool:
    """Whether a directory has files of a split."""
    return bool(_candidates(directory, split))


def _files_of(directory: Path, split: Split) -> list[Path]:
    found = _candidates(directory, split)
    if not found:
        names = [entry.name for entry in sorted(directory.iterdir())]
        raise DataError(
            f"{directory} is a directory without a {split} file",
            hint=f"it holds {_listed(names)}; wanted: {split}.jsonl, or another format whet reads",
        )
    if len(found) == 1 and found[0][1] is None:
        return [found[0][0]]
    paths = [path for path, _ in found]
    if (
        any(part is None for _, part in found)
        or len({(part and part[1:], _kind(path)) for path, part in found}) > 1
    ):
        raise DataError(
            f"{directory} has several {split} files: {_listed([path.name for path in paths])}",
            hint="name the one that is meant",
        )
    parts = sorted((part[0], path) for path, part in found if part)
    count = next(part[1] for _, part in found if part)
    if [number for number, _ in parts] != list(range(count)):
        raise DataError(f"{directory} has {len(parts)} of the {count} parts of its {split} split")
    return [path for _, path in parts]


def _candidates(directory: Path, split: Split) -> list[tuple[Path, tuple[int, int] | None]]:
    """Files named after a split, each with its number and the number of parts where it is a part."""
    found = []
    for path in sorted(directory.iterdir()):
        stem, suffix = split_name(path)
        match = re.fullmatch(r"([a-z]+)(?:-(\d{1,9})-of-(\d{1,9}))?", stem)
        if suffix in READERS and match and match[1] in NAMES[split] and path.is_file():
            part = (int(match[2]), int(match[3])) if match[2] else None
            found.append((path, part))
    return found


def _kind(path: Path) -> str:
    return "".join(path.suffixes)


def _listed(names: list[str]) -> str:
    return ", ".join([*names[:10], *(["..."] if len(names) > 10 else [])]) or "nothing"
