"""`whet data clean`: what it prints, its exit codes, and the example of its page."""

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "clean-data.md"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The files of the page, in the working directory; returns the output that the page shows."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    for name, content in re.findall(r'^```jsonl title="(.*?)"\n(.*?)^```', text, flags=re.M | re.S):
        (tmp_path / name).write_text(content)
    return re.search(r"^```text\n(.*?)^```", text, flags=re.M | re.S)[1]


def test_example_of_the_page(cli, example):
    code, out, _ = cli("data", "clean", "train.jsonl", "clean.jsonl", "--against", "test.jsonl")
    assert (code, out) == (0, example)
    lines = Path("train.jsonl").read_text().splitlines()
    assert Path("clean.jsonl").read_text().splitlines() == [lines[0], lines[2]]
    assert len(Path("clean.removed.jsonl").read_text().splitlines()) == 3


def test_json_and_dry_run(cli, example, tmp_path):
    before = sorted(tmp_path.iterdir())
    code, out, _ = cli("data", "clean", "train.jsonl", "--dry-run", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["records"], report["kept"], report["output"]) == (5, 3, None)
    assert report["removed"] == {
        "bad record": 0, "contaminated": 0, "exact duplicate": 1, "near duplicate": 1,
    }  # fmt: skip
    assert sorted(tmp_path.iterdir()) == before
    assert "nothing was written" in cli("data", "clean", "train.jsonl", "--dry-run", "--no-near")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.jsonl"], "OUT is missing"),
        (["train.jsonl", "train.jsonl"], "already exists"),
        (["tarin.jsonl", "out.jsonl"], "did you mean train.jsonl"),
        (["train.jsonl", "out.csv"], "JSON Lines or Parquet"),
        (["train.jsonl", "--dry-run", "--removed", "x.jsonl"], "--removed has no effect"),
        (["train.jsonl", "out.jsonl", "--threshold", "2"], "threshold must be above 0"),
        (["train.jsonl", "missing/out.jsonl", "--against", "none.jsonl"], "none.jsonl does not exist"),
    ],
)
def test_wrong_arguments(cli, example, arguments, words):
    code, _, err = cli("data", "clean", *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_data_of_a_config_still_works(cli, example):
    code, _, err = cli("data", "clean.yaml")
    assert code == 2
    assert "clean.yaml" in err
    assert "whet data clean" in cli("data", "clean", "--help")[1]
