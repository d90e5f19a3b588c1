"""whet resume: resume a run."""

import typer

from whet.cli.train import NPROC, QUIET, RESTARTS, draw_missing_plots, launch_processes, run_with_progress


def command(
    run: str = typer.Argument(help="The directory of a run, e.g. runs/demo."),
    nproc: int = typer.Option(1, "--nproc", min=1, help=NPROC),
    max_restarts: int = typer.Option(0, "--max-restarts", min=0, help=RESTARTS),
    quiet: bool = typer.Option(False, "--quiet", "-q", help=QUIET),
) -> None:
    """Resume a run from its newest valid checkpoint.

    The number of processes may have changed.
    """
    if draw_missing_plots(run):  # the run was complete except for its plots
        return
    if nproc > 1:
        launch_processes(nproc, ["resume", run, *(["--quiet"] if quiet else [])], restarts=max_restarts)
    from whet.runs.run import resume

    run_with_progress(lambda callbacks: resume(run, callbacks), quiet=quiet)
