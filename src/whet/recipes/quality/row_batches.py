"""Tabular rows as batches: each row counts as one token of a step."""

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

RowSplit = Literal["train", "valid", "test"]
_SPLIT_OF_TENTH: dict[int, RowSplit] = {0: "valid", 1: "test"}


@dataclass(frozen=True)
class QualityRows:
    """All rows of a tabular source, in memory."""

    features: torch.Tensor  # [N, inputs]
    outcomes: torch.Tensor  # [N, outputs]
    origins: Sequence[str]
    keys: Sequence[str]  # identifies a row: its decision_group_id, or its number

    def __len__(self) -> int:
        return len(self.origins)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of some rows: their indices as `tokens`, and the columns features and outcomes."""
        index = torch.tensor(indices, dtype=torch.long)
        count = len(indices)
        zeros = torch.zeros((count, 1), dtype=torch.long)
        all_rows = torch.arange(count)
        batch = Batch(
            tokens=index[:, None],
            targets=zeros,
            positions=zeros,
            supervised_positions=all_rows,
            documents=None,
            supervised=count,
            examples=all_rows,
            real_tokens=count,
            origins=tuple(self.origins[i] for i in indices),
        )
        return batch.with_columns("document", features=self.features[index], outcomes=self.outcomes[index])

    def select_split(self, split: RowSplit, *, splits: Sequence[RowSplit]) -> "QualityRows":
        """Return the rows of one split of a source that several splits share.

        Rows are assigned by a hash of their keys: a tenth to valid and a tenth to test, if these are in
        `splits`, and all others to train. The split of a row does not depend on the other rows.
        """
        indices = [i for i, key in enumerate(self.keys) if _split_of_key(key, splits) == split]
        if not indices:
            raise DataError(f"data.{split}: none of the {len(self)} rows of its source is in this split")
        index = torch.tensor(indices, dtype=torch.long)
        return QualityRows(
            self.features[index],
            self.outcomes[index],
            [self.origins[i] for i in indices],
            [self.keys[i] for i in indices],
        )


def _split_of_key(key: str, splits: Sequence[RowSplit]) -> RowSplit:
    tenth = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % 10
    split = _SPLIT_OF_TENTH.get(tenth, "train")
    return split if split in splits else "train"


def read_rows(source: Source, *, inputs: int, outputs: int) -> QualityRows:
    """Read all records of a source.

    Args:
        source: A source of tabular records.
        inputs: The number of features that the model reads.
        outputs: The number of targets that the model predicts.

    Raises:
        DataError: A record is not tabular, or has another number of features or targets.
    """
    features: list[list[float]] = []
    outcomes: list[list[float]] = []
    origins: list[str] = []
    keys: list[str] = []
    for number, record in enumerate(source, start=1):
        if record.record_format != "tabular":
            raise DataError(
                f"{record.origin}: this is a {record.record_format} record, but the model reads tabular "
                "records",
                hint="a tabular record has features and target",
            )
        target = record.fields["target"]
        targets = target if isinstance(target, list) else [target]
        for name, values, expected in (
            ("features", record.fields["features"], inputs),
            ("targets", targets, outputs),
        ):
            if len(values) != expected:
                raise DataError(f"{record.origin}: {len(values)} {name}, but the model has {expected}")
        features.append(record.fields["features"])
        outcomes.append(targets)
        origins.append(record.origin)
        keys.append(str(record.fields.get("decision_group_id", number)))
    return QualityRows(
        torch.tensor(features, dtype=torch.float32),
        torch.tensor(outcomes, dtype=torch.float32),
        origins,
        keys,
    )


class RowStream(BatchStream):
    """An endless stream of training steps, with a new order of the rows in each epoch."""

    def __init__(self, rows: QualityRows, settings: StepSettings, *, seed: int) -> None:
        self.rows = rows
        super().__init__((), settings, seed=seed)

    def _example_lengths(self) -> np.ndarray:
        return np.ones(len(self.rows), dtype=np.int64)

    def _make_batches(self, step: Sequence[int]) -> list[Batch]:
        return list(row_batches(self.rows, step, self.settings))


def row_batches(rows: QualityRows, indices: Sequence[int], settings: StepSettings) -> Iterator[Batch]:
    """Yield some rows as micro-batches."""
    lengths = np.ones(len(rows), dtype=np.int64)
    for group in split_step(indices, lengths, settings):
        yield rows.batch([index for row in group for index in row])
