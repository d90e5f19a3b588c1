"""whet ledger: the SQLite ledgers of the quality task."""

import typer

app = typer.Typer(no_args_is_help=True, help="Make and check the SQLite ledgers of the quality task.")


@app.command("create")
def create(
    directory: str = typer.Argument(help="Where the two files go; what is there already stays."),
    rows: int = typer.Option(512, min=10, max=10**6, help="How many decisions."),
) -> None:
    """Write two valid ledgers of generated decisions and outcomes into DIRECTORY."""
    from pathlib import Path

    from whet.cli.console import say
    from whet.recipes.quality.ledgers import check_ledgers, create_ledgers

    create_ledgers(Path(directory), rows)
    say(f"{directory}: {check_ledgers(Path(directory)).summary()}")


@app.command("check")
def check(directory: str = typer.Argument(help="A directory with both files.")) -> None:
    """Read every row of the ledgers in DIRECTORY; exit 2 at the first that is wrong."""
    from pathlib import Path

    from whet.cli.console import say
    from whet.recipes.quality.ledgers import check_ledgers

    say(f"{directory}: {check_ledgers(Path(directory)).summary()}")
