"""whet compare: runs beside each other."""

import typer


def command(
    runs: list[str] = typer.Argument(  # noqa: B008
        help="Runs, or directories of runs; the first is what others are held against."
    ),
    metric: str | None = typer.Option(
        None, "--metric", help="Judge by this; else by what the runs call their best."
    ),
    html: str | None = typer.Option(
        None, "--html", help="Also write a page with the curves (needs matplotlib)."
    ),
    json_: bool = typer.Option(False, "--json", help="Print everything as JSON instead of tables."),
) -> None:
    """Tabulate what RUNS came to, seeds taken together, and what differs in their configs."""
    import json

    from whet.cli.console import say, writing_to
    from whet.reporting.compare.compare_text import comparison_text
    from whet.studies.compare_runs import as_json, compare_runs

    found = compare_runs(runs, metric=metric)
    if html is not None:
        from whet.reporting.compare.compare_page import write_comparison

        with writing_to(html, "--html"):
            write_comparison(found, html)
    say(json.dumps(as_json(found), indent=2) if json_ else comparison_text(found))
