"""docs/exactness.md names a test for each guarantee, and every test file that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "exactness.md").read_text()


def test_every_named_test_exists():
    paths = re.findall(r"`(tests/[^`]+)`", PAGE)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_guarantee_names_a_test():
    guarantees = PAGE.partition("\n## ")[2]
    rows = [line for line in guarantees.splitlines() if line.startswith("| ") and "guarantee" not in line]
    assert len(rows) > 30
    assert [row for row in rows if "`tests/" not in row] == []
