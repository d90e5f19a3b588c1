"""Where records come from: JSON Lines files and whet's own generators."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.data.synthetic import generate
from whet.errors import DataError


@dataclass(frozen=True)
class Record:
    """One JSON object, and where it stood."""

    fields: dict[str, Any]  # Any: JSON values
    origin: str


def read_records(source: str) -> list[Record]:
    """Every record of a source; an empty source is an error."""
    if source.startswith("synth:"):
        records = [
            Record(fields, f"{source}#{index}") for index, fields in enumerate(generate(source), start=1)
        ]
    else:
        records = _read_jsonl(Path(source))
    if not records:
        raise DataError(f"{source} holds no records")
    return records


def _read_jsonl(path: Path) -> list[Record]:
    if path.is_dir():
        raise DataError(f"{path} is a directory", hint="name one of its .jsonl files")
    records = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    records.append(Record(_parse(line, f"{path}:{number}"), f"{path}:{number}"))
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist", hint="data paths are taken from where whet is run"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return records


def _parse(line: bytes, origin: str) -> dict[str, Any]:  # Any: JSON values
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{origin}: not valid JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise DataError(f"{origin}: nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits, say
        raise DataError(f"{origin}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a record must be a JSON object, not {type(value).__name__}")
    return value
