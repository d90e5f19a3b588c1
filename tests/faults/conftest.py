"""Count tried and survived faults: WHET_FAULTS=file.json writes the table of docs/reliability.md.

A test declares its faults with record_property("fault: ...", times); they are survived if it passes.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

TABLE = defaultdict(lambda: {"tried": 0, "survived": 0})


def pytest_runtest_logreport(report):
    if report.when != "call":
        return
    for name, times in report.user_properties:
        if name.startswith("fault: "):
            row = TABLE[name.removeprefix("fault: ")]
            row["tried"] += times
            row["survived"] += times * report.passed


def pytest_sessionfinish(session):
    if target := os.environ.get("WHET_FAULTS"):
        from whet.runs.provenance import versions

        rows = {name: TABLE[name] for name in sorted(TABLE)}
        Path(target).write_text(json.dumps({"faults": rows, "versions": versions()}, indent=2) + "\n")
