"""whet compare: compare several runs."""

import typer


def command(
    runs: list[str] = typer.Argument(  # noqa: B008
        help="Runs, or directories of runs. The first one is the baseline."
    ),
    metric: str | None = typer.Option(
        None, "--metric", help="The metric to rank by; default: the metric that selects the best checkpoint."
    ),
    html: str | None = typer.Option(
        None, "--html", help="Also write an HTML page with the curves (needs matplotlib)."
    ),
    json_: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    """Compare the metrics and configs of several runs.

    Runs that differ only in their seed form one group.
    """
    import json

    from whet.cli.console import output_option, print_line
    from whet.reporting.compare.compare_text import comparison_text
    from whet.studies.compare_runs import compare_runs, comparison_json

    comparison = compare_runs(runs, metric=metric)
    if html is not None:
        from whet.reporting.compare.compare_page import write_comparison

        with output_option(html, "--html"):
            write_comparison(comparison, html)
    print_line(json.dumps(comparison_json(comparison), indent=2) if json_ else comparison_text(comparison))
