"""The two SQLite ledgers of the quality task: what was decided, and what came of it.

    quality_decisions.db: table decisions (decision_group_id TEXT, category_1..8, milli_1..22)
    quality_outcomes.db:  table outcomes  (decision_group_id TEXT, outcome, aux_milli_1..8)

A category is the number of its choice, from 0; an outcome is one of 12, from 0; milli-units are whole numbers
from 0 to 1000. Rows are joined on decision_group_id: a decision without an outcome teaches nothing and is
left out. The tables' names and columns were never published, so this schema is whet's own.
"""

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.data.sources.readers import Content, SourceRow
from whet.errors import DataError, StorageError
from whet.recipes.quality.synthetic_rows import AUX, CATEGORIES, NUMERICALS, OUTCOMES, quality
from whet.storage import new_file

DECISIONS, OUTCOMES_FILE = "quality_decisions.db", "quality_outcomes.db"
KEY = "decision_group_id"
MILLI = 1000
_LONGEST_VALUE = 10**6  # bytes of a value or of a row, whatever a file claims


@dataclass(frozen=True)
class Ledger:
    """One of the two files: its table, and the columns with how many values each may have."""

    file: str
    table: str
    columns: dict[str, int]

    def schema(self) -> str:
        """The statement that makes its table."""
        columns = [
            f"{name} INTEGER NOT NULL CHECK ({name} BETWEEN 0 AND {limit - 1})"
            for name, limit in self.columns.items()
        ]
        return f"CREATE TABLE {self.table} ({', '.join([f'{KEY} TEXT PRIMARY KEY NOT NULL', *columns])})"


LEDGERS = (
    Ledger(
        DECISIONS,
        "decisions",
        {f"category_{place}": size for place, size in enumerate(CATEGORIES, start=1)}
        | {f"milli_{place}": MILLI + 1 for place in range(1, NUMERICALS + 1)},
    ),
    Ledger(
        OUTCOMES_FILE,
        "outcomes",
        {"outcome": OUTCOMES} | {f"aux_milli_{place}": MILLI + 1 for place in range(1, AUX + 1)},
    ),
)


def ledgers_content(directory: Path) -> Content:
    """Joined rows as tabular records: hard one-hot categories and outcome, milli-units scaled to 0 .. 1."""

    def digest() -> str:
        found = hashlib.sha256()
        for row in _joined(directory):
            found.update(f"{row!r}\n".encode())
        return found.hexdigest()

    return Content(rows=lambda: _records(directory), digest=digest)


def _records(directory: Path) -> Iterator[SourceRow]:
    for key, *values in _joined(directory):
        categories, numericals = values[: len(CATEGORIES)], values[len(CATEGORIES) :][:NUMERICALS]
        outcome, *aux = values[len(CATEGORIES) + NUMERICALS :]
        features = [
            x for size, choice in zip(CATEGORIES, categories, strict=True) for x in _one(choice, size)
        ]
        yield (
            f"{directory}: {KEY} {key!r}",
            {
                KEY: key,
                "features": features + [value / MILLI for value in numericals],
                "target": _one(outcome, OUTCOMES) + [value / MILLI for value in aux],
            },
        )


def _one(place: int, size: int) -> list[float]:
    return [float(place == each) for each in range(size)]


def _joined(directory: Path) -> Iterator[tuple]:  # type: ignore[type-arg]  # a text, then whole numbers
    """Every decision that has an outcome, by its id; each value checked."""
    with _opened(directory, *LEDGERS) as connection:
        for ledger in LEDGERS:
            _check_table(connection, directory, ledger)
        names = [f"{ledger.table}.{name}" for ledger in LEDGERS for name in ledger.columns]
        limits = [limit for ledger in LEDGERS for limit in ledger.columns.values()]
        query = (
            f"SELECT {KEY}, {', '.join(names)} FROM decisions.decisions AS decisions "
            f"JOIN outcomes.outcomes AS outcomes USING ({KEY}) ORDER BY {KEY} COLLATE BINARY"
        )
        before = None
        for key, *values in _rows(connection, query, directory):
            if not isinstance(key, str) or not key:
                raise DataError(f"{directory}: a {KEY} must be a text, not {key!r}")
            if key == before:
                raise DataError(f"{directory}: {KEY} {key!r} is there more than once")
            before = key
            for name, value, limit in zip(names, values, limits, strict=True):
                if type(value) is not int or not 0 <= value < limit:
                    shown = repr(value)[:40]
                    raise DataError(
                        f"{directory}: {KEY} {key!r}: {name} must be a whole number from 0 to {limit - 1}, "
                        f"not {shown}"
                    )
            yield key, *values


@contextlib.contextmanager
def _opened(directory: Path, *ledgers: Ledger) -> Iterator[sqlite3.Connection]:
    """The ledgers, read-only, as databases called like their tables."""
    for ledger in ledgers:
        if not (directory / ledger.file).is_file():
            raise DataError(
                f"{directory} has no {ledger.file}", hint=f"both are needed: {DECISIONS}, {OUTCOMES_FILE}"
            )
    connection = sqlite3.connect(":memory:", uri=True)
    try:
        # nothing in a file of somebody else's may run, write, or grow without a limit
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        connection.execute("PRAGMA trusted_schema = OFF")
        for ledger in ledgers:
            address = f"{(directory / ledger.file).absolute().as_uri()}?mode=ro"
            with _naming(directory / ledger.file):
                connection.execute(f"ATTACH ? AS {ledger.table}", (address,))
        connection.execute("PRAGMA query_only = ON")
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OverflowError) as error:
        raise DataError(f"{path} cannot be read as a ledger: {error}") from error


def _rows(connection: sqlite3.Connection, query: str, path: Path) -> Iterator[Sequence[object]]:
    with _naming(path):
        yield from connection.execute(query)


def _check_table(connection: sqlite3.Connection, directory: Path, ledger: Ledger) -> None:
    """The table is there, is a plain one (a view could compute for ever), and has every column."""
    path = directory / ledger.file
    query = f"SELECT type, sql FROM {ledger.table}.sqlite_master WHERE name = '{ledger.table}'"
    found = list(_rows(connection, query, path))
    if not found:
        raise DataError(f"{path} has no table {ledger.table}", hint="whet ledger create DIR makes an example")
    kind, statement = found[0]
    if kind != "table" or str(statement).upper().startswith("CREATE VIRTUAL"):
        raise DataError(f"{path}: {ledger.table} must be a plain table")
    columns = _rows(connection, f"PRAGMA {ledger.table}.table_xinfo({ledger.table})", path)
    hidden = {column[1]: column[-1] for column in columns}
    missing = [name for name in (KEY, *ledger.columns) if name not in hidden]
    if missing:
        raise DataError(f"{path}: {ledger.table} has no column {', '.join(missing[:4])}")
    computed = [name for name in (KEY, *ledger.columns) if hidden[name]]
    if computed:
        raise DataError(f"{path}: {ledger.table}.{computed[0]} is computed: a ledger stores its values")


@dataclass(frozen=True)
class LedgerCheck:
    """What is in a directory of ledgers."""

    decisions: int
    outcomes: int
    joined: int

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.decisions} decisions, {self.outcomes} outcomes, {self.joined} joined; "
            f"{self.decisions - self.joined} decisions have no outcome and are left out"
        )


def check_ledgers(directory: Path) -> LedgerCheck:
    """Read every joined row, and count; the first thing that is wrong is an error."""
    joined = sum(1 for _ in _joined(directory))
    with _opened(directory, *LEDGERS) as connection:
        counts = [
            next(iter(_rows(connection, f"SELECT count(*) FROM {ledger.table}.{ledger.table}", directory)))[0]
            for ledger in LEDGERS
        ]
    decisions, outcomes = (int(str(count)) for count in counts)
    if not joined:
        raise DataError(f"{directory}: no decision has an outcome, so there is nothing to learn from")
    return LedgerCheck(decisions, outcomes, joined)


def create_ledgers(directory: Path, count: int) -> None:
    """Two valid ledgers of generated rows; every tenth decision has no outcome yet."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{directory} cannot be made: {error.strerror}") from error
    records = quality("train", count)
    decisions, outcomes = [], []
    for number, record in enumerate(records, start=1):
        key = f"group-{number:06d}"
        choices, left = [], record["features"]
        for size in CATEGORIES:
            choices.append(max(range(size), key=left[:size].__getitem__))
            left = left[size:]
        decisions.append((key, *choices, *(round(value * MILLI) for value in left)))
        probabilities, aux = record["target"][:OUTCOMES], record["target"][OUTCOMES:]
        if number % 10:
            outcome = max(range(OUTCOMES), key=probabilities.__getitem__)
            outcomes.append((key, outcome, *(round(value * MILLI) for value in aux)))
    for ledger, rows in zip(LEDGERS, (decisions, outcomes), strict=True):
        try:
            with new_file(directory / ledger.file) as path:
                _write(path, ledger, rows)
        except sqlite3.Error as error:
            raise StorageError(f"{directory / ledger.file} could not be written: {error}") from error


def _write(path: Path, ledger: Ledger, rows: Sequence[tuple[int, ...]]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(ledger.schema())
        marks = ", ".join("?" * (len(ledger.columns) + 1))
        database.executemany(f"INSERT INTO {ledger.table} VALUES ({marks})", rows)
        database.commit()
