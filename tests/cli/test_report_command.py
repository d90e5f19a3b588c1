"""`whet report` and `whet runs`, on a real run."""

import json
import subprocess
import sys

import pytest

import whet
from tiny import run_config


@pytest.fixture(scope="module")
def run(tiny_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("reported")
    return whet.train(run_config(tiny_directory, directory, run={"steps": 3}, eval={"every": 2})).directory


def test_report_of_a_real_run(cli, run, tmp_path):
    code, out, err = cli("report", run)
    assert (code, out, err) == (0, f"{run / 'report.html'}\n", "")
    page = (run / "report.html").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = rows[-1]["summary"]["best"]["value"]
    for expected in (
        "finished",
        f"eval loss {best:.4g}",
        "id='chart-loss'",
        "synth:house:24",
        "safetensors",
        "whet chat",
    ):
        assert expected in page
    cli("report", run, "--out", tmp_path / "other.html")
    assert (tmp_path / "other.html").read_text() == page


def test_runs_lists_a_run(cli, run, tmp_path, monkeypatch):
    code, out, _ = cli("runs", run.parent)
    assert code == 0
    assert "test  finished" in out.splitlines()[1]
    assert cli("runs", run)[1].split()[:9] == out.split()[:9]
    monkeypatch.chdir(run.parents[1])
    assert "finished" in cli("runs")[1]
    (tmp_path / "none").mkdir()
    assert cli("runs", tmp_path / "none")[1] == f"no runs in {tmp_path / 'none'}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "missing"), "missing does not exist"),
        (("report", "."), "is not a run"),
        (("report", "{run}", "--out", "{run}/config.yaml"), "does not end in .html"),
        (("report", "{run}", "--out", "{run}/none/x.html"), "could not be written"),
        (("runs", "missing"), "missing is not a directory"),
    ],
)
def test_report_errors_are_one_message(cli, run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*(argument.replace("{run}", str(run)) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("error:") == 1
    assert "Traceback" not in err


def test_runs_does_not_import_torch():
    code = "import sys, whet.reporting.run.run_list; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
