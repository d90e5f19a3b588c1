"""The tables of docs/reliability.md match the measurements."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def fault_rows():
    for name, counts in result("faults.json")["faults"].items():
        yield f"| {name} | {counts['tried']} | {counts['survived']} | 0 |"


def pause_rows():
    pauses = result("checkpoint-pause.json")
    yield f"| blocking (`async: false`) | {pauses['sync_ms']:.0f} ms |"
    yield f"| in the background | {pauses['overlapped_ms']:.1f} ms ({pauses['overlapped_share']:.1%}) |"
    yield f"| in the background, with an update right after it | {pauses['copy_ms']:.0f} ms |"


def test_tables_match_the_measurements():
    for row in (*fault_rows(), *pause_rows()):
        assert row in PAGE, f"docs/reliability.md lacks: {row}"
    counts = result("faults.json")["faults"].values()
    assert all(row["tried"] == row["survived"] for row in counts)
    assert (
        sum(row["tried"] for name, row in result("faults.json")["faults"].items() if "SIGKILL" in name) >= 25
    )


if __name__ == "__main__":
    print(*fault_rows(), "", *pause_rows(), sep="\n")
