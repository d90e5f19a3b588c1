"""How the records and tokens of a split are shared among its files."""

import re
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from whet.data.tokens.examples import StoredExamples

MAX_FILES = 20  # with more files, their directories are counted
MAX_SOURCES = 12  # shown; the smallest are added up
OTHERS = "others"
# at the end of an origin: the number of a line or a record, and of an example if a record has several
_NUMBER = re.compile(r"[:#]\d+(?: \((\d+) of \d+\))?$")


@dataclass(frozen=True)
class SourceShare:
    """The records of one file or directory in a split, and what is left of them after truncation."""

    name: str
    records: int
    tokens: int
    supervised: int


def source_shares(examples: StoredExamples, *, sides: int = 1) -> tuple[SourceShare, ...]:
    """Return the shares of the files of a split, in the order of their first records.

    Args:
        examples: The examples of the split.
        sides: The number of stored records per record: two for pairs.
    """
    store = examples.store
    origins = [store.origin(record) for record in range(len(store))]
    names = [_NUMBER.sub("", origin) for origin in origins]
    numbers = [_NUMBER.search(origin) for origin in origins]
    is_first = [number is None or number[1] in (None, "1") for number in numbers]  # examples of a record
    if len(set(names)) > MAX_FILES:
        names = [str(PurePath(name).parent) for name in names]
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    by_record = np.array([codes[name] for name in names])
    by_example = by_record[examples.records]
    sizes = examples.stops - examples.starts - examples.is_classification
    counts = np.bincount(by_record, weights=is_first, minlength=len(codes)) // sides
    tokens = np.bincount(by_example, weights=sizes, minlength=len(codes))
    supervised = np.bincount(by_example, weights=examples.supervised_counts(), minlength=len(codes))
    shares = [
        SourceShare(name, int(counts[code]), int(tokens[code]), int(supervised[code]))
        for name, code in codes.items()
    ]
    return tuple(_merge_small(shares))


def _merge_small(shares: list[SourceShare]) -> list[SourceShare]:
    if len(shares) <= MAX_SOURCES:
        return shares
    largest = sorted(shares, key=lambda share: share.tokens, reverse=True)[: MAX_SOURCES - 1]
    rest = [share for share in shares if share not in largest]
    others = SourceShare(
        f"{len(rest):,} {OTHERS}",
        sum(share.records for share in rest),
        sum(share.tokens for share in rest),
        sum(share.supervised for share in rest),
    )
    return [*(share for share in shares if share in largest), others]
