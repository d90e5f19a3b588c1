"""whet sweep: many runs of one config."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path


def command(
    config: str = typer.Argument(help="A YAML file; docs/config.md lists every key."),
    settings: list[str] = typer.Argument(  # noqa: B008
        None,
        help="section.key=a,b,c: what is tried; section.key=low..high: a range to draw from; "
        "section.key=value: for every run.",
    ),
    seeds: int = typer.Option(1, min=1, max=1000, help="Runs of each setting: run.seed, run.seed + 1, ..."),
    random: int | None = typer.Option(
        None, "--random", min=1, help="Draw this many settings instead of trying every combination."
    ),
    metric: str | None = typer.Option(
        None, "--metric", help="Judge by this; else by what the runs call their best."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check and list the runs; start none."),
) -> None:
    """Run every combination of some values (or random ones), and compare them; the same command goes on."""
    from whet.cli.console import say, set_up_logging
    from whet.reporting.console import notes
    from whet.reporting.progress import RunProgress
    from whet.studies.sweep import plan_sweep, run_sweep

    sweep = plan_sweep(config, settings or [], seeds=seeds, draws=random)
    if dry_run:
        for run in sweep.runs:
            say(str(sweep.directory / run.name))
        return
    set_up_logging()
    progress = RunProgress(notes())
    states = []
    try:
        for state in run_sweep(sweep, lambda: [progress]):
            progress.close()  # also where the run could not
            states.append(state)
    except KeyboardInterrupt as interrupted:
        progress.close()
        notes().print(f"{interrupted or 'interrupted'}; the same command goes on", highlight=False)
        raise typer.Exit(3) from interrupted
    if states[-1].status == "stopped":
        notes().print("stopped; the same command goes on", highlight=False)
        raise typer.Exit(3)
    failed = [state for state in states if state.status == "failed"]
    for state in failed:
        notes().print(f"failed: {sweep.directory / state.name}: {state.error}", highlight=False)
    if failed:
        notes().print("the same command tries again what failed", highlight=False)
    _summarise([sweep.directory / state.name for state in states if state.status == "finished"], metric)
    if failed:
        raise typer.Exit(1)


def _summarise(runs: "list[Path]", metric: str | None) -> None:
    """What `whet compare` says of them, and its page beside them where it can be drawn."""
    from whet.cli.console import say
    from whet.errors import ConfigError
    from whet.reporting.compare.compare_page import write_comparison
    from whet.reporting.compare.compare_text import comparison_text
    from whet.studies.compare_runs import compare_runs

    if len(runs) < 2:
        return
    found = compare_runs(runs, metric=metric)
    say(comparison_text(found))
    try:
        say(f"written: {write_comparison(found, runs[0].parent / 'compare.html')}")
    except ConfigError as error:
        say(f"no page: {error.message} ({error.hint})")
