"""The report of a classifier for people: a table on the terminal, and plots."""

from pathlib import Path
from typing import Any

from whet.data.inspect.token_text import visible
from whet.errors import ConfigError
from whet.evaluation.classifier_metrics import Report
from whet.reporting.svg import drawing
from whet.run_directory import CLASSIFICATION_FILE
from whet.storage import new_file, read_json

SCORES = ("accuracy", "balanced_accuracy", "f1_macro", "f1_micro", "f1_weighted", "kappa", "mcc")
ERRORS = ("log_loss", "brier", "ece", "hamming")
LONGEST_TEXT = 70
DPI = 120
_COUNTED, _NAMED = 20, 12  # the most classes whose counts, and whose curves' names, can still be read


def read_report(run: str | Path) -> Report:
    """The report that a finished run left."""
    path = Path(run) / CLASSIFICATION_FILE
    if not path.is_file():
        raise ConfigError(f"{run} has no {CLASSIFICATION_FILE}", hint="whet eval RUN --data D makes one")
    return read_json(path)


def classification_text(report: Report) -> str:
    """Scores with their intervals, each class, the baselines, and what is confused most."""
    lines = [f"{report['examples']:,} texts" + (f" ({report['split']})" if report.get("split") else "")]
    for name in (*SCORES, "roc_auc_macro", "pr_auc_macro", *ERRORS):
        if report.get(name) is not None:
            between = report["intervals"].get(name)
            wide = f"  ({between[0]:.3f} to {between[1]:.3f})" if between else ""
            lines.append(f"  {name.replace('_', ' '):18}{report[name]:7.3f}{wide}")
    width = max(5, *map(len, report["classes"]))
    lines.append(f"\n  {'class':{width}}  precision  recall     f1  texts")
    for name, each in report["per_class"].items():
        scores = f"{each['precision']:9.3f}  {each['recall']:6.3f}  {each['f1']:5.3f}"
        lines.append(f"  {name:{width}}  {scores}  {each['support']:5}")
    if "confusion" in report:
        lines += ["", *_confusion_lines(report, width)]
    lines += ["", "  beside it" + " " * 9 + "accuracy  f1 macro"]
    for name, scores in report["baselines"].items():
        lines.append(f"  {name:16}  {scores['accuracy']:8.3f}  {scores['f1_macro']:8.3f}")
    for pair in report.get("confused", [])[:3]:
        lines.append(f"\n  {pair['label']} taken for {pair['predicted']}, {pair['count']} times, such as")
        lines += [f"    {_short(each['text'])}" for each in pair["examples"] if "text" in each]
    speed = report["throughput"]
    lines.append(f"\n  {speed['examples_per_s']:,.0f} texts and {speed['tokens_per_s']:,.0f} tokens a second")
    return "\n".join(lines)


def _confusion_lines(report: Report, width: int) -> list[str]:
    """A row for each class: how many of its texts were taken for each."""
    names, counts = report["classes"], report["confusion"]
    wide = max(len(str(count)) for row in counts for count in row) + 2
    numbers = "".join(f"{number:{wide}}" for number in range(len(names)))
    rows = ["".join(f"{count:{wide}}" for count in row) for row in counts]
    shown = [
        f"  {number} {name:{width}}{row}" for number, (name, row) in enumerate(zip(names, rows, strict=True))
    ]
    return [f"  {'taken for':{width + 2}}{numbers}", *shown]


def _short(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}..."


def draw(report: Report, path: Path) -> Path:
    """The plots as one picture; an older one is replaced."""
    with drawing():
        figure = classification_figure(report)
        path.unlink(missing_ok=True)
        with new_file(path) as staging:
            figure.savefig(staging, dpi=DPI, format="png")
    return path


def classification_figure(report: Report) -> Any:  # Any: matplotlib has no types, here and below
    """Confusion matrix, reliability diagram and both curves; to be called inside `drawing`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    grid = figure.subplots(2, 2)
    _draw_matrix(grid[0][0], report)
    _draw_reliability(grid[0][1], report)
    _draw_curves(grid[1][0], report, "roc", ("false positives", "true positives"))
    _draw_curves(grid[1][1], report, "pr", ("recall", "precision"))
    return figure


def _draw_matrix(axes: Any, report: Report) -> None:
    names = [visible(name) for name in report["classes"]]
    if report["multi_label"]:
        axes.barh(names, [report["per_class"][name]["f1"] for name in report["classes"]])
        axes.set(title="F1 of each class", xlim=(0, 1))
        return
    counts = report["confusion"]
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, line in enumerate(counts if len(names) <= _COUNTED else []):
        for column, count in enumerate(line):
            dark = shares[row][column] > 0.5
            axes.text(column, row, count, ha="center", va="center", color="white" if dark else "black")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(title="Confusion", xlabel="taken for", ylabel="class")


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
            axes.plot(*curves[kind], label=visible(f"{name} ({area:.3f})"))
    axes.set(title=kind.upper(), xlabel=labels[0], ylabel=labels[1], xlim=(0, 1), ylim=(0, 1.02))
    if 0 < sum(kind in curves for curves in report["curves"].values()) <= _NAMED:
        axes.legend(fontsize=8)
