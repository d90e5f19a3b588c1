"""Hold out a share of the training records for validation.

Records are held out in groups, so that none of the held-out prompts is trained on. Both sides are sources of
their own: tokens, digests and evaluations treat them like any other source.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from whet.data.sources.chat_messages import Message
from whet.data.sources.readers import digest_text
from whet.data.sources.source import CombinedSource, Record, Skipped, Source
from whet.data.sources.source_epochs import RepeatedSource
from whet.errors import DataError

_VERSION = 1  # of keys and selection; a new version changes the split of existing data
_TEXT_OF = {"text": "text", "distrust": "text", "classification": "input", "tabular": "features"}


@dataclass(frozen=True)
class HoldOut:
    """How much to hold out, and how records are grouped."""

    size: float  # a share below 1, or a number of records
    seed: int
    group: str | None = None  # the field whose values stay together; None: the prompt
    by_class: bool = False  # hold out the same share of each class

    def target(self, records: int) -> int:
        """Return how many of the records to hold out: at least one, never all."""
        count = round(self.size * records) if self.size < 1 else int(self.size)
        return min(max(1, count), records - 1)


class HeldOutGroups:
    """The groups to hold out of several sources, selected by one pass over their records when needed."""

    def __init__(self, sources: Sequence[Source], settings: HoldOut) -> None:
        self.sources = sources
        self.settings = settings

    @cached_property
    def digest(self) -> str:
        """The hash of everything that the selection depends on."""
        return digest_text(
            json.dumps([_VERSION, asdict(self.settings), [source.digest() for source in self.sources]])
        )

    @cached_property
    def keys(self) -> frozenset[int]:
        """The keys of the groups that are held out."""
        keys, strata, codes = array("Q"), array("q"), dict[str, int]()
        for source in self.sources:
            for record in source:
                keys.append(group_key(record, self.settings.group))
                if self.settings.by_class:
                    strata.append(codes.setdefault(_class_of(record), len(codes)))
        name = " + ".join(source.name for source in self.sources)
        self._check_size(len(keys), name)
        by_record = np.frombuffer(keys, dtype=np.uint64)
        held_out = (
            select_by_class(by_record, np.frombuffer(strata, dtype=np.int64), self.settings)
            if self.settings.by_class
            else select_groups(by_record, self.settings)
        )
        if not held_out:
            what = f"the same {self.settings.group}" if self.settings.group else "the same prompt"
            raise DataError(
                f"{name}: all {len(keys):,} records have {what}, so none can be held out for validation",
                hint="give data.valid a source of its own, or group by another field: data.group",
            )
        return frozenset(held_out)

    def _check_size(self, records: int, name: str) -> None:
        if self.settings.size >= 1 and self.settings.size >= records:
            raise DataError(
                f"data.valid is {self.settings.size:g}, but {name} has only {records:,} records",
                hint="set a smaller number, or a share such as 0.05",
            )

    def contains(self, record: Record) -> bool:
        """Return whether a record is held out."""
        return group_key(record, self.settings.group) in self.keys


class SideSource:
    """The records of a source that are held out, or those that are not."""

    def __init__(self, source: Source, groups: HeldOutGroups, *, held_out: bool, may_be_empty: bool) -> None:
        self.name = f"{source.name} (held out)" if held_out else source.name
        self._source = source
        self._groups = groups
        self._held_out = held_out
        self._may_be_empty = may_be_empty  # one of several sources

    def __iter__(self) -> Iterator[Record]:
        empty = True
        for record in self._source:
            if self._groups.contains(record) == self._held_out:
                empty = False
                yield record
        if empty and not self._may_be_empty:
            raise DataError(
                f"{self.name}: every record is held out for validation",
                hint="lower data.valid, or give it a source of its own",
            )

    @property
    def skipped(self) -> Skipped:
        """The bad records of the source; the side that trains reports them."""
        return Skipped() if self._held_out else self._source.skipped

    def digest(self) -> str:
        """Return the digest of the source, of the split and of the side."""
        return digest_text(f"{self._source.digest()} {self._groups.digest} {self._held_out}")


def split_source(source: Source, settings: HoldOut) -> tuple[Source, Source, HeldOutGroups]:
    """Split a source into training and validation records. Return both, and the groups held out.

    Weights and epochs apply to the training records; each validation record is read once.
    """
    if not isinstance(source, CombinedSource):
        groups = HeldOutGroups([source], settings)
        sides = [SideSource(source, groups, held_out=side, may_be_empty=False) for side in (False, True)]
        return sides[0], sides[1], groups
    weights = source.weights
    parts = [part.source if isinstance(part, RepeatedSource) else part for part in source.sources]
    groups = HeldOutGroups(parts, settings)
    sides = [SideSource(part, groups, held_out=False, may_be_empty=weights is None) for part in parts]
    valid = [SideSource(part, groups, held_out=True, may_be_empty=True) for part in parts]
    train = [
        part.with_source(side) if isinstance(part, RepeatedSource) else side
        for part, side in zip(source.sources, sides, strict=True)
    ]
    return CombinedSource(train, weights), CombinedSource(valid), groups


def split_sources(sources: Mapping[str, Source], settings: HoldOut) -> dict[str, Source]:
    """Return the sources of a run with a validation split that is held out of its training records.

    Hard records of a curriculum that belong to a group that is held out are left out.
    """
    train, valid, groups = split_source(sources["train"], settings)
    split = {**sources, "train": train, "valid": valid}
    if "hard" in sources:
        split["hard"] = SideSource(sources["hard"], groups, held_out=False, may_be_empty=False)
    order = ("train", "valid", "test", "hard")
    return {name: split[name] for name in order if name in split}


def group_key(record: Record, field: str | None) -> int:
    """Return a 64-bit hash of the value that keeps a record together with others: a field, or its prompt."""
    if field is None:
        value = _prompt(record)
    elif (value := record.fields.get(field)) is None:
        raise DataError(
            f"{record.origin}: the record has no field {field!r}, which data.group names",
            hint="every record needs it; without data.group, records are grouped by their prompts",
        )
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _prompt(record: Record) -> Any:  # Any: a JSON value
    """Return what a record asks, the same for all formats in which the same question can be written."""
    fields, name = record.fields, record.record_format
    if name in _TEXT_OF:
        return fields[_TEXT_OF[name]]
    if name == "tokens":
        ids, labels = fields["input_ids"], fields["labels"]
        context = next((index for index, label in enumerate(labels) if label != -100), 0)
        return ids[:context] or ids
    messages = fields["messages"] if name == "messages" else fields["prompt"]
    return [["user", messages.strip()]] if isinstance(messages, str) else _first_question(messages)


def _first_question(messages: Sequence[Message]) -> list[list[str]]:
    """Return roles and contents up to the first answer: conversations that begin alike stay together."""
    question = list[list[str]]()
    for message in messages:
        if message["role"] == "assistant" and any(role == "user" for role, _ in question):
            break
        question.append([message["role"], str(message.get("content") or "").strip()])
    return question


def _class_of(record: Record) -> str:
    return json.dumps(record.fields.get("label", record.fields.get("labels")), sort_keys=True)


def select_groups(keys: np.ndarray, settings: HoldOut) -> set[int]:
    """Return the keys of the groups to hold out, given the key of each record, [records].

    Groups are taken in an order that depends only on the keys and the seed, as long as they fit into the
    target. If not even one fits, the smallest is held out. A single group is not held out.
    """
    groups, sizes = np.unique(keys, return_counts=True)
    if len(groups) < 2:
        return set()
    target = settings.target(len(keys))
    order = np.argsort(_scramble(groups, settings.seed), kind="stable")
    held_out, remaining = set[int](), target
    for key, size in zip(groups[order].tolist(), sizes[order].tolist(), strict=True):
        if size <= remaining:
            held_out.add(key)
            remaining -= size
            if not remaining:
                break
    return held_out or {int(groups[order][sizes[order].argmin()])}


def select_by_class(keys: np.ndarray, classes: np.ndarray, settings: HoldOut) -> set[int]:
    """Return the groups to hold out of each class, [records]; classes with a single group are pooled.

    A group belongs to the class of its first record.
    """
    groups, first = np.unique(keys, return_index=True)
    class_of_group = classes[first]
    by_record = class_of_group[np.searchsorted(groups, keys)]
    single = np.flatnonzero(np.bincount(class_of_group) == 1)
    by_record = np.where(np.isin(by_record, single), -1, by_record)
    size = settings.size if settings.size < 1 else settings.size / len(keys)
    share = HoldOut(size, settings.seed)
    return set().union(*(select_groups(keys[by_record == each], share) for each in np.unique(by_record)))


def _scramble(keys: np.ndarray, seed: int) -> np.ndarray:
    """Return the keys mixed with a seed (SplitMix64), [groups]."""
    salt = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
    mixed = keys + np.uint64(salt)  # unsigned arithmetic wraps around
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return scrambled
