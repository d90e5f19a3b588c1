"""Find the train, valid and test splits of a directory."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from whet.data.sources.readers import READERS, SourceContent, digest_text, files_content, split_file_name
from whet.errors import DataError

Split = Literal["train", "valid", "test"]
T = TypeVar("T")

SPLIT_ALIASES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev", "eval"),
    "test": ("test",),
}
TRAINING_SPLITS = ("train", "hard")  # hard: the hard records of a curriculum


def training_entries(by_split: Mapping[str, T]) -> list[T]:
    """Return the entries of `by_split` that belong to the training data."""
    return [by_split[name] for name in TRAINING_SPLITS if name in by_split]


def select_split_name(split: Split, names: Iterable[str], source: str) -> str:
    """Return the name of a split among the names that exist."""
    available = list(names)
    matches = [name for name in available if name in SPLIT_ALIASES[split]]
    if len(matches) > 1:
        raise DataError(
            f"{source} has several {split} splits: {', '.join(matches)}",
            hint="name one of them in the config",
        )
    if not matches:
        raise DataError(f"{source} has no {split} split", hint=f"it has {_join_names(available)}")
    return matches[0]


def directory_content(directory: Path, split: Split) -> SourceContent:
    """Return the file of a split in a directory, or its numbered parts (`train-00000-of-00002.parquet`)."""
    paths = _find_files(directory, split)
    content = files_content(paths)
    _, suffix = split_file_name(paths[0])
    if suffix == ".jsonl":
        return content
    # the same bytes read as another format are different records
    return replace(content, digest=lambda: digest_text(f"{suffix} {content.digest()}"))


def has_split(directory: Path, split: Split) -> bool:
    """Return whether a directory has files of a split."""
    return bool(_candidates(directory, split))


def _find_files(directory: Path, split: Split) -> list[Path]:
    candidates = _candidates(directory, split)
    if not candidates:
        names = [entry.name for entry in sorted(directory.iterdir())]
        raise DataError(
            f"{directory} has no {split} file",
            hint=f"it contains {_join_names(names)}; add {split}.jsonl, or another supported format",
        )
    if len(candidates) == 1 and candidates[0][1] is None:
        return [candidates[0][0]]
    paths = [path for path, _ in candidates]
    if (
        any(part is None for _, part in candidates)
        or len({(part and part[1:], _kind(path)) for path, part in candidates}) > 1
    ):
        raise DataError(
            f"{directory} has several {split} files: {_join_names([path.name for path in paths])}",
            hint="name one of them in the config",
        )
    parts = sorted((part[0], path) for path, part in candidates if part)
    count = next(part[1] for _, part in candidates if part)
    if [number for number, _ in parts] != list(range(count)):
        raise DataError(f"{directory} has {len(parts)} of the {count} parts of its {split} split")
    return [path for _, path in parts]


def _candidates(directory: Path, split: Split) -> list[tuple[Path, tuple[int, int] | None]]:
    """Return the files named after a split, with part number and part count for numbered parts."""
    candidates = []
    for path in sorted(directory.iterdir()):
        stem, suffix = split_file_name(path)
        match = re.fullmatch(r"([a-z]+)(?:-(\d{1,9})-of-(\d{1,9}))?", stem)
        if suffix in READERS and match and match[1] in SPLIT_ALIASES[split] and path.is_file():
            part = (int(match[2]), int(match[3])) if match[2] else None
            candidates.append((path, part))
    return candidates


def _kind(path: Path) -> str:
    return "".join(path.suffixes)


def _join_names(names: list[str]) -> str:
    return ", ".join([*names[:10], *(["..."] if len(names) > 10 else [])]) or "nothing"
