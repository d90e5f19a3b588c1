"""whet report: a run as a page."""

import typer


def command(
    run: str = typer.Argument(help="The directory of a run, e.g. runs/demo."),
    out: str | None = typer.Option(None, "--out", help="Write this file instead of RUN/report.html."),
) -> None:
    """Write what RUN was, how it went and what came of it as one HTML file. Nothing in it is fetched."""
    from pathlib import Path

    from whet.cli.console import say, writing_to
    from whet.errors import ConfigError
    from whet.reporting.run.report_page import write_report

    if out is not None and Path(out).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"--out {out} does not end in .html", hint="the report is a page, and replaces what is there"
        )
    with writing_to(out, "--out"):
        written = write_report(run, out)
    say(str(written))
