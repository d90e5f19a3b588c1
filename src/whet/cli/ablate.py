"""whet ablate: the arms of the quality task against each other."""

from typing import get_args

import typer


def command(
    config: str = typer.Argument(help="A YAML file of the quality task."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, e.g. run.steps=200"),  # noqa: B008
    arms: str = typer.Option("softmax,sheaf-padic,dense", help="The arms to compare, with commas."),
    seeds: int = typer.Option(5, min=2, max=1000, help="Runs of each arm: run.seed, run.seed + 1, ..."),
) -> None:
    """Train every arm with every seed on the same rows in the same order, and compare them."""
    from whet.cli.console import progress_shown, say
    from whet.config.load_config import load_config
    from whet.config.quality import Arm
    from whet.errors import ConfigError
    from whet.reporting.console import notes
    from whet.reporting.text.ablation_text import describe_ablation, write_ablation
    from whet.studies.ablation import ablate

    named = list(dict.fromkeys(arms.split(",")))
    unknown = [arm for arm in named if arm not in get_args(Arm)]
    if unknown or len(named) < 2:
        what = f"unknown arm {unknown[0]!r}" if unknown else "one arm is no comparison"
        raise ConfigError(f"--arms: {what}", hint=f"two or more of {', '.join(get_args(Arm))}")
    settings = load_config(config, overrides or ())
    with progress_shown() as progress:
        found = ablate(settings, arms=named, seeds=seeds, callbacks=lambda: [progress])
    if found is None:
        notes().print("stopped; the same command goes on", highlight=False)
        raise typer.Exit(3)
    say(describe_ablation(found))
    for path in write_ablation(found, settings.directory):
        say(f"written: {path}")
