"""whet advise: report settings that are unusual for the model and data."""

import typer


def command(
    config: str = typer.Argument(help="A YAML config, as for whet train."),
    overrides: list[str] = typer.Argument(None, help="Overrides: section.key=value, e.g. optim.lr=1e-4"),  # noqa: B008
) -> None:
    """Check a config for unusual settings.

    The learning rate, batch size, length limit and schedule are compared with the model and the data.
    Nothing is trained, and nothing is rejected.
    """
    from whet.cli.console import set_up_logging
    from whet.config.load_config import load_config
    from whet.studies.advise import advise

    set_up_logging()
    for advice in advise(load_config(config, overrides or ())):
        print(f"{advice.severity:5}  {advice.key}: {advice.message}")
        if advice.recommendation:
            print(f"       {advice.recommendation}")
