"""Find the train, valid and test splits of a directory."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from glob import glob, has_magic
from pathlib import Path
from typing import Literal, TypeVar

from whet.data.sources.compressed_files import split_file_name
from whet.data.sources.readers import (
    READERS,
    SourceContent,
    digest_files,
    digest_text,
    files_content,
    read_archive,
)
from whet.errors import DataError

Split = Literal["train", "valid", "test"]
T = TypeVar("T")

SPLIT_ALIASES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev", "eval"),
    "test": ("test",),
}
NOT_DATA = re.compile(r"\.|(readme|license|dataset_infos?)\b", re.IGNORECASE)  # names of files beside data
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
    """Return the files of a split in a directory.

    That is the file named after the split, or its numbered parts (`train-00000-of-00002.parquet`). If no file
    is named after any split, all data files of the directory are training records.
    """
    is_unsplit = not any(_candidates(directory, name) for name in SPLIT_ALIASES)
    if split == "train" and is_unsplit and (data_files := _data_files(directory)):
        return many_files_content(data_files)
    paths = _find_files(directory, split)
    content = files_content(paths)
    _, suffix = split_file_name(paths[0])
    if suffix == ".jsonl":
        return content
    # the same bytes read as another format are different records
    return replace(content, digest=lambda: digest_text(f"{suffix} {content.digest()}"))


def many_files_content(paths: list[Path]) -> SourceContent:
    """Return the records of several files, perhaps of different formats, one file after the other."""
    content = files_content(paths)
    suffixes = " ".join(split_file_name(path)[1] for path in paths)
    return replace(content, digest=lambda: digest_text(f"{suffixes} {content.digest()}"))


def archive_content(path: Path, split: Split) -> SourceContent:
    """Return the records of a split in an archive, or of all its files if none is named after a split."""
    return SourceContent(
        rows=lambda: read_archive(path, split=split),
        digest=lambda: digest_text(f"{split} of archive {digest_files([path])}"),
        rename=lambda columns: read_archive(path, columns, split),
    )


def select_members(names: list[str], split: Split | None, archive: Path) -> list[str]:
    """Return the files of a split in an archive. Without split names, all files belong to it.

    One of many archives (`split` is None) is read completely, so its files must not be of several splits.
    """
    by_split: dict[str, list[str]] = {}
    for name in names:
        by_split.setdefault(_split_of_member(name) or "", []).append(name)
    splits = sorted(name for name in by_split if name)
    if split is None:
        if len(splits) > 1:
            raise DataError(
                f"{archive} has files of several splits: {_join_names(splits)}",
                hint=f"name it alone, not as part of a pattern: {archive}",
            )
        return names
    if splits and split not in by_split:
        raise DataError(f"{archive} has no {split} files", hint=f"it has files of {_join_names(splits)}")
    return by_split[split] if splits else names


def _split_of_member(name: str) -> Split | None:
    """Return the split that a file in an archive belongs to, by its name or by that of a folder."""
    *folders, file_name = name.split("/")
    stem = re.sub(r"-\d{1,9}-of-\d{1,9}$", "", split_file_name(Path(file_name))[0])
    for split, aliases in SPLIT_ALIASES.items():
        if stem in aliases or any(folder in aliases for folder in folders):
            return split
    return None


def glob_content(pattern: str) -> SourceContent | None:
    """Return the records of the files that a pattern such as `data/*.jsonl` matches, or None for a name."""
    if not has_magic(pattern):
        return None
    expanded = str(Path(pattern).expanduser())
    matches = sorted(glob(expanded, recursive=True))  # noqa: PTH207  # Path.glob takes no absolute pattern
    files = [Path(name) for name in matches if Path(name).is_file()]
    if not files:
        raise DataError(
            f"no file matches {pattern}",
            hint="relative patterns are resolved against the working directory; ** matches subdirectories",
        )
    return many_files_content(files)


def _data_files(directory: Path) -> list[Path]:
    """Return the files of a directory that contain records, by name. Hidden files and READMEs do not."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and split_file_name(path)[1] in READERS and not NOT_DATA.match(path.name)
    ]


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
