"""Scores for the distrust objective: `auth_weight` and `prov_entropy` from declared sources and the text.

docs/distrust.md lists all rules. The scores of a record do not depend on other records.
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
from whet.data.sources.compressed_files import missing_path_error
from whet.data.sources.readers import files_content
from whet.errors import ConfigError, DataError
from whet.storage import create_file_atomically, write_chunks

Existing = Literal["error", "keep", "overwrite"]
FIELDS = ("auth_weight", "prov_entropy")

PRIOR_SHARE = 0.7  # weight of the prior of the source type; the rest is measured
UNKNOWN = (0.50, 3.0)  # for unknown source types, and for texts too short to measure
MIN_CHARS = 50  # minimum number of characters to measure a text
MAX_AUTHORITY = 0.99
_DECIMALS = 4
_OLD_BEFORE, _RECENT_FROM = 1970, 1995  # limits between old, middle and recent years
_MAX_NAMES = 5


class Scores(NamedTuple):
    """Authority of a text's source (0 to 0.99), and variety of its evidence (in bits, from 0)."""

    auth_weight: float
    prov_entropy: float


@dataclass(frozen=True)
class Features:
    """The measured features of a record."""

    citations: int
    year: int | None
    primary: int  # number of distinct markers of a primary source
    consensus: int  # number of distinct markers of consensus
    institution: float  # highest score of the institutions mentioned
    sources: Mapping[str, int]  # number of words per kind of source, without zeros


def score_record(record: Mapping[str, Any]) -> Scores:  # Any: JSON values
    """Return the scores of a record: 70% the prior of its source type, 30% measured."""
    text = record.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError("a record needs non-empty text", hint="scores are computed from the field text")
    prior = PRIORS.get(source_type(record) or "", UNKNOWN)
    features = measure(record)  # also for short texts, because it validates the declared fields
    measured = UNKNOWN if len(text) < MIN_CHARS else (authority(features), entropy(features))
    weight, bits = (
        PRIOR_SHARE * prior_value + (1 - PRIOR_SHARE) * measured_value
        for prior_value, measured_value in zip(prior, measured, strict=True)
    )
    return Scores(round(min(weight, MAX_AUTHORITY), _DECIMALS), round(bits, _DECIMALS))


def measure(record: Mapping[str, Any]) -> Features:  # Any: JSON values
    """Return the features of the text and the declared metadata of a record."""
    text = str(record["text"])
    publisher = _declared(record, "publisher")
    if publisher is not None and not isinstance(publisher, str):
        raise DataError(f"publisher must be a string, not {publisher!r}")
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
    """Return the measured authority from 0 to 0.99: 0.3, adjusted by each feature."""
    citation = min(0.25, 0.05 * math.log10(features.citations + 1))
    consensus = min(0.20, 0.10 * features.consensus)
    primary = min(0.45, 0.15 * features.primary)
    age = {None: 0.0, "old": -0.15, "middle": 0.0, "recent": 0.15}[_age(features.year)]
    total = 0.3 + citation + features.institution + consensus + age - primary
    return min(max(total, 0.0), MAX_AUTHORITY)


def entropy(features: Features) -> float:
    """Return the measured provenance entropy, in bits, from 0."""
    base = {None: 1.5, "old": 5.5, "middle": 3.5, "recent": 1.5}[_age(features.year)]
    gained = min(2.0, 0.5 * features.primary) + min(1.5, 0.3 * len(features.sources))
    lost = 1.5 * features.institution + min(1.0, 0.4 * features.consensus)
    return max(0.0, base + shannon(features.sources.values()) + gained - lost)


def shannon(counts: Iterable[int]) -> float:
    """Return the Shannon entropy of counts, in bits; 0 if there are none."""
    values = list(counts)
    return sum(count / sum(values) * math.log2(sum(values) / count) for count in values)


def source_type(record: Mapping[str, Any]) -> str | None:  # Any: JSON values
    """Return the declared source type of a record."""
    kind = _declared(record, "source_type")
    if kind is not None and not isinstance(kind, str):
        raise DataError(f"source_type must be a string, not {kind!r}")
    return kind


@dataclass
class Summary:
    """Totals of a scored file."""

    records: int = 0
    unchanged: int = 0  # records that already had both scores
    undeclared: int = 0  # records without source_type
    unknown: Counter[str] = field(default_factory=Counter)  # source types without a prior
    totals: tuple[float, float] = (0.0, 0.0)

    def add(self, scores: Scores, record: Mapping[str, Any]) -> None:  # Any: JSON values
        """Count one scored record."""
        self.records += 1
        self.totals = (self.totals[0] + scores[0], self.totals[1] + scores[1])
        kind = source_type(record)
        if kind is None:
            self.undeclared += 1
        elif kind not in PRIORS:
            self.unknown[kind] += 1

    def describe(self) -> str:
        """Return the totals as one line."""
        weight, bits = (total / max(1, self.records) for total in self.totals)
        means = f"mean auth_weight {weight:.3f}, mean prov_entropy {bits:.3f}"
        unchanged = f"; {_format_count(self.unchanged)} unchanged" if self.unchanged else ""
        return f"{_format_count(self.records)} scored, {means}{unchanged}"

    def warnings(self) -> Iterator[str]:
        """Yield warnings about records that were scored without a specific prior."""
        if self.undeclared:
            yield f"{_format_count(self.undeclared)} without a source_type: scored with the prior {UNKNOWN}"
        if self.unknown:
            names = ", ".join(repr(name) for name, _ in self.unknown.most_common(_MAX_NAMES))
            yield (
                f"{_format_count(self.unknown.total())} with an unknown source_type ({names}): "
                f"scored with the prior {UNKNOWN}; known types: {', '.join(PRIORS)}"
            )


def _format_count(count: int) -> str:
    return f"{count} record{'s' * (count != 1)}"


def score_file(source: str | Path, target: str | Path, *, existing: Existing = "error") -> Summary:
    """Score the records of a file, and write them as JSON Lines.

    Args:
        source: A file in any format that `data.train` accepts.
        target: The JSON Lines file, which must not exist. It is created only if all records are scored.
        existing: What to do with records that already have scores.

    Returns:
        The totals of the scored records.
    """
    source, target = Path(source).expanduser(), Path(target).expanduser()
    if not source.is_file():
        raise missing_path_error(source)
    if target.exists():
        raise ConfigError(f"{target} already exists", hint="choose another name, or remove it")
    summary = Summary()
    with create_file_atomically(target) as staging:
        write_chunks(staging, _scored_lines(source, summary, existing))
    return summary


def _scored_lines(source: Path, summary: Summary, existing: Existing) -> Iterator[bytes]:
    empty = True
    for row in files_content([source]).rows():
        if isinstance(row, DataError):
            raise row
        origin, record = row
        try:
            scored = _add_scores(record, summary, existing)
            line = json.dumps(scored, ensure_ascii=False, allow_nan=False)
        except DataError as error:
            raise DataError(f"{origin}: {error.message}", hint=error.hint) from None
        except ValueError as error:
            hint = "JSON cannot represent it; remove the value"
            raise DataError(f"{origin}: a field is NaN or infinite", hint=hint) from error
        empty = False
        yield line.encode() + b"\n"
    if empty:
        raise DataError(f"{source} contains no records")


def _add_scores(
    record: Mapping[str, Any], summary: Summary, existing: Existing
) -> Mapping[str, Any]:  # Any: JSON values
    present = [name for name in FIELDS if record.get(name) is not None]
    if present and existing == "error":
        raise DataError(
            f"the record already has {' and '.join(present)}",
            hint="--existing keep leaves such records unchanged, --existing overwrite scores them again",
        )
    if len(present) == len(FIELDS) and existing == "keep":
        summary.unchanged += 1
        return record
    if present and existing == "keep":
        raise DataError(f"the record has only {present[0]}", hint="set both scores, or neither")
    scores = score_record(record)
    summary.add(scores, record)
    return {**record, **scores._asdict()}


def _declared(record: Mapping[str, Any], name: str) -> Any:  # Any: a JSON value
    """Return a declared value of a record: a field, or an entry of its metadata."""
    value = record.get(name)
    metadata = record.get("metadata")
    return metadata.get(name) if value is None and isinstance(metadata, Mapping) else value


def _citations(record: Mapping[str, Any]) -> int:  # Any: JSON values
    declared = _declared(record, "citation_count")
    count = 0 if declared is None else _to_integer(declared)
    if count is None or count < 0:
        raise DataError(f"citation_count must be an integer >= 0, not {declared!r}")
    return count


def _year(record: Mapping[str, Any]) -> int | None:  # Any: JSON values
    """Return the declared year: `year`, or the first four digits of `date`."""
    declared, date = _declared(record, "year"), _declared(record, "date")
    if declared is None and date is None:
        return None
    if declared is None:
        if not isinstance(date, str) or not (start := re.match(r"\d{4}(?!\d)", date)):
            raise DataError(f"date must start with a four-digit year, not {date!r}")
        return int(start[0])
    if (year := _to_integer(declared)) is None:
        raise DataError(f"year must be an integer, not {declared!r}", hint="years BC are negative")
    return year


def _to_integer(value: Any) -> int | None:  # Any: a JSON value
    """Return an integer, also from text or a float such as 1921.0; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,12}", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def _age(year: int | None) -> Literal["old", "middle", "recent"] | None:
    if year is None:
        return None
    return "old" if year < _OLD_BEFORE else "middle" if year < _RECENT_FROM else "recent"


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
    """Return how often a marker occurs in a text, as complete words and ignoring case."""
    return len(_PATTERNS[marker].findall(text))
