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
