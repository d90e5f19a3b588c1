"""whet data score-distrust: auth_weight and prov_entropy for records."""

from enum import Enum

import typer


class ExistingScores(Enum):
    """What to do with records that have scores already."""

    error = "error"
    keep = "keep"
    overwrite = "overwrite"


def command(
    source: str = typer.Argument(
        metavar="IN", help="Records with a text: .jsonl, .json, .csv, .parquet, ..."
    ),
    target: str = typer.Argument(metavar="OUT", help="The JSON Lines file to write; it must not exist yet."),
    existing: ExistingScores = typer.Option(  # noqa: B008
        ExistingScores.error, help="Records that have auth_weight or prov_entropy already."
    ),
) -> None:
    """Write IN to OUT with auth_weight and prov_entropy, for objective.kind: distrust."""
    from whet.cli.console import say
    from whet.data.distrust_scores import score_file
    from whet.reporting.console import notes

    summary = score_file(source, target, existing=existing.value)
    for warning in summary.warnings():
        notes().print(f"warning: {warning}", highlight=False)
    say(f"{target}: {summary.describe()}")
