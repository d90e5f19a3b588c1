"""What cleaning removed, and why."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Reason = Literal["bad record", "contaminated", "exact duplicate", "near duplicate"]
REASONS: tuple[Reason, ...] = ("bad record", "contaminated", "exact duplicate", "near duplicate")
MIN_TEMPLATE_RECORDS = 10  # from how many records on a shared overlap may be a template


@dataclass(frozen=True)
class Removal:
    """A record that was removed.

    Attributes:
        origin: Where the record is, such as `train.jsonl:17`.
        reason: Why it was removed.
        duplicate_of: The record that it repeats: one that was kept, or an evaluation record.
        similarity: The similarity of a near duplicate.
        overlap: The words that it shares with an evaluation record.
        error: What is wrong with a bad record.
    """

    origin: str
    reason: Reason
    duplicate_of: str | None = None
    similarity: float | None = None
    overlap: str | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """Return the fields that apply."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class CleanReport:
    """The result of `whet.clean_data`.

    Attributes:
        source: The records that were read.
        output: The file that was written, or None.
        removed_file: The file that lists the removed records, or None.
        settings: The settings of the run.
        evaluation_records: The number of records of each evaluation set.
        records: The number of records that were read.
        removed: The number of removed records by reason.
        examples: The first removed record of each reason.
    """

    source: str
    output: Path | None = None
    removed_file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: numbers and names
    evaluation_records: dict[str, int] = field(default_factory=dict)
    records: int = 0
    removed: dict[Reason, int] = field(default_factory=dict)
    examples: dict[Reason, Removal] = field(default_factory=dict)
    _overlaps: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def kept(self) -> int:
        """The number of records that were kept."""
        return self.records - sum(self.removed.values())

    @property
    def common_overlap(self) -> tuple[str, int] | None:
        """The words that most contaminated records share with evaluation records, and how many do."""
        return next(iter(self._overlaps.most_common(1)), None)

    def add(self, removal: Removal) -> None:
        """Count a removed record."""
        self.removed[removal.reason] = self.removed.get(removal.reason, 0) + 1
        self.examples.setdefault(removal.reason, removal)
        if removal.overlap is not None:
            self._overlaps[removal.overlap] += 1

    def warning(self) -> str | None:
        """Return a warning if most contaminated records share the same words, which may be a template."""
        text, count = self.common_overlap or ("", 0)
        contaminated = self.removed.get("contaminated", 0)
        if count < MIN_TEMPLATE_RECORDS or 2 * count <= contaminated:
            return None
        return (
            f"{count:,} of the {contaminated:,} contaminated records share the same words with evaluation "
            f'records: "{text}". If that is a template and not a question, raise --ngram'
        )

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """Return the report as a JSON object, with a count for every reason."""
        common = self.common_overlap
        return {
            "source": self.source,
            "output": None if self.output is None else str(self.output),
            "removed_file": None if self.removed_file is None else str(self.removed_file),
            "records": self.records,
            "kept": self.kept,
            "removed": {reason: self.removed.get(reason, 0) for reason in REASONS},
            "examples": {reason: removal.to_json() for reason, removal in self.examples.items()},
            "common_overlap": None if common is None else {"text": common[0], "records": common[1]},
            "against": self.evaluation_records,
            "settings": dict(self.settings),
        }
