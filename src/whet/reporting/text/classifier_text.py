"""The report of a classifier as a text table and as plots."""

from pathlib import Path
from typing import Any

from whet.data.inspect.token_text import to_visible_text
from whet.errors import ConfigError
from whet.evaluation.classifier_metrics import Report
from whet.reporting.svg import figure_style
from whet.run_directory import CLASSIFICATION_FILE
from whet.storage import create_file_atomically, read_json

SCORES = ("accuracy", "balanced_accuracy", "f1_macro", "f1_micro", "f1_weighted", "kappa", "mcc")
ERRORS = ("log_loss", "brier", "ece", "hamming")
MAX_TEXT_LENGTH = 70
DPI = 120
_MAX_COUNTED, _MAX_NAMED = 20, 12  # classes with readable counts in the matrix, and curve names in the legend


def read_report(run: str | Path) -> Report:
    """Return the classification report of a finished run."""
    path = Path(run) / CLASSIFICATION_FILE
    if not path.is_file():
        raise ConfigError(
            f"{run} has no {CLASSIFICATION_FILE}", hint="compute a report with: whet eval RUN --data DATA"
        )
    return read_json(path)


def classification_text(report: Report) -> str:
    """Return scores with confidence intervals, per-class scores, baselines and the most confused classes."""
    lines = [f"{report['examples']:,} texts" + (f" ({report['split']})" if report.get("split") else "")]
    for name in (*SCORES, "roc_auc_macro", "pr_auc_macro", *ERRORS):
        if report.get(name) is not None:
            interval = report["intervals"].get(name)
            interval_text = f"  (95% CI {interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
            lines.append(f"  {name.replace('_', ' '):18}{report[name]:7.3f}{interval_text}")
    width = max(5, *map(len, report["classes"]))
    lines.append(f"\n  {'class':{width}}  precision  recall     f1  texts")
    for name, metrics in report["per_class"].items():
        scores = f"{metrics['precision']:9.3f}  {metrics['recall']:6.3f}  {metrics['f1']:5.3f}"
        lines.append(f"  {name:{width}}  {scores}  {metrics['support']:5}")
    if "confusion" in report:
        lines += ["", *_confusion_lines(report, width)]
    lines += ["", "  baseline" + " " * 10 + "accuracy  f1 macro"]
    for name, scores in report["baselines"].items():
        lines.append(f"  {name:16}  {scores['accuracy']:8.3f}  {scores['f1_macro']:8.3f}")
    for pair in report.get("confused", [])[:3]:
        lines.append(
            f"\n  {pair['label']} predicted as {pair['predicted']}, {pair['count']} times, for example"
        )
        lines += [f"    {_truncate(each['text'])}" for each in pair["examples"] if "text" in each]
    speed = report["throughput"]
    lines.append(f"\n  {speed['examples_per_s']:,.0f} texts/s, {speed['tokens_per_s']:,.0f} tokens/s")
    return "\n".join(lines)


def _confusion_lines(report: Report, width: int) -> list[str]:
    """Return the confusion matrix, one row per true class."""
    names, counts = report["classes"], report["confusion"]
    column = max(len(str(count)) for row in counts for count in row) + 2
    numbers = "".join(f"{number:{column}}" for number in range(len(names)))
    rows = ["".join(f"{count:{column}}" for count in row) for row in counts]
    shown = [
        f"  {number} {name:{width}}{row}" for number, (name, row) in enumerate(zip(names, rows, strict=True))
    ]
    return [f"  {'predicted':{width + 2}}{numbers}", *shown]


def _truncate(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= MAX_TEXT_LENGTH else f"{line[:MAX_TEXT_LENGTH]}..."


def write_classifier_plots(report: Report, path: Path) -> Path:
    """Write the plots as one PNG, replacing an existing file, and return its path."""
    with figure_style():
        figure = classification_figure(report)
        path.unlink(missing_ok=True)
        with create_file_atomically(path) as staging:
            figure.savefig(staging, dpi=DPI, format="png")
    return path


def classification_figure(report: Report) -> Any:  # Any: matplotlib has no types, here and below
    """Return the confusion matrix, reliability diagram, ROC and PR curves; call it inside `figure_style`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    grid = figure.subplots(2, 2)
    _draw_matrix(grid[0][0], report)
    _draw_reliability(grid[0][1], report)
    _draw_curves(grid[1][0], report, "roc", ("false positive rate", "true positive rate"))
    _draw_curves(grid[1][1], report, "pr", ("recall", "precision"))
    return figure


def _draw_matrix(axes: Any, report: Report) -> None:
    names = [to_visible_text(name) for name in report["classes"]]
    if report["multi_label"]:
        axes.barh(names, [report["per_class"][name]["f1"] for name in report["classes"]])
        axes.set(title="F1 per class", xlim=(0, 1))
        return
    counts = report["confusion"]
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, line in enumerate(counts if len(names) <= _MAX_COUNTED else []):
        for column, count in enumerate(line):
            is_dark = shares[row][column] > 0.5
            axes.text(column, row, count, ha="center", va="center", color="white" if is_dark else "black")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(title="Confusion matrix", xlabel="predicted class", ylabel="true class")


def _draw_reliability(axes: Any, report: Report) -> None:
    bins = report["reliability"]
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    axes.plot([b["confidence"] for b in bins], [b["accuracy"] for b in bins], marker="o")
    axes.set(
        title=f"Reliability (ECE {report['ece']:.3f})",
        xlabel="confidence",
        ylabel="accuracy",
        xlim=(0, 1),
        ylim=(0, 1),
    )


def _draw_curves(axes: Any, report: Report, kind: str, labels: tuple[str, str]) -> None:
    for name, curves in report["curves"].items():
        if kind in curves:
            area = report["per_class"][name][f"{kind}_auc"]
            axes.plot(*curves[kind], label=to_visible_text(f"{name} ({area:.3f})"))
    axes.set(title=kind.upper(), xlabel=labels[0], ylabel=labels[1], xlim=(0, 1), ylim=(0, 1.02))
    if 0 < sum(kind in curves for curves in report["curves"].values()) <= _MAX_NAMED:
        axes.legend(fontsize=8)
