"""The results of the muP checks as text tables, JSON files and plots."""

import importlib.util
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.reporting.formatting import to_json_number
from whet.storage import replace_bytes, replace_text
from whet.studies.coordinate_check import FLAT, CoordinateCheck
from whet.studies.lr_transfer import LrTransfer
from whet.studies.mup_widths import PARAMETRISATIONS, Parametrisation

log = logging.getLogger("whet")

TITLES: dict[Parametrisation, str] = {"mup": "muP", "standard": "standard"}


def describe_check(check: CoordinateCheck) -> str:
    """Return a table of activation sizes and slopes, and a verdict per parametrization."""
    lines = [f"RMS of activations after {check.steps} steps, {check.seeds} seed{'s' * (check.seeds > 1)}"]
    for parametrisation in PARAMETRISATIONS:
        slopes = check.slopes(parametrisation)
        header = "".join(f"{width:>10}" for width in check.widths)
        lines += ["", f"{TITLES[parametrisation]:<14}{header}{'slope':>10}"]
        for name, sizes in check.sizes[parametrisation].items():
            row = "".join(f"{size:>10.4g}" for size in sizes.last)
            lines.append(f"{name:<14}{row}{slopes[name]:>+10.3f}")
    return "\n".join([*lines, "", *(_verdict(check, each) for each in PARAMETRISATIONS)])


def _verdict(check: CoordinateCheck, parametrisation: Parametrisation) -> str:
    slopes = check.slopes(parametrisation)
    steepest = max(slopes, key=lambda name: abs(slopes[name]))
    flat = "flat" if check.is_flat(parametrisation) else "not flat"
    return f"{TITLES[parametrisation]}: {flat}; steepest slope {slopes[steepest]:+.3f} ({steepest})"


def write_check(check: CoordinateCheck, directory: Path) -> list[Path]:
    """Write coord-check.json, and coord-check.png if matplotlib is installed; return the written paths."""
    results: dict[str, Any] = {  # Any: JSON values
        "what": "root mean square of activations on the first batch, before and after the steps",
        "slope": f"least-squares slope of log size after the steps over log width; flat: all below {FLAT}",
        "steps": check.steps,
        "seeds": check.seeds,
        "widths": check.widths,
        **{
            parametrisation: {
                "flat": check.is_flat(parametrisation),
                "activations": {
                    name: {
                        "slope": to_json_number(slope),
                        "first": check.sizes[parametrisation][name].first,
                        "last": [to_json_number(size) for size in check.sizes[parametrisation][name].last],
                    }
                    for name, slope in check.slopes(parametrisation).items()
                },
            }
            for parametrisation in PARAMETRISATIONS
        },
    }
    path = directory / "coord-check.json"
    replace_text(path, json.dumps(results, indent=2) + "\n")
    return [path, *_plot(directory / "coord-check.png", lambda axes: _draw_check(axes, check))]


def describe_sweep(sweep: LrTransfer) -> str:
    """Return a table of losses by learning rate and width, and the shift of the best learning rate."""
    lines: list[str] = []
    for parametrisation in PARAMETRISATIONS:
        best, widths = sweep.best(parametrisation), sweep.widths(parametrisation)
        lrs = list(sweep.losses(parametrisation, widths[0]))
        lines += [f"{TITLES[parametrisation]:<10}{''.join(f'{lr:>10.3g}' for lr in lrs)}      best"]
        for width in widths:
            losses = sweep.losses(parametrisation, width).values()
            best_lr = f"{best[width]:.3g}" if width in best else "-"
            lines.append(f"{width:<10}{''.join(f'{loss:>10.4f}' for loss in losses)}{best_lr:>10}")
        lines.append("")
    return "\n".join([*lines, *(_describe_shift(sweep, each) for each in PARAMETRISATIONS)])


def _describe_shift(sweep: LrTransfer, parametrisation: Parametrisation) -> str:
    title, best, shift = TITLES[parametrisation], sweep.best(parametrisation), sweep.shift(parametrisation)
    if shift is None:
        widths = f"only width {min(best)} has" if best else "no width has"
        return f"{title}: the shift of the best learning rate is unknown: {widths} one"
    factor = f"a factor of {2**shift:g} from width {min(best)} to {max(best)}"
    return f"{title}: the best learning rate shifts by {factor}"


def plot_sweep(sweep: LrTransfer, directory: Path) -> list[Path]:
    """Write lr-sweep.png if matplotlib is installed; return the written paths."""
    return _plot(directory / "lr-sweep.png", lambda axes: _draw_sweep(axes, sweep))


def _plot(path: Path, draw: Callable[[Any], None]) -> list[Path]:  # Any: matplotlib has no types
    """Write a PNG with one panel per parametrization, and return its path, or nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        log.info("%s was not written: matplotlib is not installed (pip install 'whet[report]')", path.name)
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PARAMETRISATIONS), sharey=True)
    for axes, parametrisation in zip(panels, PARAMETRISATIONS, strict=True):
        axes.set_title(TITLES[parametrisation])
        axes.grid(visible=True, alpha=0.25)
    draw(dict(zip(PARAMETRISATIONS, panels, strict=True)))
    panels[0].legend(fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    replace_bytes(path, png.getvalue())
    return [path]


def _draw_check(panels: dict[Parametrisation, Any], check: CoordinateCheck) -> None:  # Any: matplotlib
    for parametrisation, axes in panels.items():
        for name, sizes in check.sizes[parametrisation].items():
            axes.plot(check.widths, sizes.last, marker="o", markersize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("width")
    panels["mup"].set_ylabel(f"RMS of activations after {check.steps} steps")


def _draw_sweep(panels: dict[Parametrisation, Any], sweep: LrTransfer) -> None:  # Any: matplotlib
    for parametrisation, axes in panels.items():
        best = sweep.best(parametrisation)
        for index, width in enumerate(sweep.widths(parametrisation)):
            curve, color = sweep.losses(parametrisation, width), f"C{index}"
            axes.plot(
                *zip(*curve.items(), strict=True),
                marker="o",
                markersize=3,
                color=color,
                label=f"width {width}",
            )
            if width in best:
                axes.plot([best[width]], [curve[best[width]]], marker="*", markersize=12, color=color)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("learning rate")
    panels["mup"].set_ylabel("training loss")
