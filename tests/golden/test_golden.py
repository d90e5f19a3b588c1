"""Every kind of run still computes what was recorded, and runs of earlier versions are still usable.

On the machine of a recording all must be equal bit for bit (`python -m tools.golden check`); here, where machines
differ, numbers are compared with a tolerance.
"""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tools.golden import CASES, KEPT, differences

import whet

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"
# rewards of sampled answers: one bit may change which token is drawn
SAMPLED = {"grpo", "grpo-moe"}


@pytest.mark.slow
def test_every_kind_of_run_computes_what_was_recorded():
    checked = subprocess.run(
        [sys.executable, "-m", "tools.golden", "check", RECORDINGS, "--tolerance", "2e-3"],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    lines = [line for line in checked.stdout.splitlines() if not line.startswith("same")]
    assert lines == [f"{len(CASES) + 1} cases, 0 differ"], checked.stderr[-2000:]


def test_a_difference_is_named():
    before = {"metrics": [{"loss": (1.0).hex(), "exact_match": (0.5).hex()}], "final": {"a": "1"}}
    after = {"metrics": [{"loss": (1.0001).hex(), "exact_match": (1.0).hex()}], "final": {"a": "2"}}
    assert len(list(differences(before, after))) == 3
    assert list(differences(before, after, tolerance=1e-3)) == []
    assert list(differences(before, after, tolerance=1e-5)) == [
        f".metrics[0].loss: {(1.0).hex()!r} became {(1.0001).hex()!r}"
    ]
    assert list(differences(before, {"metrics": []}, tolerance=1)) != []


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Interrupted runs that version 0.1.0 wrote, with the models and records they name."""
    directory = tmp_path_factory.mktemp("kept")
    with tarfile.open(HERE / "runs-0.1.0.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.mark.parametrize("name", KEPT)
def test_a_run_of_an_earlier_version_resumes_opens_exports_and_reports(name, kept, monkeypatch, capsys):
    monkeypatch.chdir(kept)
    run = Path("runs") / name
    result = whet.resume(run)
    assert result.steps == 4
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    recorded = json.loads((RECORDINGS / f"{name}.json").read_text())["metrics"]
    expected = {row["step"]: float.fromhex(row["loss"]) for row in recorded if "loss" in row}
    assert losses.keys() == expected.keys()
    if name not in SAMPLED:
        assert losses == pytest.approx(expected, rel=2e-3)
    if name.startswith("classify"):
        text = "yes yes 3"
        assert len(whet.Classifier.load(run).predict([text])) == 1
        assert command("export", run, "--to", "hf", "--out", f"{name}-export") == 0
    elif not name.startswith("quality"):
        model, tokenizer = whet.load(run)
        assert isinstance(whet.generate(model, tokenizer, "Who?", max_tokens=3), str)
        assert command("export", run, "--to", "hf", "--out", f"{name}-export") == 0
    assert command("report", run) == 0
    assert command("runs", "runs") == 0
    assert name in capsys.readouterr().out


def command(*arguments):
    from whet.cli.app import main

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["whet", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code or 0
