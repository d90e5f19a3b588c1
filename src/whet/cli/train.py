"""whet train: a run from its config."""

import shlex
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from whet.training.callbacks import Callback
    from whet.training.state import RunResult


def _show_help(context: typer.Context, asked: bool) -> None:
    """The usual help, and below it every key of a config with its default and meaning."""
    if asked:
        from whet.config.load import describe_keys

        print(context.get_help(), "\nConfig keys:", *describe_keys(), sep="\n")
        raise typer.Exit


def command(
    config: str = typer.Argument(help="A YAML file; docs/config.md lists every key."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, e.g. optim.lr=1e-4"),  # noqa: B008
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Go through every file and print the plan; build no model, write no run."
    ),
    _: bool = typer.Option(
        False,
        "--help",
        "-h",
        is_eager=True,
        callback=_show_help,
        help="Show this message and every config key.",
    ),
) -> None:
    """Train: everything in CONFIG, with overrides."""
    from whet.cli.console import say, set_up_logging
    from whet.cli.data import plan
    from whet.config.load import load_config
    from whet.config.quality import Quality
    from whet.training import quality_run
    from whet.training.quality_run import summary_line
    from whet.training.run import train

    settings = load_config(config, overrides or ())
    if dry_run and isinstance(settings.model, Quality):
        set_up_logging()
        say(summary_line(quality_run.dry_run(settings)))
        return
    if dry_run:
        plan(config, overrides or [])
        return
    follow(lambda callbacks: train(settings, callbacks))


def follow(run: "Callable[[list[Callback]], RunResult]") -> None:
    """Show a run's progress, say what came of it, and exit 3 when there is more to do."""
    from whet.cli.console import notes, say, set_up_logging
    from whet.reporting.progress import RunProgress, describe
    from whet.training.quality_run import summary_line

    set_up_logging()
    progress = RunProgress(notes())
    try:
        result = run([progress])
    except KeyboardInterrupt as interrupted:
        progress.close()
        notes().print(str(interrupted) or "interrupted", highlight=False)
        raise typer.Exit(130) from interrupted
    finally:
        progress.close()
    if result.unfinished:
        notes().print(f"go on with: whet resume {shlex.quote(str(result.directory))}", highlight=False)
        raise typer.Exit(3)
    summary = result.summary
    if summary.get("test"):
        say(f"test: {describe(summary['test'])}")
    say(
        f"{result.steps} steps, {summary['tokens']:,} tokens in {summary['seconds']:.0f} s; "
        f"result in {result.directory}/final"
    )
    if "quality" in summary:
        say(summary_line(summary["quality"]))
        return
    name = shlex.quote(str(result.directory))
    if summary.get("classification"):
        show_classification(result.directory)
        say(f'try it: whet classify {name} "some text"')
    else:
        say(f"try it: whet chat {name}")


def show_classification(run: "Path | None") -> None:
    """The report of a run that classifies, as a table, and its plots where they can be drawn."""
    from whet.cli.console import say
    from whet.errors import ConfigError
    from whet.reporting.classification import classification_text, draw, read_report

    assert run is not None
    report = read_report(run)
    say(classification_text(report))
    try:
        say(f"report: {draw(report, run / 'classification.png').with_suffix('.json')} and .png beside it")
    except ConfigError as error:
        say(f"report: {run / 'classification.json'} ({error.message}: {error.hint})")
