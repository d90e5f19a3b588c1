"""whet diagnose: what number formats do to a model's gradients and to its router."""

import json

import typer


def command(
    config: str = typer.Argument(help="A YAML file, as for whet train."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, e.g. run.batch_size=32"),  # noqa: B008
    strict: bool = typer.Option(False, "--strict", help="Exit 4 unless the verdict is fine."),
    as_json: bool = typer.Option(False, "--json", help="Print it as one JSON object."),
) -> None:
    """Compare gradients of the first batch of CONFIG in every number format with the most exact one."""
    from whet.cli.console import say, set_up_logging
    from whet.config.load_config import load_config
    from whet.reporting.text.diagnosis_text import describe_diagnosis, diagnosis_json
    from whet.studies.diagnose import diagnose

    set_up_logging()
    found = diagnose(load_config(config, overrides or ()))
    say(json.dumps(diagnosis_json(found)) if as_json else describe_diagnosis(found))
    if strict and found.verdict != "fine":
        raise typer.Exit(4)
