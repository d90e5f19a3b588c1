"""A classifier that is killed after its last step and resumed has the report and the plots of one that was not."""

import json

import pytest

from faults.harness import Boundary, Case, Fault, same, timeless
from tiny import run_config
from whet.data.synthetic.shell_safety import CLASSES


def case(tiny_directory, directory):
    sections = {
        "objective": {"kind": "classify", "classes": CLASSES, "calibrate": True, "probe": False},
        "data": {"train": "synth:shell-safety:40", "valid": "synth:shell-safety-valid:20", "max_length": 128},
        "run": {"steps": 3, "batch_size": 4},
    }
    return Case(directory, run_config(tiny_directory, directory, **sections))


def report_of(run):
    return timeless({**json.loads((run.run / "classification.json").read_text()), "throughput": None})


@pytest.fixture(scope="module")
def whole(tiny_directory, tmp_path_factory):
    run = case(tiny_directory, tmp_path_factory.mktemp("whole"))
    assert run.go() == 0, run.said()
    assert report_of(run)["calibration"]["temperature"] != 1.0
    return run


@pytest.mark.parametrize(
    ("operation", "place"),
    [
        pytest.param("rename", "test/final", marks=pytest.mark.slow),
        ("open", "test/classification.json"),  # final/ is there, and nothing else of the end
        pytest.param("rename", "test/classification.json", marks=pytest.mark.slow),
        ("rename", "test/classification.png"),  # all is there but the plots
    ],
)
def test_killed_after_its_last_step(whole, tiny_directory, tmp_path, operation, place, record_property):
    record_property("fault: SIGKILL at a file operation", 1)
    run = case(tiny_directory, tmp_path)
    assert run.go(Fault(kill_at=Boundary(operation, place))) == -9, run.said()
    assert run.go() == 0, run.said()
    same(run.result(), whole.result())
    assert report_of(run) == report_of(whole)
    assert (run.run / "classification.png").read_bytes().startswith(b"\x89PNG")
    assert not [path.name for path in run.run.rglob(".*") if path.name != ".lock"]
    assert run.go() == 2
    assert "has finished" in run.said()
