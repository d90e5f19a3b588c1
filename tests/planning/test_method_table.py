"""The figures of docs/choose-a-method.md are those of the code that the page shows."""

import re
from pathlib import Path

import pytest

from whet.studies.advise import LEARNING_RATES

PAGE = (Path(__file__).parents[2] / "docs" / "choose-a-method.md").read_text()


def test_memory_table_is_the_output_of_its_code(tmp_path, monkeypatch, capsys):
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "choose-a-method.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in printed] == ["1B", "8B", "70B"]
    for row in printed:
        name, *cells = row.strip("| ").split(" | ")
        [shown] = re.findall(rf"^\| {name} \| (.*) \|$", PAGE, flags=re.M)
        assert [float(cell) for cell in shown.split(" | ")] == pytest.approx(
            [float(cell) for cell in cells], rel=0.02
        )


def test_learning_rates_are_those_of_whet_advise():
    section = PAGE.partition("## Where to start with the learning rate")[2]
    rows = re.findall(r"^\| (?:up to|more).*\| (\S+) \| (\S+) \|$", section, flags=re.M)
    assert [(float(adapters), float(full)) for adapters, full in rows] == [
        (adapters, full) for _, adapters, full in LEARNING_RATES
    ]
