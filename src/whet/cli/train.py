"""whet train: train a model from a config."""

import logging
import os
import shlex
import sys
from typing import TYPE_CHECKING, NoReturn

import typer

from whet.parallel.launch import UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from whet.training.callbacks import Callback
    from whet.training.state import RunResult

NPROC = "Number of processes on this machine, see parallel.kind; use torchrun for several machines."
QUIET = "Hide progress; print only the result, warnings and errors."
RESTARTS = "With --nproc: how often to restart from the last checkpoint after a process fails."


def _show_help(context: typer.Context, requested: bool) -> None:
    """Print the command's help, followed by the config keys with their meanings and defaults."""
    if requested:
        from whet.cli.config_help import config_help

        print(context.get_help(), "", *config_help(), sep="\n")
        raise typer.Exit


def command(
    config: str = typer.Argument(help="A YAML config; docs/config.md lists every key."),
    overrides: list[str] = typer.Argument(None, help="Overrides: section.key=value, e.g. optim.lr=1e-4"),  # noqa: B008
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Check config and data, and print the plan. Loads no weights, writes nothing.",
    ),
    nproc: int = typer.Option(1, "--nproc", min=1, help=NPROC),
    max_restarts: int = typer.Option(0, "--max-restarts", min=0, help=RESTARTS),
    quiet: bool = typer.Option(False, "--quiet", "-q", help=QUIET),
    _: bool = typer.Option(
        False,
        "--help",
        "-h",
        is_eager=True,
        callback=_show_help,
        help="Show this message and all config keys.",
    ),
) -> None:
    """Train a model as described by a YAML config."""
    from whet.config.load_config import load_config

    if nproc > 1 and not dry_run:
        # report config errors before starting any process
        load_config(config, overrides or ()).parallel.check_processes(nproc)
        arguments = ["train", config, *(overrides or ()), *(["--quiet"] if quiet else [])]
        launch_processes(nproc, arguments, restarts=max_restarts)
    from whet.cli.console import print_line, set_up_logging
    from whet.cli.data import print_dry_run
    from whet.config.quality import Quality
    from whet.runs.run import train

    if not dry_run:
        run_with_progress(
            lambda callbacks: train(load_config(config, overrides or ()), callbacks), quiet=quiet
        )
        return
    settings = load_config(config, overrides or ())
    if isinstance(settings.model, Quality):
        from whet.recipes.quality.quality import summary_line
        from whet.recipes.quality.quality import write_dry_run as quality_dry_run
        from whet.recipes.registry import recipe_for
        from whet.runs.build_callbacks import check_callbacks
        from whet.runs.provenance import collect_provenance

        set_up_logging(quiet=quiet)
        check_callbacks(settings, recipe_for(settings))
        print_line(summary_line(quality_dry_run(settings, collect_provenance)))
        return
    print_dry_run(config, overrides or [], processes=nproc)


def launch_processes(count: int, arguments: "Sequence[str]", *, restarts: int) -> NoReturn:
    """Run a whet command in several processes on this machine, and exit with their exit code."""
    from whet.parallel.launch import launch

    debug = ["--debug"] if "--debug" in sys.argv else []
    raise typer.Exit(launch([*arguments, *debug], count, restarts=restarts))


def run_with_progress(run: "Callable[[list[Callback]], RunResult]", *, quiet: bool = False) -> None:
    """Execute a run in this process; the main process shows its progress.

    Exits with code 3 if the run stopped before its last step and can be resumed.
    """
    from whet.parallel.process_group import RendezvousError, distributed_world

    code = 1
    try:
        with distributed_world() as world:
            try:
                code = _run_main(run, quiet=quiet) if world.is_main else _run_worker(run)
            except typer.Exit:
                raise
            except Exception as error:
                if world.watchdog.claim_report(error):
                    raise world.watchdog.add_rank_context(error) from error
                sys.exit(getattr(error, "exit_code", 1))
    except RendezvousError:  # without a process group, the first process of each machine reports
        if os.environ.get("LOCAL_RANK", "0") != "0":
            sys.exit(1)
        raise
    if code:
        raise typer.Exit(code)


def _run_worker(run: "Callable[[list[Callback]], RunResult]") -> int:
    """Execute a run silently, because the main process shows its progress; return the exit code."""
    logger = logging.getLogger("whet")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    try:
        return UNFINISHED if run([]).unfinished else 0
    except KeyboardInterrupt as interrupted:
        raise typer.Exit(130) from interrupted


def _run_main(run: "Callable[[list[Callback]], RunResult]", *, quiet: bool) -> int:
    """Execute a run, show its progress and result, and return the exit code."""
    from whet.cli.console import print_line, show_progress
    from whet.reporting.console import stderr_console
    from whet.reporting.formatting import format_elapsed
    from whet.reporting.progress import format_metrics

    with show_progress(quiet=quiet) as progress:
        result = run([progress])
    if result.unfinished:
        stderr_console().print(
            f"to resume: whet resume {shlex.quote(str(result.directory))}", highlight=False
        )
        return UNFINISHED
    summary = result.summary
    if summary.get("test"):
        print_line(f"test: {format_metrics(summary['test'])}")
    unit = "rows" if "quality" in summary else "tokens"
    steps = "1 step" if result.steps == 1 else f"{result.steps:,} steps"
    print_line(
        f"finished: {steps}, {summary['tokens']:,} {unit} in {format_elapsed(summary['seconds'])}; "
        f"final model in {result.directory}/final"
    )
    if "quality" in summary:
        from whet.recipes.quality.quality import summary_line

        print_line(summary_line(summary["quality"]))
        return 0
    name = shlex.quote(str(result.directory))
    if summary.get("classification"):
        show_classification(result.directory)
        print_line(f'try it: whet classify {name} "some text"')
    elif _has_chat_template(result.directory):
        print_line(f"try it: whet chat {name}")
    else:
        print_line(f'try it: whet generate {name} "some text"')
    return 0


def _has_chat_template(run: "Path | None") -> bool:
    from whet.model_io.tokenizer import load_model_tokenizer

    assert run is not None
    return bool(getattr(load_model_tokenizer(run), "chat_template", None))


def draw_missing_plots(run: str) -> bool:
    """Draw the plots of a finished classification run that was killed before drawing them.

    Returns whether there were plots to draw.
    """
    from pathlib import Path

    from whet.run_directory import CLASSIFICATION_FILE, CLASSIFICATION_PLOT, is_finished
    from whet.storage import remove_temporary_files

    directory = Path(run)
    plots = directory / CLASSIFICATION_PLOT
    if plots.exists() or not (directory / CLASSIFICATION_FILE).is_file() or not is_finished(directory):
        return False
    remove_temporary_files(directory, only_name=CLASSIFICATION_PLOT)
    show_classification(directory)
    return plots.exists()


def show_classification(run: "Path | None") -> None:
    """Print the classification report of a run, and draw its plots if matplotlib is installed."""
    from whet.cli.console import print_line
    from whet.errors import ConfigError
    from whet.reporting.text.classifier_text import classification_text, read_report, write_classifier_plots
    from whet.run_directory import CLASSIFICATION_FILE, CLASSIFICATION_PLOT

    assert run is not None
    report = read_report(run)
    print_line(classification_text(report))
    try:
        plots = write_classifier_plots(report, run / CLASSIFICATION_PLOT)
        print_line(f"report: {plots.with_suffix('.json')}, with plots in the .png file next to it")
    except ConfigError as error:
        print_line(f"report: {run / CLASSIFICATION_FILE} ({error.message}: {error.hint})")
