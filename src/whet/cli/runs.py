"""whet runs: which runs there are."""

import typer


def command(
    directory: str = typer.Argument("runs", metavar="DIR", help="Where runs are kept (run.dir)."),
) -> None:
    """List the runs in DIR, the newest first: status, last step, best or last metric, size and age."""
    import time
    from pathlib import Path

    from whet.cli.console import say
    from whet.reporting.run.run_list import list_runs, runs_text

    runs = list_runs(Path(directory))
    say(runs_text(runs, time.time()) if runs else f"no runs in {directory}")
