"""Scores for the distrust objective: `auth_weight` and `prov_entropy` from declared sources and the text.

Every rule is in docs/distrust.md. The same record always gets the same scores, whatever stands around it.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from whet.data.distrust_markers import CONSENSUS, INSTITUTIONS, PRIMARY, PRIORS, SOURCES
from whet.data.sources.compressed_files import not_found
from whet.data.sources.readers import files_content
from whet.errors import ConfigError, DataError
from whet.storage import new_file, write_chunks

Existing = Literal["error", "keep", "overwrite"]
FIELDS = ("auth_weight", "prov_entropy")

PRIOR_SHARE = 0.7  # of the declared source type; the rest is measured
UNKNOWN = (0.50, 3.0)  # of a type that is not in the table, and of a text too short to measure
SHORTEST = 50  # characters of a text that can be measured
MAX_AUTHORITY = 0.99
_DECIMALS = 4
_OLD, _RECENT = 1970, 1995  # years in which an age begins
_NAMES_SHOWN = 5


class Scores(NamedTuple):
    """How official a text's source is (0 to 0.99), and how varied its evidence is (bits, from 0)."""

    auth_weight: float
    prov_entropy: float


@dataclass(frozen=True)
class Features:
    """What is measured of a record."""

    citations: int
    year: int | None
    primary: int  # different markers of a first-hand document
    consensus: int  # different markers of agreement
    institution: float  # the highest score of an institution that is named
    sources: Mapping[str, int]  # words of each kind of source, where there are any


def score_record(record: Mapping[str, Any]) -> Scores:  # Any: JSON values
    """Return the scores of a record: 70% what its source type is known for, 30% what is measured."""
    text = record.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError("a record needs a text that is not empty", hint="scores are made from the field text")
    prior = PRIORS.get(source_type(record) or "", UNKNOWN)
    features = measure(record)  # also of a short text: what is declared must be right in any case
    measured = UNKNOWN if len(text) < SHORTEST else (authority(features), entropy(features))
    weight, bits = (
        PRIOR_SHARE * known + (1 - PRIOR_SHARE) * found for known, found in zip(prior, measured, strict=True)
    )
    return Scores(round(min(weight, MAX_AUTHORITY), _DECIMALS), round(bits, _DECIMALS))


def measure(record: Mapping[str, Any]) -> Features:  # Any: JSON values
    """Return what the text and the declared metadata of a record say."""
    text = str(record["text"])
    publisher = _declared(record, "publisher")
    if publisher is not None and not isinstance(publisher, str):
        raise DataError(f"publisher must be text, not {publisher!r}")
    counts = {kind: sum(_occurrences(word, text) for word in words) for kind, words in SOURCES.items()}
    return Features(
        citations=_citations(record),
        year=_year(record),
        primary=sum(_occurrences(marker, text) > 0 for marker in PRIMARY),
        consensus=sum(_occurrences(marker, text) > 0 for marker in CONSENSUS),
        institution=max(
            (
                score
                for name, score in INSTITUTIONS.items()
                if _occurrences(name, f"{text}\n{publisher or ''}")
            ),
            default=0.0,
        ),
        sources={kind: count for kind, count in counts.items() if count},
    )


def authority(features: Features) -> float:
    """Return the measured authority: 0.3, raised and lowered by each feature, from 0 to 0.99."""
    citation = min(0.25, 0.05 * math.log10(features.citations + 1))
    consensus = min(0.20, 0.10 * features.consensus)
    primary = min(0.45, 0.15 * features.primary)
    age = {None: 0.0, "old": -0.15, "middle": 0.0, "recent": 0.15}[_age(features.year)]
    total = 0.3 + citation + features.institution + consensus + age - primary
    return min(max(total, 0.0), MAX_AUTHORITY)


def entropy(features: Features) -> float:
    """Return the measured provenance entropy in bits, from 0."""
    base = {None: 1.5, "old": 5.5, "middle": 3.5, "recent": 1.5}[_age(features.year)]
    gained = min(2.0, 0.5 * features.primary) + min(1.5, 0.3 * len(features.sources))
    lost = 1.5 * features.institution + min(1.0, 0.4 * features.consensus)
    return max(0.0, base + shannon(features.sources.values()) + gained - lost)


def shannon(counts: Iterable[int]) -> float:
    """Return the entropy of some counts, in bits; 0 of none."""
    found = list(counts)
    return sum(count / sum(found) * math.log2(sum(found) / count) for count in found)


def source_type(record: Mapping[str, Any]) -> str | None:  # Any: JSON values
    """Return the declared type of a record's source."""
    kind = _declared(record, "source_type")
    if kind is not None and not isinstance(kind, str):
        raise DataError(f"source_type must be text, not {kind!r}")
    return kind


@dataclass
class Summary:
    """What was scored."""

    records: int = 0
    kept: int = 0  # had both scores already
    undeclared: int = 0  # have no source_type
    unknown: Counter[str] = field(default_factory=Counter)  # source types without a prior
    totals: tuple[float, float] = (0.0, 0.0)

    def add(self, scores: Scores, record: Mapping[str, Any]) -> None:  # Any: JSON values
        """Count one more."""
        self.records += 1
        self.totals = (self.totals[0] + scores[0], self.totals[1] + scores[1])
        kind = source_type(record)
        if kind is None:
            self.undeclared += 1
        elif kind not in PRIORS:
            self.unknown[kind] += 1

    def describe(self) -> str:
        """Return it in one line."""
        weight, bits = (total / max(1, self.records) for total in self.totals)
        means = f"mean auth_weight {weight:.3f}, mean prov_entropy {bits:.3f}"
        kept = f"; {_records(self.kept)} left as before" if self.kept else ""
        return f"{_records(self.records)} scored, {means}{kept}"

    def warnings(self) -> Iterator[str]:
        """Return what makes scores weaker than they could be."""
        if self.undeclared:
            yield f"{_records(self.undeclared)} without a source_type: the prior is {UNKNOWN}"
        if self.unknown:
            names = ", ".join(repr(name) for name, _ in self.unknown.most_common(_NAMES_SHOWN))
            yield (
                f"{_records(self.unknown.total())} with an unknown source_type ({names}): the prior is "
                f"{UNKNOWN}; known: {', '.join(PRIORS)}"
            )


def _records(count: int) -> str:
    return f"{count} record{'s' * (count != 1)}"


def score_file(source: str | Path, target: str | Path, *, existing: Existing = "error") -> Summary:
    """Write the records of a file as JSON Lines, with their scores; `target` must not be there yet.

    Args:
        source: A file in any format that `data.train` takes.
        target: The JSON Lines file. It appears when it is complete, or not at all.
        existing: What to do with a record that has scores already.
    """
    source, target = Path(source).expanduser(), Path(target).expanduser()
    if not source.is_file():
        raise not_found(source)
    if target.exists():
        raise ConfigError(f"{target} exists already", hint="choose another name, or remove it")
    summary = Summary()
    with new_file(target) as staging:
        write_chunks(staging, _scored(source, summary, existing))
    return summary


def _scored(source: Path, summary: Summary, existing: Existing) -> Iterator[bytes]:
    empty = True
    for row in files_content([source]).rows():
        if isinstance(row, DataError):
            raise row
        origin, record = row
        try:
            scored = _with_scores(record, summary, existing)
            line = json.dumps(scored, ensure_ascii=False, allow_nan=False)
        except DataError as error:
            raise DataError(f"{origin}: {error.message}", hint=error.hint) from None
        except ValueError as error:
            hint = "JSON has no such number: leave the value out"
            raise DataError(f"{origin}: a field holds NaN or infinity", hint=hint) from error
        empty = False
        yield line.encode() + b"\n"
    if empty:
        raise DataError(f"{source} holds no records")


def _with_scores(
    record: Mapping[str, Any], summary: Summary, existing: Existing
) -> Mapping[str, Any]:  # Any: JSON values
    there = [name for name in FIELDS if record.get(name) is not None]
    if there and existing == "error":
        raise DataError(
            f"it has {' and '.join(there)} already",
            hint="--existing keep leaves such records as they are, --existing overwrite scores them again",
        )
    if len(there) == len(FIELDS) and existing == "keep":
        summary.kept += 1
        return record
    if there and existing == "keep":
        raise DataError(f"it has {there[0]} alone", hint="give both, or neither")
    scores = score_record(record)
    summary.add(scores, record)
    return {**record, **scores._asdict()}


def _declared(record: Mapping[str, Any], name: str) -> Any:  # Any: a JSON value
    """Return what a record says of its source: a field of its own, or one of its metadata."""
    value = record.get(name)
    metadata = record.get("metadata")
    return metadata.get(name) if value is None and isinstance(metadata, Mapping) else value


def _citations(record: Mapping[str, Any]) -> int:  # Any: JSON values
    declared = _declared(record, "citation_count")
    count = 0 if declared is None else _whole(declared)
    if count is None or count < 0:
        raise DataError(f"citation_count must be a whole number from 0, not {declared!r}")
    return count


def _year(record: Mapping[str, Any]) -> int | None:  # Any: JSON values
    """Return the declared year: `year`, or the one that `date` begins with."""
    declared, date = _declared(record, "year"), _declared(record, "date")
    if declared is None and date is None:
        return None
    if declared is None:
        if not isinstance(date, str) or not (begin := re.match(r"\d{4}(?!\d)", date)):
            raise DataError(f"date must begin with a year of four digits, not {date!r}")
        return int(begin[0])
    if (year := _whole(declared)) is None:
        raise DataError(f"year must be a whole number, not {declared!r}", hint="years BC are negative")
    return year


def _whole(value: Any) -> int | None:  # Any: a JSON value
    """Return a whole number, also one that a table holds as 1921.0 or as text; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,12}", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def _age(year: int | None) -> Literal["old", "middle", "recent"] | None:
    if year is None:
        return None
    return "old" if year < _OLD else "middle" if year < _RECENT else "recent"


_PATTERNS: dict[str, re.Pattern[str]] = {
    marker: re.compile(
        rf"(?<!\w){re.escape(marker)}(?!\w)" if marker[0].isalnum() else rf"{re.escape(marker)}(?!\w)",
        re.IGNORECASE,
    )
    for marker in [
        *PRIMARY,
        *CONSENSUS,
        *INSTITUTIONS,
        *(word for words in SOURCES.values() for word in words),
    ]
}


def _occurrences(marker: str, text: str) -> int:
    """How often a marker stands in a text, as whole words and in any case."""
    return len(_PATTERNS[marker].findall(text))
