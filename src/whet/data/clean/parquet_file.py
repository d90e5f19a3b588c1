"""Convert JSON Lines to Parquet, a few records at a time."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from whet.data.sources.compressed_files import missing_extra_error
from whet.error_boundary import invalid_input_errors
from whet.errors import DataError

_BATCH = 1024  # records


def convert_to_parquet(jsonl: Path, target: Path, *, name: str) -> None:
    """Write the records of a JSON Lines file as Parquet. A field that a record lacks is null.

    Args:
        jsonl: The records.
        target: The file to write.
        name: The name of the target in errors.

    Raises:
        DataError: A field has values of several types, such as texts and numbers.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra_error(name, error) from error
    mixed = invalid_input_errors(
        f"{name}: the records do not fit into one table",
        kind=DataError,
        hint="a field must have one type in all records; write JSON Lines instead: OUT.jsonl",
    )
    with mixed:
        schemas = (pyarrow.schema(pyarrow.array(batch).type) for batch in _batches(jsonl))
        schema = next(schemas)
        for other in schemas:
            schema = pyarrow.unify_schemas([schema, other], promote_options="permissive")
        with parquet.ParquetWriter(target, schema) as writer:
            for batch in _batches(jsonl):
                rows = pyarrow.array(batch, type=pyarrow.struct(schema))
                writer.write_batch(pyarrow.RecordBatch.from_struct_array(rows))


def _batches(jsonl: Path) -> Iterator[list[dict[str, Any]]]:  # Any: JSON values
    with jsonl.open(encoding="utf-8") as file:
        while lines := list(islice(file, _BATCH)):
            yield [json.loads(line) for line in lines]
