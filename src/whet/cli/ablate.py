"""whet ablate: compare the arms of the quality task."""

from typing import get_args

import typer


def command(
    config: str = typer.Argument(help="A YAML config of the quality task."),
    overrides: list[str] = typer.Argument(None, help="Overrides: section.key=value, e.g. run.steps=200"),  # noqa: B008
    arms: str = typer.Option("softmax,sheaf-padic,dense", help="The arms to compare, separated by commas."),
    seeds: int = typer.Option(5, min=2, max=1000, help="Runs per arm, with run.seed, run.seed + 1, ..."),
) -> None:
    """Compare the arms of the quality task.

    Every arm is trained with every seed on the same rows in the same order. Rerun the same command to resume.
    """
    from whet.cli.console import print_line, show_progress
    from whet.config.load_config import load_config
    from whet.config.quality import Arm
    from whet.errors import ConfigError
    from whet.reporting.console import stderr_console
    from whet.reporting.text.ablation_text import describe_ablation, write_ablation
    from whet.studies.ablation import ablate

    arm_names = list(dict.fromkeys(arms.split(",")))
    unknown = [arm for arm in arm_names if arm not in get_args(Arm)]
    if unknown or len(arm_names) < 2:
        problem = f"unknown arm {unknown[0]!r}" if unknown else "a comparison needs at least two arms"
        raise ConfigError(f"--arms: {problem}", hint=f"two or more of {', '.join(get_args(Arm))}")
    settings = load_config(config, overrides or ())
    with show_progress() as progress:
        ablation = ablate(settings, arms=arm_names, seeds=seeds, callbacks=lambda: [progress])
    if ablation is None:
        stderr_console().print("stopped; rerun the same command to resume", highlight=False)
        raise typer.Exit(3)
    print_line(describe_ablation(ablation))
    for path in write_ablation(ablation, settings.directory):
        print_line(f"written: {path}")
