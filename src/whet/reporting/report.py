"""The report of a run: one HTML file that says what was trained on what, how it went and what came of it."""

import json
from collections.abc import Iterator
from pathlib import Path

from whet.reporting.classification import ERRORS, SCORES, classification_figure
from whet.reporting.curves import (
    CHARTS_STYLE,
    chart_grid,
    figure_element,
    loss_charts,
    other_charts,
    training_charts,
)
from whet.reporting.page import html_lines, html_page, html_table, html_text
from whet.reporting.report_facts import facts, number_or_text, reproduce_commands, use_commands
from whet.reporting.router_maps import router_section
from whet.reporting.run_files import RunFiles, Values, read_run, section
from whet.reporting.series import metrics_of
from whet.reporting.svg import drawing, svg
from whet.storage import replace_text

_SAMPLES_SHOWN = 6  # of the first step that has some, and of the last
_LONGEST_TEXT = 2000

_STYLE = (
    CHARTS_STYLE
    + """
.status { display: inline-block; padding: .05rem .6rem; border: 1px solid var(--line); border-radius: 1rem;
  font-size: .9rem; margin: .3rem 0 .8rem; }
pre { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; margin: .4rem 0;
  padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 6px; }
"""
)


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, into the run where `out` does not say otherwise; returns where it is."""
    directory = Path(run)
    page = report_page(read_run(directory))
    path = Path(out) if out is not None else directory / "report.html"
    replace_text(path, page)
    return path


def report_page(run: RunFiles) -> str:
    """The whole page; the same for the same files."""
    sections = [f"<section id='{name}'>{html}</section>" for name, html in _sections(run)]
    heading = (
        f"<h1>{html_text(run.name)}</h1><p class='status'>{html_text(run.status)}</p>{html_table(facts(run))}"
    )
    # known only when all sections are written
    listed = "".join(f"<li>{html_text(problem)}</li>" for problem in run.problems)
    problems = f"<div class='problems'><b>not all of it could be read</b><ul>{listed}</ul></div>"
    return html_page(
        [heading, *([problems] if listed else []), *sections], title=f"{run.name}: report", style=_STYLE
    )


def _sections(run: RunFiles) -> Iterator[tuple[str, str]]:
    metrics = metrics_of(run.rows)
    loss, training = loss_charts(metrics), training_charts(metrics)
    if loss or training:
        yield "curves", f"<h2>Curves</h2>{''.join(loss)}{chart_grid(training)}"
    own, more = other_charts(metrics)
    if own:
        said = f"<p class='quiet'>{more:,} more metrics are in metrics.jsonl</p>" if more else ""
        yield "metrics", f"<h2>Metrics</h2>{chart_grid(own)}{said}"
    if (routers := router_section(run.rows)) is not None:
        yield "routers", f"<h2>Routers</h2>{routers}"
    if (classified := _classification(run)) is not None:
        yield "classification", f"<h2>Classification</h2>{classified}"
    if run.samples:
        yield "samples", f"<h2>Samples</h2>{_samples(run.samples)}"
    yield "commands", f"<h2>Commands</h2>{_commands(run)}"
    if run.provenance:
        yield "environment", f"<h2>Environment and origins</h2>{html_table(_origins(run.provenance))}"
    if run.config_text:
        yield "config", f"<h2>Config</h2><pre>{html_lines(run.config_text.rstrip())}</pre>"


def _classification(run: RunFiles) -> str | None:
    if run.classification is None:
        return None
    try:
        with drawing():
            figure = classification_figure(run.classification)
            picture = svg(
                figure, name="classification-plots", label="confusion, reliability, ROC and PR curves"
            )
        table = _scores(run.classification)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        # somebody else's file, or half of one: the rest of the page does not depend on it
        run.problems.append(f"classification.json is not a whole report: {type(error).__name__}: {error}")
        return None
    return table + figure_element("classification-plots", picture, "")


def _scores(report: Values) -> str:
    """The classifier beside the baselines, and what else is known of it."""
    baselines: dict[str, Values] = {"this model": report, **report["baselines"]}
    known = [name for name in SCORES if any(name in scores for scores in report["baselines"].values())]
    head = "".join(f"<th>{html_text(name.replace('_', ' '))}</th>" for name in known)
    lines = "".join(
        f"<tr><th>{html_text(name)}</th>"
        + "".join(f"<td>{html_text(_score(scores.get(key)))}</td>" for key in known)
        + "</tr>"
        for name, scores in baselines.items()
    )
    rows = [("texts", f"{report['examples']:,} ({report.get('split') or 'given'})")]
    for name, (low, high) in report.get("intervals", {}).items():
        rows.append((f"{name.replace('_', ' ')}, 95%", f"{low:.3f} to {high:.3f}"))
    rows += [
        (name.replace("_", " "), _score(report[name]))
        for name in (*SCORES, *ERRORS, "roc_auc_macro", "pr_auc_macro")
        if report.get(name) is not None and name not in known
    ]
    return f"<table class='grid'><tr><th></th>{head}</tr>{lines}</table>{html_table(rows)}"


def _score(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _samples(samples: list[Values]) -> str:
    """What was said at first, and what at last."""
    by_step: dict[str, list[Values]] = {}
    for sample in samples:
        by_step.setdefault(number_or_text(sample.get("step")), []).append(sample)
    steps = list(by_step)
    chosen = steps[:1] + steps[1:][-1:]
    tables = []
    for step in chosen:
        rows = "".join(map(_sample, by_step[step][:_SAMPLES_SHOWN]))
        tables.append(
            f"<h3>step {html_text(step)}</h3><table class='grid'><tr><th>prompt</th><th>completion</th>"
            f"<th>reward</th></tr>{rows}</table>"
        )
    shown = sum(min(len(by_step[step]), _SAMPLES_SHOWN) for step in chosen)
    return "".join(tables) + f"<p class='quiet'>{shown} of {len(samples):,}; all are in samples.jsonl</p>"


def _sample(sample: Values) -> str:
    rewards = ", ".join(
        f"{name} {number_or_text(value)}" for name, value in section(sample, "rewards").items()
    )
    reward = number_or_text(sample.get("reward")) + (f" ({rewards})" if rewards else "")
    cells = (_cut(sample.get("prompt")), _cut(sample.get("completion")), reward)
    return f"<tr>{''.join(f'<td>{html_lines(cell)}</td>' for cell in cells)}</tr>"


def _cut(text: object) -> str:
    if not isinstance(text, str):
        return "-"
    more = len(text) - _LONGEST_TEXT
    return f"{text[:_LONGEST_TEXT]}… {more:,} more characters" if more > 0 else text


def _commands(run: RunFiles) -> str:
    again = "\n".join(reproduce_commands(run))
    use = "\n".join(use_commands(run))
    heading = "To use it" if run.finished else "To go on"
    return (
        f"<h3>To repeat it</h3><pre>{html_lines(again)}</pre><h3>{heading}</h3><pre>{html_lines(use)}</pre>"
    )


def _origins(provenance: Values) -> Iterator[tuple[str, str]]:
    for name, version in section(provenance, "versions").items():
        yield name, str(version)
    titles = {"git_commit": "git commit", "base": "weights of the base, SHA-256"}
    for name, value in provenance.items():
        if name == "data_sha256":
            for split, digest in section(provenance, name).items():
                yield f"data.{split}, SHA-256", str(digest)
        elif name != "versions":
            text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
            yield titles.get(name, name), text
