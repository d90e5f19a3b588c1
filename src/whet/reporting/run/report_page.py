"""The report of a run: one HTML file with its settings, curves, metrics, samples and environment."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from whet.config.load_config import load_config
from whet.errors import WhetError
from whet.hardware import chip_by_driver_name
from whet.planning.plan import plan_run
from whet.reporting.charts import (
    CHARTS_STYLE,
    chart_grid,
    figure_element,
    loss_charts,
    other_charts,
    training_charts,
)
from whet.reporting.html_page import html_lines, html_page, html_table, html_text
from whet.reporting.run.probe_charts import probe_section
from whet.reporting.run.router_maps import router_section
from whet.reporting.run.run_facts import facts, headline, planned_gib, reproduce_commands, use_commands
from whet.reporting.run.sample_table import samples_section
from whet.reporting.svg import figure_style, svg
from whet.reporting.text.classifier_text import ERRORS, SCORES, classification_figure
from whet.reporting.text.plan_text import plan_json
from whet.run_directory import CONFIG_FILE, REPORT_PAGE
from whet.runs.metric_series import as_number, metrics_by_name
from whet.runs.run_files import JsonObject, RunFiles, nested_object, read_run
from whet.storage import replace_text

_STYLE = (
    CHARTS_STYLE
    + """
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .7rem;
  margin: .2rem 0 1.2rem; }
.tiles div { border: 1px solid var(--line); border-radius: 8px; padding: .55rem .8rem; break-inside: avoid; }
.tiles b { display: block; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--quiet); font-size: .85rem; }
nav { margin-top: 1.2rem; font-size: .9rem; }
nav a { display: inline-block; margin: 0 1.1rem .2rem 0; color: var(--link); text-decoration: none; }
nav a:hover { text-decoration: underline; }
.samples td, .samples th { width: 33%; }
@media print { nav { display: none; } }
.status { display: inline-block; padding: .05rem .6rem; border: 1px solid var(--line); border-radius: 1rem;
  font-size: .9rem; margin: .3rem 0 .8rem; }
.status.finished { color: var(--bar); border-color: var(--bar); }
pre { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; margin: .4rem 0;
  padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 6px; }
"""
)


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run to `out` (default: into the run's directory), and return its path."""
    directory = Path(run)
    files = read_run(directory)
    files.plan = files.plan or plan_of(files)
    page = report_page(files)
    path = Path(out) if out is not None else directory / REPORT_PAGE
    replace_text(path, page)
    return path


def report_page(run: RunFiles) -> str:
    """Return the page as HTML; equal run files give equal pages."""
    content = dict(_sections(run))
    sections = [f"<section id='{name}'>{html}</section>" for name, html in content.items()]
    links = "".join(f"<a href='#{name}'>{name}</a>" for name in content)
    status_class = " finished" if run.is_finished else ""
    heading = (
        f"<h1>{html_text(run.name)}</h1><p class='status{status_class}'>{html_text(run.status)}</p>"
        f"{_tiles(run)}{html_table(facts(run))}<nav>{links}</nav>"
    )
    # after the sections, because writing them can add problems
    items = "".join(f"<li>{html_text(problem)}</li>" for problem in run.problems)
    problems = f"<div class='problems'><b>some files of the run could not be read</b><ul>{items}</ul></div>"
    return html_page(
        [heading, *([problems] if items else []), *sections], title=f"{run.name}: report", style=_STYLE
    )


def _sections(run: RunFiles) -> Iterator[tuple[str, str]]:
    metrics = metrics_by_name(run.rows)
    loss, training = loss_charts(metrics), training_charts(metrics, planned_gib=planned_gib(run))
    if loss or training:
        yield "curves", f"<h2>Curves</h2>{''.join(loss)}{chart_grid(training)}{_planned_memory(run)}"
    charts, omitted = other_charts(metrics)
    if charts:
        note = f"<p class='quiet'>{omitted:,} more metrics are in metrics.jsonl</p>" if omitted else ""
        yield "metrics", f"<h2>Metrics</h2>{chart_grid(charts)}{note}"
    if (probes := probe_section(run.rows, metrics)) is not None:
        yield "probes", f"<h2>Probes</h2>{probes}"
    if (routers := router_section(run.rows)) is not None:
        yield "routers", f"<h2>Routers</h2>{routers}"
    if (classification := _classification(run)) is not None:
        yield "classification", f"<h2>Classification</h2>{classification}"
    if run.samples:
        yield "samples", f"<h2>Samples</h2>{samples_section(run.samples)}"
    yield "commands", f"<h2>Commands</h2>{_commands(run)}"
    if run.provenance:
        yield (
            "environment",
            f"<h2>Environment and provenance</h2>{html_table(_provenance_rows(run.provenance))}",
        )
    if run.config_text:
        yield "config", f"<h2>Config</h2><pre>{html_lines(run.config_text.rstrip())}</pre>"


def _tiles(run: RunFiles) -> str:
    tiles = (
        f"<div><b>{html_text(value)}</b><span>{html_text(name)}</span></div>" for name, value in headline(run)
    )
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _planned_memory(run: RunFiles) -> str:
    """Return a table of the plan's memory components, each at its peak."""
    parts = nested_object(run.plan, "bytes")
    rows = [
        (name.replace("_", " "), f"{number / 2**30:,.3g} GiB")
        for name, value in parts.items()
        if (number := as_number(value)) is not None and math.isfinite(number) and number > 0
    ]
    return f"<h3>Planned memory</h3>{html_table(rows)}" if rows else ""


def _classification(run: RunFiles) -> str | None:
    if run.classification is None:
        return None
    try:
        with figure_style():
            figure = classification_figure(run.classification)
            picture = svg(
                figure, name="classification-plots", label="confusion, reliability, ROC and PR curves"
            )
        table = _scores(run.classification)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        # an invalid file must not prevent the rest of the page
        run.problems.append(f"classification.json is not a complete report: {type(error).__name__}: {error}")
        return None
    return table + figure_element("classification-plots", picture, "")


def _scores(report: JsonObject) -> str:
    """Return tables of the scores next to those of the baselines, and of the other metrics."""
    baselines: dict[str, JsonObject] = {"this model": report, **report["baselines"]}
    compared = [name for name in SCORES if any(name in scores for scores in report["baselines"].values())]
    head = "".join(f"<th>{html_text(name.replace('_', ' '))}</th>" for name in compared)
    lines = "".join(
        f"<tr><th>{html_text(name)}</th>"
        + "".join(f"<td>{html_text(_score(scores.get(key)))}</td>" for key in compared)
        + "</tr>"
        for name, scores in baselines.items()
    )
    rows = [("texts", f"{report['examples']:,} ({report.get('split') or 'given records'})")]
    for name, (low, high) in report.get("intervals", {}).items():
        rows.append((f"{name.replace('_', ' ')}, 95% confidence interval", f"{low:.3f} to {high:.3f}"))
    rows += [
        (name.replace("_", " "), _score(report[name]))
        for name in (*SCORES, *ERRORS, "roc_auc_macro", "pr_auc_macro")
        if report.get(name) is not None and name not in compared
    ]
    table = f"<table class='grid'><tr><th></th>{head}</tr>{lines}</table>"
    return f"<div class='scroll'>{table}</div>{html_table(rows)}"


def _score(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _commands(run: RunFiles) -> str:
    reproduce = "\n".join(reproduce_commands(run))
    use = "\n".join(use_commands(run))
    heading = "Use the model" if run.is_finished else "Resume"
    return (
        f"<h3>Reproduce</h3><pre>{html_lines(reproduce)}</pre><h3>{heading}</h3><pre>{html_lines(use)}</pre>"
    )


def _provenance_rows(provenance: JsonObject) -> Iterator[tuple[str, str]]:
    for part in ("machine", "versions"):
        yield from ((name, str(value)) for name, value in nested_object(provenance, part).items())
    titles = {"git_commit": "git commit", "base": "base model weights, SHA-256"}
    hashed = {"data_sha256": "data", "tokens_sha256": "tokens"}
    for name, value in provenance.items():
        if name in hashed:
            for split, digest in nested_object(provenance, name).items():
                yield f"{hashed[name]}.{split}, SHA-256", str(digest)
        elif name not in ("machine", "versions"):
            text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
            yield titles.get(name, name), text


def plan_of(run: RunFiles) -> JsonObject:
    """Plan the run's config for the device it ran on; empty if it cannot be planned.

    Only the device is read from the run, none of its measurements.
    """
    kind, _, name = str(nested_object(run.provenance, "machine").get("device", "")).partition(": ")
    chip = chip_by_driver_name(name) if kind == "cuda" else None
    if chip is None and kind != "cpu":
        return {}
    device = "cpu" if chip is None else chip.name
    try:
        config = load_config(run.directory / CONFIG_FILE)
        return plan_json(plan_run(config, device=device, suggest=False, user_code=False))
    except WhetError:  # the model no longer exists, or cannot be planned
        return {}
