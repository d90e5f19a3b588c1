"""A classifier killed after its last step and resumed has the report and plots of an uninterrupted one."""

import json

import pytest

from faults.harness import Boundary, Case, Fault, assert_same_result, without_times
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
    return without_times({**json.loads((run.run / "classification.json").read_text()), "throughput": None})


@pytest.fixture(scope="module")
def uninterrupted(tiny_directory, tmp_path_factory):
    run = case(tiny_directory, tmp_path_factory.mktemp("uninterrupted"))
    assert run.run_once() == 0, run.output_text()
    assert report_of(run)["calibration"]["temperature"] != 1.0
    return run


@pytest.mark.parametrize(
    ("operation", "location"),
    [
        pytest.param("rename", "test/final", marks=pytest.mark.slow),
        ("open", "test/classification.json"),  # final/ exists, but no report
        pytest.param("rename", "test/classification.json", marks=pytest.mark.slow),
        ("rename", "test/classification.png"),  # only the plots are missing
    ],
)
def test_killed_after_the_last_step(
    uninterrupted, tiny_directory, tmp_path, operation, location, record_property
):
    record_property("fault: SIGKILL at a file operation", 1)
    run = case(tiny_directory, tmp_path)
    assert run.run_once(Fault(kill_at=Boundary(operation, location))) == -9, run.output_text()
    assert run.run_once() == 0, run.output_text()
    assert_same_result(run.result(), uninterrupted.result())
    assert report_of(run) == report_of(uninterrupted)
    assert (run.run / "classification.png").read_bytes().startswith(b"\x89PNG")
    assert not [path.name for path in run.run.rglob(".*") if path.name != ".lock"]
    assert run.run_once() == 2
    assert "has already finished" in run.output_text()
