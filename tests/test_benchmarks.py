import json
import runpy
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))
NAMES = [path.stem for path in FILES if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_help_prints_usage(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(
        sys.modules, f"benchmarks.{name}", raising=False
    )  # another benchmark may have imported it
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert exit_info.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_table_of_quantized_exports_is_that_of_the_results():
    from benchmarks.exports import RESULTS, table

    report = json.loads(RESULTS.read_text())
    assert table(report) in (FILES[0].parents[1] / "docs" / "export.md").read_text()
    assert all(row["opened_by"] == "transformers" for row in report["quantizations"].values())
