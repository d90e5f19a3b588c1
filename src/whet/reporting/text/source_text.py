"""Metrics of a model on several sources as a text table, and pass@k as text."""

from collections.abc import Mapping
from typing import Any

from whet.reporting.formatting import align_columns

_LABELS = {
    "supervised_tokens": "tokens",
    "eval_loss": "loss",
    "eval_perplexity": "perplexity",
    "eval_bits_per_byte": "bits per byte",
}


def sources_text(metrics: Mapping[str, Any]) -> str:  # Any: numbers, and the metrics of each source
    """Return a table with one line per source and one for all of them together."""
    sources: Mapping[str, Mapping[str, float]] = metrics["sources"]
    tokens = sum(each["supervised_tokens"] for each in sources.values())
    rows = {**sources, "total": {**metrics, "supervised_tokens": tokens}}
    names = [name for name in _LABELS if any(name in row for row in rows.values())]
    names += [
        name
        for row in rows.values()
        for name in row
        if name not in (*_LABELS, "sources", "eval_s") and name not in names
    ]
    names = list(dict.fromkeys(names))
    head = ["source", *(_LABELS.get(name, name.replace("_", " ")) for name in names)]
    lines = [[source, *(_cell(name, row.get(name)) for name in names)] for source, row in rows.items()]
    return align_columns([head, *lines])


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if name == "supervised_tokens" else f"{value:.4f}"


def pass_at_k_text(metrics: Mapping[str, Any]) -> str:  # Any: numbers, and a count of each failure
    """Return pass@k with standard errors, and why programs failed, on two lines."""
    names = [name for name in metrics if name.startswith("pass@") and not name.endswith("_stderr")]
    scores = []
    for name in names:
        stderr = metrics.get(f"{name}_stderr")
        scores.append(f"{name} {metrics[name]:.4f}" + ("" if stderr is None else f" ± {stderr:.4f}"))
    programs = metrics["problems"] * metrics["samples"]
    line = f"{'  '.join(scores)}  ({metrics['problems']:,} problems, {metrics['samples']:,} programs each)"
    failures = ", ".join(f"{reason} {count:,}" for reason, count in metrics["failures"].items())
    failed = sum(metrics["failures"].values())
    return f"{line}\n{failed:,} of {programs:,} programs failed: {failures}" if failed else line
