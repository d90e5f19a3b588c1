"""The predicted peak memory against the measured one, on configs that the estimate was not tuned on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.plan_memory import CASES, PLAIN_MALLOC, QUICK

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory from /proc")


def measure(cases):
    """Return the rows of a benchmark in another process, whose malloc returns freed memory to the system."""
    paths = [str(ROOT), str(ROOT / "src")]
    environment = os.environ | PLAIN_MALLOC | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--rows", "--cases", ",".join(cases)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


def outliers(rows):
    return {name: row["ratio"] for name, row in rows.items() if abs(row["ratio"] - 1) > 0.15}


def test_predicted_memory_is_within_15_percent_of_measured():
    rows = measure(QUICK)
    assert len(rows) == 8
    assert all(row["measured_mib"] > 100 for row in rows.values())
    assert outliers(rows) == {}


@pytest.mark.slow
def test_predicted_memory_of_every_case():
    assert outliers(measure([name for name in CASES if name not in QUICK])) == {}
