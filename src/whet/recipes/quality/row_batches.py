"""Rows of numbers as batches: each row takes one position of a step, as a token would."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from whet.data.batches import Batch, BatchStream
from whet.data.packing import StepSettings, split_step
from whet.data.sources.source import Source
from whet.errors import DataError

RowPart = Literal["train", "valid", "test"]
_TENTHS: dict[int, RowPart] = {0: "valid", 1: "test"}


@dataclass(frozen=True)
class QualityRows:
    """A source of tabular records, read as a whole."""

    features: torch.Tensor  # [N, inputs]
    outcomes: torch.Tensor  # [N, outputs]
    origins: Sequence[str]
    keys: Sequence[str]  # what a row is known by: its decision, or its number

    def __len__(self) -> int:
        return len(self.origins)

    def batch(self, places: Sequence[int]) -> Batch:
        """Some of the rows: their indices as `tokens`, their numbers as the columns features and outcomes."""
        chosen = torch.tensor(places, dtype=torch.long)
        count = len(places)
        column = torch.zeros((count, 1), dtype=torch.long)
        every = torch.arange(count)
        batch = Batch(
            tokens=chosen[:, None],
            targets=column,
            positions=column,
            supervised_positions=every,
            documents=None,
            supervised=count,
            examples=every,
            real_tokens=count,
            origins=tuple(self.origins[place] for place in places),
        )
        return batch.with_columns("document", features=self.features[chosen], outcomes=self.outcomes[chosen])

    def only(self, part: RowPart, *, among: Sequence[RowPart]) -> "QualityRows":
        """The rows that fall to one of several parts of the same source, by a hash of their keys.

        A tenth goes to valid and one to test, where these are asked for. A row stays where it is when others
        are added.
        """
        kept = [place for place, key in enumerate(self.keys) if _part_of(key, among) == part]
        if not kept:
            raise DataError(f"data.{part}: none of the {len(self)} rows falls to it")
        chosen = torch.tensor(kept, dtype=torch.long)
        return QualityRows(
            self.features[chosen],
            self.outcomes[chosen],
            [self.origins[place] for place in kept],
            [self.keys[place] for place in kept],
        )


def _part_of(key: str, among: Sequence[RowPart]) -> RowPart:
    tenth = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % 10
    part = _TENTHS.get(tenth, "train")
    return part if part in among else "train"


def read_rows(source: Source, *, inputs: int, outputs: int) -> QualityRows:
    """Every record of a source, each with as many numbers as the model takes and gives."""
    features: list[list[float]] = []
    outcomes: list[list[float]] = []
    origins: list[str] = []
    keys: list[str] = []
    for number, record in enumerate(source, start=1):
        if record.shape != "tabular":
            raise DataError(
                f"{record.origin}: a {record.shape} record, and the model reads rows of numbers",
                hint="rows are records with features and target",
            )
        target = record.fields["target"]
        wanted = target if isinstance(target, list) else [target]
        for name, values, expected in (
            ("features", record.fields["features"], inputs),
            ("targets", wanted, outputs),
        ):
            if len(values) != expected:
                raise DataError(
                    f"{record.origin}: {len(values)} {name}, and the model has {expected} of them"
                )
        features.append(record.fields["features"])
        outcomes.append(wanted)
        origins.append(record.origin)
        keys.append(str(record.fields.get("decision_group_id", number)))
    return QualityRows(
        torch.tensor(features, dtype=torch.float32),
        torch.tensor(outcomes, dtype=torch.float32),
        origins,
        keys,
    )


class RowStream(BatchStream):
    """An endless stream of steps of rows, in a new order each epoch."""

    def __init__(self, rows: QualityRows, settings: StepSettings, *, seed: int) -> None:
        self.rows = rows
        super().__init__((), settings, seed=seed)

    def _measure(self) -> np.ndarray:
        return np.ones(len(self.rows), dtype=np.int64)

    def _cut(self, step: Sequence[int]) -> list[Batch]:
        return list(row_batches(self.rows, step, self.settings))


def row_batches(rows: QualityRows, places: Sequence[int], settings: StepSettings) -> Iterator[Batch]:
    """Some rows, in micro-batches."""
    lengths = np.ones(len(rows), dtype=np.int64)
    for group in split_step(places, lengths, settings):
        yield rows.batch([place for row in group for place in row])
