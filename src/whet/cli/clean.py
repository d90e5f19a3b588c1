"""whet data clean: remove duplicates, and records that repeat evaluation sets."""

import json

import typer


def command(
    source: str = typer.Argument(metavar="IN", help="The records: a file, a directory, a glob or hf:NAME."),
    target: str | None = typer.Argument(
        None, metavar="OUT", help="The file to write: .jsonl or .parquet. It must not exist."
    ),
    against: list[str] = typer.Option(  # noqa: B008
        [], "--against", help="An evaluation set whose records must not be in OUT (repeatable)."
    ),
    near: bool = typer.Option(True, help="Remove near duplicates, too."),
    threshold: float = typer.Option(0.8, help="Jaccard similarity from which records are near duplicates."),
    shingle: int = typer.Option(5, min=1, help="Words per shingle, the unit of the Jaccard similarity."),
    ngram: int = typer.Option(
        13, min=1, help="Number of consecutive words shared with an evaluation record that make an overlap."
    ),
    removed: str | None = typer.Option(
        None, "--removed", help="The file that lists the removed records; default: OUT.removed.jsonl."
    ),
    skip_bad: bool = typer.Option(
        False, "--skip-bad", help="Remove bad records instead of stopping at the first."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Report what would be removed; write nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as one JSON object."),
) -> None:
    """Remove duplicates and evaluation records.

    Writes the records of IN to OUT in their order and with all their fields, without exact and near
    duplicates, and without records that repeat those of --against.
    """
    from whet.cli.console import print_line
    from whet.data.clean.clean_data import clean_data
    from whet.errors import ConfigError
    from whet.reporting.console import stderr_console
    from whet.reporting.text.clean_text import report_lines

    if target is None and not dry_run:
        raise ConfigError("OUT is missing", hint="name the file to write, or use --dry-run")
    if dry_run and removed is not None:
        raise ConfigError(
            "--dry-run writes nothing, so --removed has no effect", hint="leave out one of them"
        )
    with stderr_console().status("reading") as status:

        def show(records: int) -> None:
            if records % 1000 == 0:
                status.update(f"{records:,} records")

        report = clean_data(
            source,
            None if dry_run else target,
            removed=removed,
            against=against,
            near=near,
            threshold=threshold,
            shingle=shingle,
            ngram=ngram,
            skip_bad=skip_bad,
            progress=show,
        )
    if warning := report.warning():
        stderr_console().print(f"warning: {warning}", highlight=False, markup=False)
    print_line(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(report_lines(report)))
