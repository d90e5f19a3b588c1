"""whet resume: go on with a run."""

import typer

from whet.cli.train import follow


def command(run: str = typer.Argument(help="The directory of a run, e.g. runs/demo.")) -> None:
    """Go on from the newest valid checkpoint of RUN."""
    from whet.training.run import resume

    follow(lambda callbacks: resume(run, callbacks))
