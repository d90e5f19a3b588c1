"""whet ledger: the SQLite ledgers of the quality task."""

import typer

app = typer.Typer(no_args_is_help=True, help="Create and check ledgers of the quality task.")


@app.command("create")
def create(
    directory: str = typer.Argument(help="Where to write the two files; existing files are not overwritten."),
    rows: int = typer.Option(512, min=10, max=10**6, help="Number of decisions."),
) -> None:
    """Write two ledgers of synthetic decisions and outcomes."""
    from pathlib import Path

    from whet.cli.console import print_line
    from whet.recipes.quality.ledgers import check_ledgers, create_ledgers

    create_ledgers(Path(directory), rows)
    print_line(f"{directory}: {check_ledgers(Path(directory)).summary()}")


@app.command("check")
def check(directory: str = typer.Argument(help="A directory with both ledgers.")) -> None:
    """Validate every row. Exit with code 2 at the first invalid one."""
    from pathlib import Path

    from whet.cli.console import print_line
    from whet.recipes.quality.ledgers import check_ledgers

    print_line(f"{directory}: {check_ledgers(Path(directory)).summary()}")
