"""The results of an ablation: a text table with significance tests, a JSON file and a plot."""

import dataclasses
import importlib.util
import io
import json
import logging
from pathlib import Path

from whet.reporting.formatting import to_json_number
from whet.storage import replace_bytes, replace_text
from whet.studies.ablation import METRIC, Ablation
from whet.studies.statistics import Comparison, compare, deviation, mean

log = logging.getLogger("whet")


def describe_ablation(ablation: Ablation) -> str:
    """Return a table of the arms, a table of the pairwise comparisons, and their verdicts."""
    values = ablation.values()
    seeds = len(next(iter(values.values())))
    lines = [f"{METRIC} after {ablation.steps} steps, {seeds} seeds" if ablation.steps else METRIC]
    lines.append(f"{'arm':<12}  {'parameters':>12}  {'mean':>10}  {'std':>10}")
    for arm, scores in values.items():
        lines.append(
            f"{arm:<12}  {ablation.parameters[arm]:>12,}  {mean(scores):>10.6f}  {deviation(scores):>10.6f}"
        )
    lines.append("")
    lines.append(f"{'pair':<26}  {'difference':>11}  {'Cohen d_z':>10}  {'t':>8}  {'p':>8}  {'p (Holm)':>8}")
    comparisons = compare(values)
    lines += [
        f"{each.first + ' - ' + each.second:<26}  {each.difference:>+11.6f}  {each.effect_size:>+10.3f}  "
        f"{each.t:>+8.3f}  {each.p:>8.4f}  {each.p_adjusted:>8.4f}"
        for each in comparisons
    ]
    return "\n".join([*lines, "", *(verdict(each) for each in comparisons)])


def verdict(comparison: Comparison) -> str:
    """Return the result of a comparison as a sentence."""
    first, second, p = comparison.first, comparison.second, comparison.p_adjusted
    if not comparison.differs():
        return f"{first} and {second} do not differ significantly (paired t-test, p = {p:.3g} after Holm)"
    better, worse = (first, second) if comparison.difference < 0 else (second, first)
    return f"{better} is significantly better than {worse} (paired t-test, p = {p:.3g} after Holm)"


def write_ablation(ablation: Ablation, directory: Path) -> list[Path]:
    """Write ablation.json, and ablation.png if matplotlib is installed; return the written paths."""
    values = ablation.values()
    results = {
        "metric": METRIC,
        "steps": ablation.steps,
        "effect_size": "Cohen's d_z: mean paired difference / its standard deviation",
        "test": "paired t-test, two-sided; p_adjusted by Holm; arms differ if it is below 0.05",
        "arms": {
            arm: {
                "parameters": ablation.parameters[arm],
                "mean": mean(series),
                "std": deviation(series),
                "values": series,
            }
            for arm, series in values.items()
        },
        "comparisons": [
            {**{k: to_json_number(v) for k, v in dataclasses.asdict(each).items()}, "verdict": verdict(each)}
            for each in compare(values)
        ],
        "runs": [dataclasses.asdict(run) for run in ablation.runs],
    }
    path = directory / "ablation.json"
    replace_text(path, json.dumps(results, indent=2) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        log.info("ablation.png was not written: matplotlib is not installed (pip install 'whet[report]')")
        return [path]
    plot = directory / "ablation.png"
    replace_bytes(plot, _plot(values))
    return [path, plot]


def _plot(values: dict[str, list[float]]) -> bytes:
    """Return a PNG with one line per seed over the arms (the pairs of the test) and the mean of each arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    arms = list(values)
    for series in zip(*values.values(), strict=True):
        axes.plot(arms, series, color="0.7", marker="o", markersize=4, linewidth=1)
    means = [mean(series) for series in values.values()]
    deviations = [deviation(series) for series in values.values()]
    axes.errorbar(arms, means, yerr=deviations, color="C0", marker="s", linestyle="none", capsize=6)
    axes.set_ylabel(METRIC)
    axes.set_title("mean and standard deviation; each gray line is a seed")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()
