"""whet data score-distrust: add auth_weight and prov_entropy to records."""

from enum import Enum

import typer


class ExistingScores(Enum):
    """The values of --existing."""

    error = "error"
    keep = "keep"
    overwrite = "overwrite"


def command(
    source: str = typer.Argument(metavar="IN", help="Text records: .jsonl, .json, .csv, .parquet, ..."),
    target: str = typer.Argument(metavar="OUT", help="The JSON Lines file to write. It must not exist."),
    existing: ExistingScores = typer.Option(  # noqa: B008
        ExistingScores.error, help="How to treat records that already have auth_weight or prov_entropy."
    ),
) -> None:
    """Add auth_weight and prov_entropy to records.

    Writes the records of IN to OUT with the two scores that objective.kind: distrust reads.
    """
    from whet.cli.console import print_line
    from whet.data.distrust_scores import score_file
    from whet.reporting.console import stderr_console

    summary = score_file(source, target, existing=existing.value)
    for warning in summary.warnings():
        stderr_console().print(f"warning: {warning}", highlight=False)
    print_line(f"{target}: {summary.describe()}")
