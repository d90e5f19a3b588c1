"""The SQLite ledgers: the values of a joined row, and broken or malicious files."""

import sqlite3

import pytest

from whet.data.sources.source import DIRECTORY_READERS, open_source
from whet.errors import DataError
from whet.recipes.quality.ledgers import LEDGERS, check_ledgers, create_ledgers

SIZES = (9, 11, 14, 7, 5, 16, 8, 4)


def write(directory, decisions, outcomes):
    """Write ledgers with exactly these rows."""
    directory.mkdir(exist_ok=True)
    for ledger, rows in zip(LEDGERS, (decisions, outcomes), strict=True):
        database = sqlite3.connect(directory / ledger.file)
        columns = ", ".join(["decision_group_id", *ledger.columns])
        database.execute(f"CREATE TABLE {ledger.table} ({columns})")  # no checks: others' files have none
        for row in rows:
            database.execute(f"INSERT INTO {ledger.table} VALUES ({', '.join('?' * len(row))})", row)
        database.commit()
        database.close()
    return directory


def decision(key, choices=(0,) * 8, millis=(0,) * 22):
    return (key, *choices, *millis)


def outcome(key, label=0, aux=(0,) * 8):
    return (key, label, *aux)


def test_joined_row_has_expected_values(tmp_path):
    """Categories and the outcome are one-hot, and milli-units are divided by 1000."""
    choices = (8, 0, 13, 3, 4, 15, 0, 2)
    millis = (*range(0, 1001, 50), 1000)
    write(
        tmp_path,
        [decision("b", choices, millis), decision("a"), decision("lost")],
        [outcome("b", 11, (0, 1, 500, 1000, 7, 250, 999, 3)), outcome("a", 5), outcome("never decided")],
    )
    records = list(open_source(str(tmp_path)))
    assert [record.fields["decision_group_id"] for record in records] == ["a", "b"]
    features, target = records[1].fields["features"], records[1].fields["target"]
    assert len(features) == 96
    assert len(target) == 20
    start = 0
    for size, choice in zip(SIZES, choices, strict=True):
        assert features[start : start + size] == [1.0 if place == choice else 0.0 for place in range(size)]
        start += size
    assert features[74:] == [milli / 1000 for milli in millis]
    assert target == [0.0] * 11 + [1.0, 0, 0.001, 0.5, 1, 0.007, 0.25, 0.999, 0.003]
    assert check_ledgers(tmp_path).summary().startswith("3 decisions, 3 outcomes, 2 joined; 1 decisions")


def test_created_ledgers_are_valid_and_never_overwrite(tmp_path):
    create_ledgers(tmp_path / "new", 50)
    actual = check_ledgers(tmp_path / "new")
    assert (actual.decisions, actual.outcomes, actual.joined) == (50, 45, 45)
    assert all(0 <= x <= 1 for r in open_source(str(tmp_path / "new")) for x in r.fields["features"])
    with pytest.raises(Exception, match="already exists"):
        create_ledgers(tmp_path / "new", 50)


def test_ledgers_are_opened_read_only(tmp_path):
    create_ledgers(tmp_path, 20)
    before = {ledger.file: (tmp_path / ledger.file).read_bytes() for ledger in LEDGERS}
    for ledger in LEDGERS:
        (tmp_path / ledger.file).chmod(0o444)
    first = open_source(str(tmp_path)).digest()
    assert len(list(open_source(str(tmp_path)))) == 18
    assert {ledger.file: (tmp_path / ledger.file).read_bytes() for ledger in LEDGERS} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(before)  # no journal, no lock
    assert open_source(str(tmp_path)).digest() == first


def test_digest_changes_with_a_value(tmp_path):
    write(tmp_path / "one", [decision("a")], [outcome("a")])
    write(tmp_path / "two", [decision("a")], [outcome("a", 1)])
    assert open_source(str(tmp_path / "one")).digest() != open_source(str(tmp_path / "two")).digest()


@pytest.mark.parametrize(
    ("decisions", "outcomes", "message"),
    [
        ([decision("a", millis=(1001,) * 22)], [outcome("a")], "milli_1 must be an integer from 0 to 1000, not 1001"),
        ([decision("a", millis=(0.5,) * 22)], [outcome("a")], "not 0.5"),
        ([decision("a", millis=(None,) * 22)], [outcome("a")], "not None"),
        ([decision("a", choices=(9,) * 8)], [outcome("a")], "category_1 must be an integer from 0 to 8"),
        ([decision("a", choices=(-1,) * 8)], [outcome("a")], "not -1"),
        ([decision("a", choices=("x" * 500,) * 8)], [outcome("a")], "not 'xxx"),
        ([decision("a")], [outcome("a", 12)], "outcome must be an integer from 0 to 11, not 12"),
        ([decision("a"), decision("a")], [outcome("a")], "'a' occurs more than once"),
        ([decision("a")], [outcome("a"), outcome("a")], "'a' occurs more than once"),
        ([decision(7)], [outcome(7)], "decision_group_id must be a non-empty text, not 7"),
    ],
)  # fmt: skip
def test_invalid_value_is_reported_with_its_decision(decisions, outcomes, message, tmp_path):
    write(tmp_path, decisions, outcomes)
    with pytest.raises(DataError, match=message):
        check_ledgers(tmp_path)


def test_ledgers_without_joined_rows_raise(tmp_path):
    write(tmp_path, [decision("a")], [outcome("b")])
    with pytest.raises(DataError, match="no decision has an outcome"):
        check_ledgers(tmp_path)
    with pytest.raises(DataError, match="contains no records"):
        list(open_source(str(tmp_path)))


def replace_table(path, *statements):
    database = sqlite3.connect(path)
    database.execute("DROP TABLE decisions")
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


def test_broken_and_malicious_files_raise_one_clear_error(tmp_path):
    create_ledgers(tmp_path, 20)
    path = tmp_path / "quality_decisions.db"
    good = path.read_bytes()
    columns = ", ".join(LEDGERS[0].columns)

    path.write_bytes(b"not a database, but long enough to look at" * 30)
    with pytest.raises(DataError, match="quality_decisions.db cannot be read as a ledger"):
        check_ledgers(tmp_path)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError, match="cannot be read as a ledger"):
        check_ledgers(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="has no table decisions"):
        check_ledgers(tmp_path)
    path.write_bytes(good)
    endless = (
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x AS decision_group_id FROM n"
    )
    replace_table(path, f"CREATE VIEW decisions AS {endless}")
    with pytest.raises(DataError, match="must be a plain table"):
        check_ledgers(tmp_path)
    path.write_bytes(good)
    replace_table(path, "CREATE TABLE decisions (decision_group_id TEXT, category_1 INTEGER)")
    with pytest.raises(DataError, match="has no column category_2"):
        check_ledgers(tmp_path)
    path.write_bytes(good)
    computed = columns.replace("category_1,", "category_1 AS (length(hex(zeroblob(100000000)))),")
    replace_table(path, f"CREATE TABLE decisions (decision_group_id TEXT, {computed})")
    with pytest.raises(DataError, match="category_1 is a generated column"):
        check_ledgers(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="has no quality_decisions.db"):
        check_ledgers(tmp_path)


def test_damaged_page_never_crashes(tmp_path):
    create_ledgers(tmp_path, 60)
    path = tmp_path / "quality_decisions.db"
    good = path.read_bytes()
    refused = 0
    for place in range(0, len(good), len(good) // 40):
        path.write_bytes(good[:place] + b"\xff" * 16 + good[place + 16 :])
        try:
            check_ledgers(tmp_path)
        except DataError:
            refused += 1
    assert refused


def test_directory_with_one_ledger_reports_the_missing_one(tmp_path):
    create_ledgers(tmp_path, 20)
    (tmp_path / "quality_outcomes.db").unlink()
    assert DIRECTORY_READERS.keys() == {ledger.file for ledger in LEDGERS}
    assert any((tmp_path / name).exists() for name in DIRECTORY_READERS)
    with pytest.raises(DataError, match="has no quality_outcomes.db"):
        list(open_source(str(tmp_path)))
