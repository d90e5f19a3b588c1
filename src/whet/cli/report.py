"""whet report: write a run's report as an HTML page."""

import typer


def command(
    run: str = typer.Argument(help="The directory of a run, e.g. runs/demo."),
    out: str | None = typer.Option(None, "--out", help="Output file; default: RUN/report.html."),
) -> None:
    """Write an HTML report of a run.

    The page has the config, metrics, curves and samples. It is one file that loads nothing from the network.
    """
    from pathlib import Path

    from whet.cli.console import output_option, print_line
    from whet.errors import ConfigError
    from whet.reporting.run.report_page import write_report

    if out is not None and Path(out).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"--out {out} does not end in .html",
            hint="the report is an HTML page, and overwrites an existing file",
        )
    with output_option(out, "--out"):
        written = write_report(run, out)
    print_line(str(written))
