"""whet sweep: train many variants of one config."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path


def command(
    config: str = typer.Argument(help="A YAML config; docs/config.md lists every key."),
    settings: list[str] = typer.Argument(  # noqa: B008
        None,
        help="section.key=a,b,c: values to try; section.key=low..high: a range to sample from; "
        "section.key=value: an override for every run.",
    ),
    seeds: int = typer.Option(1, min=1, max=1000, help="Runs per setting, with run.seed, run.seed + 1, ..."),
    random: int | None = typer.Option(
        None, "--random", min=1, help="Sample this many settings instead of trying every combination."
    ),
    metric: str | None = typer.Option(
        None, "--metric", help="The metric to rank by; default: the metric that selects the best checkpoint."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check and list the runs without starting them."),
) -> None:
    """Train a grid or random sample of settings.

    The finished runs are compared. Rerun the same command to resume an interrupted sweep.
    """
    from whet.cli.console import print_line, set_up_logging
    from whet.reporting.console import stderr_console
    from whet.reporting.progress import RunProgress
    from whet.studies.sweep import plan_sweep, run_sweep

    sweep = plan_sweep(config, settings or [], seeds=seeds, draws=random)
    if dry_run:
        for run in sweep.runs:
            print_line(str(sweep.directory / run.name))
        return
    set_up_logging()
    progress = RunProgress(stderr_console())
    states = []
    try:
        for state in run_sweep(sweep, lambda: [progress]):
            progress.close()  # the run itself may not have closed it
            states.append(state)
    except KeyboardInterrupt as interrupted:
        progress.close()
        stderr_console().print(
            f"{str(interrupted) or 'interrupted'}; rerun the same command to resume", highlight=False
        )
        raise typer.Exit(3) from interrupted
    if states[-1].status == "stopped":
        stderr_console().print("stopped; rerun the same command to resume", highlight=False)
        raise typer.Exit(3)
    failed = [state for state in states if state.status == "failed"]
    for state in failed:
        stderr_console().print(f"failed: {sweep.directory / state.name}: {state.error}", highlight=False)
    if failed:
        stderr_console().print("rerun the same command to retry the failed runs", highlight=False)
    _print_comparison(
        [sweep.directory / state.name for state in states if state.status == "finished"], metric
    )
    if failed:
        raise typer.Exit(1)


def _print_comparison(runs: "list[Path]", metric: str | None) -> None:
    """Print the comparison of the finished runs, and write compare.html if matplotlib is installed."""
    from whet.cli.console import print_line
    from whet.errors import ConfigError
    from whet.reporting.compare.compare_page import write_comparison
    from whet.reporting.compare.compare_text import comparison_text
    from whet.studies.compare_runs import compare_runs

    if len(runs) < 2:
        return
    comparison = compare_runs(runs, metric=metric)
    print_line(comparison_text(comparison))
    try:
        print_line(f"written: {write_comparison(comparison, runs[0].parent / 'compare.html')}")
    except ConfigError as error:
        print_line(f"compare.html was not written: {error.message} ({error.hint})")
