import runpy
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))
NAMES = [path.stem for path in FILES if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_what_it_measures_and_runs_nothing(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # another one may have imported it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out
