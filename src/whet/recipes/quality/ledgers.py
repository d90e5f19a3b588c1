"""The two SQLite ledgers of the quality task: decisions, and their outcomes.

    quality_decisions.db: table decisions (decision_group_id TEXT, category_1..8, milli_1..22)
    quality_outcomes.db:  table outcomes  (decision_group_id TEXT, outcome, aux_milli_1..8)

A category is the index of its choice, an outcome is an integer from 0 to 11, and milli-units are integers
from 0 to 1000. Rows are joined on decision_group_id, and decisions without an outcome are left out. The names
of the tables and columns were never published, so this schema is whet's.
"""

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.data.sources.readers import SourceContent, SourceRow
from whet.errors import DataError, StorageError
from whet.recipes.quality.synthetic_rows import AUX, CATEGORIES, NUMERICALS, OUTCOMES, quality
from whet.storage import create_file_atomically

DECISIONS, OUTCOMES_FILE = "quality_decisions.db", "quality_outcomes.db"
KEY = "decision_group_id"
MILLI = 1000
_MAX_VALUE_BYTES = 10**6  # of a value or a row


@dataclass(frozen=True)
class Ledger:
    """One of the two files: its table, and its columns with the number of allowed values of each."""

    file: str
    table: str
    columns: dict[str, int]

    def schema(self) -> str:
        """Return the SQL statement that creates the table."""
        columns = [
            f"{name} INTEGER NOT NULL CHECK ({name} BETWEEN 0 AND {limit - 1})"
            for name, limit in self.columns.items()
        ]
        return f"CREATE TABLE {self.table} ({', '.join([f'{KEY} TEXT PRIMARY KEY NOT NULL', *columns])})"


LEDGERS = (
    Ledger(
        DECISIONS,
        "decisions",
        {f"category_{i}": size for i, size in enumerate(CATEGORIES, start=1)}
        | {f"milli_{i}": MILLI + 1 for i in range(1, NUMERICALS + 1)},
    ),
    Ledger(
        OUTCOMES_FILE,
        "outcomes",
        {"outcome": OUTCOMES} | {f"aux_milli_{i}": MILLI + 1 for i in range(1, AUX + 1)},
    ),
)


def ledgers_content(directory: Path) -> SourceContent:
    """Return the joined rows as tabular records.

    Categories and the outcome are one-hot, and milli-units are scaled to 0 .. 1.
    """

    def digest() -> str:
        sha256 = hashlib.sha256()
        for row in _read_joined_rows(directory):
            sha256.update(f"{row!r}\n".encode())
        return sha256.hexdigest()

    return SourceContent(rows=lambda: _records(directory), digest=digest)


def _records(directory: Path) -> Iterator[SourceRow]:
    for key, *values in _read_joined_rows(directory):
        categories, numericals = values[: len(CATEGORIES)], values[len(CATEGORIES) :][:NUMERICALS]
        outcome, *aux = values[len(CATEGORIES) + NUMERICALS :]
        features = [
            x for size, choice in zip(CATEGORIES, categories, strict=True) for x in _one_hot(choice, size)
        ]
        yield (
            f"{directory}: {KEY} {key!r}",
            {
                KEY: key,
                "features": features + [value / MILLI for value in numericals],
                "target": _one_hot(outcome, OUTCOMES) + [value / MILLI for value in aux],
            },
        )


def _one_hot(index: int, size: int) -> list[float]:
    return [float(index == i) for i in range(size)]


def _read_joined_rows(directory: Path) -> Iterator[tuple]:  # type: ignore[type-arg]  # a string, then integers
    """Yield every decision that has an outcome, ordered by id, and validate each value."""
    with _connect(directory, *LEDGERS) as connection:
        for ledger in LEDGERS:
            _check_table(connection, directory, ledger)
        names = [f"{ledger.table}.{name}" for ledger in LEDGERS for name in ledger.columns]
        limits = [limit for ledger in LEDGERS for limit in ledger.columns.values()]
        query = (
            f"SELECT {KEY}, {', '.join(names)} FROM decisions.decisions AS decisions "
            f"JOIN outcomes.outcomes AS outcomes USING ({KEY}) ORDER BY {KEY} COLLATE BINARY"
        )
        previous_key = None
        for key, *values in _rows(connection, query, directory):
            if not isinstance(key, str) or not key:
                raise DataError(f"{directory}: a {KEY} must be a non-empty text, not {key!r}")
            if key == previous_key:
                raise DataError(f"{directory}: {KEY} {key!r} occurs more than once")
            previous_key = key
            for name, value, limit in zip(names, values, limits, strict=True):
                if type(value) is not int or not 0 <= value < limit:
                    shown = repr(value)[:40]
                    raise DataError(
                        f"{directory}: {KEY} {key!r}: {name} must be an integer from 0 to {limit - 1}, "
                        f"not {shown}"
                    )
            yield key, *values


@contextlib.contextmanager
def _connect(directory: Path, *ledgers: Ledger) -> Iterator[sqlite3.Connection]:
    """Open ledgers read-only, attached as databases that have the names of their tables."""
    for ledger in ledgers:
        if not (directory / ledger.file).is_file():
            raise DataError(
                f"{directory} has no {ledger.file}",
                hint=f"a directory of ledgers needs both {DECISIONS} and {OUTCOMES_FILE}",
            )
    connection = sqlite3.connect(":memory:", uri=True)
    try:
        # the files are not trusted: they must not run code, write, or use unlimited memory
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        for ledger in ledgers:
            uri = f"{(directory / ledger.file).absolute().as_uri()}?mode=ro"
            with _sqlite_errors_as_data_errors(directory / ledger.file):
                connection.execute(f"ATTACH ? AS {ledger.table}", (uri,))
        connection.execute("PRAGMA query_only = ON")
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def _sqlite_errors_as_data_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OverflowError) as error:
        raise DataError(f"{path} cannot be read as a ledger: {error}") from error


def _rows(connection: sqlite3.Connection, query: str, path: Path) -> Iterator[Sequence[object]]:
    with _sqlite_errors_as_data_errors(path):
        yield from connection.execute(query)


def _check_table(connection: sqlite3.Connection, directory: Path, ledger: Ledger) -> None:
    """Raise a DataError unless the ledger's table is a plain one with all columns.

    Views and virtual tables are rejected, because they could run arbitrary queries.
    """
    path = directory / ledger.file
    query = f"SELECT type, sql FROM {ledger.table}.sqlite_master WHERE name = '{ledger.table}'"
    tables = list(_rows(connection, query, path))
    if not tables:
        raise DataError(
            f"{path} has no table {ledger.table}", hint="whet ledger create DIR writes a valid example"
        )
    kind, statement = tables[0]
    if kind != "table" or str(statement).upper().startswith("CREATE VIRTUAL"):
        raise DataError(f"{path}: {ledger.table} must be a plain table")
    columns = _rows(connection, f"PRAGMA {ledger.table}.table_xinfo({ledger.table})", path)
    hidden = {column[1]: column[-1] for column in columns}  # by name; not 0 for generated columns
    missing = [name for name in (KEY, *ledger.columns) if name not in hidden]
    if missing:
        raise DataError(f"{path}: {ledger.table} has no column {', '.join(missing[:4])}")
    computed = [name for name in (KEY, *ledger.columns) if hidden[name]]
    if computed:
        raise DataError(
            f"{path}: {ledger.table}.{computed[0]} is a generated column: a ledger must store its values"
        )


@dataclass(frozen=True)
class LedgerCheck:
    """The row counts of a directory of ledgers."""

    decisions: int
    outcomes: int
    joined: int

    def summary(self) -> str:
        """Return the counts as one line."""
        return (
            f"{self.decisions} decisions, {self.outcomes} outcomes, {self.joined} joined; "
            f"{self.decisions - self.joined} decisions have no outcome and are left out"
        )


def check_ledgers(directory: Path) -> LedgerCheck:
    """Validate every joined row of two ledgers, and count the rows.

    Raises:
        DataError: A file, a table or a value is invalid, or no decision has an outcome.
    """
    joined = sum(1 for _ in _read_joined_rows(directory))
    with _connect(directory, *LEDGERS) as connection:
        counts = [
            next(iter(_rows(connection, f"SELECT count(*) FROM {ledger.table}.{ledger.table}", directory)))[0]
            for ledger in LEDGERS
        ]
    decisions, outcomes = (int(str(count)) for count in counts)
    if not joined:
        raise DataError(f"{directory}: no decision has an outcome, so there is no training data")
    return LedgerCheck(decisions, outcomes, joined)


def create_ledgers(directory: Path, count: int) -> None:
    """Write two valid ledgers of synthetic rows, in which every tenth decision has no outcome."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{directory} cannot be created: {error.strerror}") from error
    records = quality("train", count)
    decisions, outcomes = [], []
    for number, record in enumerate(records, start=1):
        key = f"group-{number:06d}"
        choices, remaining = [], record["features"]
        for size in CATEGORIES:
            choices.append(max(range(size), key=remaining[:size].__getitem__))
            remaining = remaining[size:]
        decisions.append((key, *choices, *(round(value * MILLI) for value in remaining)))
        probabilities, aux = record["target"][:OUTCOMES], record["target"][OUTCOMES:]
        if number % 10:
            outcome = max(range(OUTCOMES), key=probabilities.__getitem__)
            outcomes.append((key, outcome, *(round(value * MILLI) for value in aux)))
    for ledger, rows in zip(LEDGERS, (decisions, outcomes), strict=True):
        try:
            with create_file_atomically(directory / ledger.file) as path:
                _write(path, ledger, rows)
        except sqlite3.Error as error:
            raise StorageError(f"{directory / ledger.file} could not be written: {error}") from error


def _write(path: Path, ledger: Ledger, rows: Sequence[tuple[int, ...]]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(ledger.schema())
        placeholders = ", ".join("?" * (len(ledger.columns) + 1))
        database.executemany(f"INSERT INTO {ledger.table} VALUES ({placeholders})", rows)
        database.commit()
