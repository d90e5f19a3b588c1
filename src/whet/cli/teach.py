"""whet teach: what a teacher thinks, written down once."""

import shlex

import typer


def command(
    config: str = typer.Argument(help="A YAML file with objective: {kind: distill, offline: {...}}."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, as for whet train"),  # noqa: B008
) -> None:
    """Store the likeliest tokens of CONFIG's teachers, so that whet train needs no teacher."""
    from whet.cli.console import say, set_up_logging
    from whet.config.load_config import load_config
    from whet.runs.teach import teach

    set_up_logging()
    teach(load_config(config, overrides or ()))
    say(f"train with: {shlex.join(['whet', 'train', config, *(overrides or [])])}")
