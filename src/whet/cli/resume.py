"""whet resume: resume a run."""

import typer

from whet.cli.train import NPROC, QUIET, RESTARTS, draw_missing_plots, follow, in_processes


def command(
    run: str = typer.Argument(help="The directory of a run, e.g. runs/demo."),
    nproc: int = typer.Option(1, "--nproc", min=1, help=NPROC),
    max_restarts: int = typer.Option(0, "--max-restarts", min=0, help=RESTARTS),
    quiet: bool = typer.Option(False, "--quiet", "-q", help=QUIET),
) -> None:
    """Resume RUN from its newest valid checkpoint.

    The number of processes may differ from before.
    """
    if draw_missing_plots(run):  # all that was left to do
        return
    if nproc > 1:
        in_processes(nproc, ["resume", run, *(["--quiet"] if quiet else [])], restarts=max_restarts)
    from whet.runs.run import resume

    follow(lambda callbacks: resume(run, callbacks), quiet=quiet)
