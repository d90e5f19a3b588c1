"""docs/metrics.md lists every metric that runs log, and no metric that does not exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDINGS = sorted((ROOT / "tests" / "golden" / "recordings").glob("*.json"))
PAGE = (ROOT / "docs" / "metrics.md").read_text()
# sections whose tables list metrics; the others describe rows, fields of the summary and endings of names
NOT_METRICS = ("Read the rows", "Rows that cover several steps", "Summary", "Is lower or higher better?")


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names_in_tables(text):
    """Return the names in the first column of the tables."""
    cells = re.findall(r"^\| (`[^|]*) \|", text, flags=re.M)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def documented():
    titles = re.findall(r"^## (.*)$", PAGE, flags=re.M)
    text = "".join(section(title) for title in titles if title not in NOT_METRICS)
    old_names = section("Probes").partition("Older versions")[2]
    return names_in_tables(text.replace(old_names, ""))


def placeholder_pattern(name):
    """Return a pattern for a name with placeholders in capitals, such as exact_match_GROUP."""
    return re.sub(r"[A-Z]{2,}", r"[^.]+", re.escape(name))


def is_documented(metric):
    names = documented()
    exact = {name for name in names if not re.search(r"[A-Z]{2,}", name)}
    if "." in metric:  # a metric of one part of a mix
        prefix = "eval_" if metric.startswith("eval_") else ""
        return f"{prefix}{metric.partition('.')[2]}" in exact
    # eval_NAME is for user-defined metrics, and would match every evaluation metric
    patterns = [placeholder_pattern(name) for name in names - exact - {"eval_NAME"} if "." not in name]
    return metric in exact or any(re.fullmatch(pattern, metric) for pattern in patterns)


def logged_rows(path):
    return json.loads(path.read_text()).get("metrics", [])


@pytest.mark.parametrize("path", [path for path in RECORDINGS if logged_rows(path)], ids=lambda p: p.stem)
def test_every_logged_metric_is_documented(path):
    metrics = {name for row in logged_rows(path) for name in row if name != "summary"}
    assert metrics
    assert [name for name in sorted(metrics) if not is_documented(name)] == []


def test_every_field_of_a_summary_is_documented():
    fields = {name for path in RECORDINGS for row in logged_rows(path) for name in row.get("summary", ())}
    assert fields - names_in_tables(section("Summary")) == set()


def test_every_documented_metric_exists():
    logged = {name for path in RECORDINGS for row in logged_rows(path) for name in row}
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = {name for name in documented() - logged if not re.search(r"[A-Z]{2,}", name)}
    assert [name for name in sorted(names) if f'"{name.removeprefix("eval_")}"' not in source] == []


def test_an_undocumented_metric_is_found():
    assert is_documented("exact_match_known")
    assert is_documented("eval_dpo.reward_margin")
    assert not is_documented("eval_unknown")
    assert not is_documented("dpo.unknown")
