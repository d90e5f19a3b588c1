"""whet runs: list runs."""

import typer


def command(
    directory: str = typer.Argument(
        "runs", metavar="DIR", help="The directory that contains the runs (run.dir)."
    ),
) -> None:
    """List runs, newest first.

    Shows status, last step, best or last metric, size and age. The runs of sweeps in DIR are listed as
    SWEEP/RUN.
    """
    import time
    from pathlib import Path

    from whet.cli.console import print_line
    from whet.reporting.run.run_list import list_runs, runs_text

    runs = list_runs(Path(directory))
    print_line(runs_text(runs, time.time()) if runs else f"no runs in {directory}")
