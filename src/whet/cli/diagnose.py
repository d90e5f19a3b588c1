"""whet diagnose: the effect of dtypes on gradients and on expert routing."""

import json

import typer


def command(
    config: str = typer.Argument(help="A YAML config, as for whet train."),
    overrides: list[str] = typer.Argument(None, help="Overrides: section.key=value, e.g. run.batch_size=32"),  # noqa: B008
    strict: bool = typer.Option(False, "--strict", help="Exit with code 4 unless the verdict is fine."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
) -> None:
    """Compare gradients across dtypes.

    The gradients of the first batch of CONFIG are computed in every dtype and compared with the most
    precise one.
    """
    from whet.cli.console import print_line, set_up_logging
    from whet.config.load_config import load_config
    from whet.reporting.text.diagnosis_text import describe_diagnosis, diagnosis_json
    from whet.studies.diagnose import diagnose

    set_up_logging()
    diagnosis = diagnose(load_config(config, overrides or ()))
    print_line(json.dumps(diagnosis_json(diagnosis)) if as_json else describe_diagnosis(diagnosis))
    if strict and diagnosis.verdict != "fine":
        raise typer.Exit(4)
