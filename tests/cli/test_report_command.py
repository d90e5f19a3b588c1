"""`whet report` and `whet runs`, on a real run."""

import json
import subprocess
import sys

import pytest

import whet
from tiny import run_config


@pytest.fixture(scope="module")
def run(tiny_directory, tmp_path_factory):
    place = tmp_path_factory.mktemp("reported")
    return whet.train(run_config(tiny_directory, place, run={"steps": 3}, eval={"every": 2})).directory


def test_a_real_run_becomes_a_page(cli, run, tmp_path):
    code, out, err = cli("report", run)
    assert (code, out, err) == (0, f"{run / 'report.html'}\n", "")
    page = (run / "report.html").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = rows[-1]["summary"]["best"]["value"]
    for said in (
        "finished",
        f"eval loss {best:.4g}",
        "id='chart-loss'",
        "synth:house:24",
        "safetensors",
        "whet chat",
    ):
        assert said in page
    cli("report", run, "--out", tmp_path / "other.html")
    assert (tmp_path / "other.html").read_text() == page


def test_runs_lists_it(cli, run, tmp_path, monkeypatch):
    code, out, _ = cli("runs", run.parent)
    assert code == 0
    assert "test  finished" in out.splitlines()[1]
    assert cli("runs", run)[1].split()[:9] == out.split()[:9]
    monkeypatch.chdir(run.parents[1])
    assert "finished" in cli("runs")[1]
    (tmp_path / "none").mkdir()
    assert cli("runs", tmp_path / "none")[1] == f"no runs in {tmp_path / 'none'}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("report", "missing"), "missing does not exist"),
        (("report", "."), "is not a run"),
        (("report", "{run}", "--out", "{run}/config.yaml"), "does not end in .html"),
        (("report", "{run}", "--out", "{run}/none/x.html"), "could not be written"),
        (("runs", "missing"), "missing is no directory"),
    ],
)
def test_what_cannot_be_done_is_one_message(cli, run, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*(argument.replace("{run}", str(run)) for argument in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("error:") == 1
    assert "Traceback" not in err


def test_listing_runs_needs_no_torch():
    code = "import sys, whet.reporting.run.run_list; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
