"""whet advise: settings that look wrong for this model and data."""

import typer


def command(
    config: str = typer.Argument(help="A YAML file, as for whet train."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, e.g. optim.lr=1e-4"),  # noqa: B008
) -> None:
    """Compare the settings in CONFIG with the model and the data. Nothing is trained, nothing is refused."""
    from whet.cli.console import set_up_logging
    from whet.config.load_config import load_config
    from whet.studies.advise import advise

    set_up_logging()
    for advice in advise(load_config(config, overrides or ())):
        print(f"{advice.severity:5}  {advice.key}: {advice.message}")
        if advice.recommendation:
            print(f"       {advice.recommendation}")
