"""whet train: a run from its config."""

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

NPROC = "Processes on this machine that train together, see parallel; torchrun is for several machines."
QUIET = "Show no progress: only the result, warnings and errors."
RESTARTS = "With --nproc: how often to start again from the last checkpoint when a process fails."


def _show_help(context: typer.Context, asked: bool) -> None:
    """The usual help, and below it every key of a config with its default and meaning."""
    if asked:
        from whet.config.load_config import describe_keys

        print(context.get_help(), "\nConfig keys:", *describe_keys(), sep="\n")
        raise typer.Exit


def command(
    config: str = typer.Argument(help="A YAML file; docs/config.md lists every key."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, e.g. optim.lr=1e-4"),  # noqa: B008
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Print the plan and what would be refused; read no weights, write no run.",
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
        help="Show this message and every config key.",
    ),
) -> None:
    """Train: everything in CONFIG, with overrides."""
    from whet.config.load_config import load_config

    if nproc > 1 and not dry_run:
        # what is wrong with it is said before anything starts
        load_config(config, overrides or ()).parallel.check_processes(nproc)
        arguments = ["train", config, *(overrides or ()), *(["--quiet"] if quiet else [])]
        in_processes(nproc, arguments, restarts=max_restarts)
    from whet.cli.console import say, set_up_logging
    from whet.cli.data import plan
    from whet.config.quality import Quality
    from whet.runs.run import train

    if not dry_run:
        follow(lambda callbacks: train(load_config(config, overrides or ()), callbacks), quiet=quiet)
        return
    settings = load_config(config, overrides or ())
    if isinstance(settings.model, Quality):
        from whet.recipes.quality.quality import dry_run as dry_run_of_rows
        from whet.recipes.quality.quality import summary_line
        from whet.recipes.registry import recipe_for
        from whet.runs.build_callbacks import check_watching
        from whet.runs.provenance import provenance

        set_up_logging(quiet=quiet)
        check_watching(settings, recipe_for(settings))
        say(summary_line(dry_run_of_rows(settings, provenance)))
        return
    plan(config, overrides or [], processes=nproc)


def in_processes(count: int, arguments: "Sequence[str]", *, restarts: int) -> NoReturn:
    """Run a command in several processes of this machine, and exit as they do."""
    from whet.parallel.launch import launch

    debug = ["--debug"] if "--debug" in sys.argv else []
    raise typer.Exit(launch([*arguments, *debug], count, restarts=restarts))


def follow(run: "Callable[[list[Callback]], RunResult]", *, quiet: bool = False) -> None:
    """Do a run, alone or as one of several processes, of which the first shows it; exit 3: there is more."""
    from whet.parallel.process_group import UnreachableError, joined

    code = 1
    try:
        with joined() as world:
            try:
                code = _shown(run, quiet=quiet) if world.is_main else _unseen(run)
            except typer.Exit:
                raise
            except Exception as error:
                if world.watch.speaks(error):
                    raise world.watch.located(error) from error
                sys.exit(getattr(error, "exit_code", 1))
    except UnreachableError:  # nobody can agree on who says it: the first process of each machine
        if os.environ.get("LOCAL_RANK", "0") != "0":
            sys.exit(1)
        raise
    if code:
        raise typer.Exit(code)


def _unseen(run: "Callable[[list[Callback]], RunResult]") -> int:
    """A run that another process shows."""
    logger = logging.getLogger("whet")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    try:
        return UNFINISHED if run([]).unfinished else 0
    except KeyboardInterrupt as interrupted:
        raise typer.Exit(130) from interrupted


def _shown(run: "Callable[[list[Callback]], RunResult]", *, quiet: bool) -> int:
    """Show a run's progress, and say what came of it."""
    from whet.cli.console import progress_shown, say
    from whet.reporting.console import notes
    from whet.reporting.progress import describe

    with progress_shown(quiet=quiet) as progress:
        result = run([progress])
    if result.unfinished:
        notes().print(f"go on with: whet resume {shlex.quote(str(result.directory))}", highlight=False)
        return UNFINISHED
    summary = result.summary
    if summary.get("test"):
        say(f"test: {describe(summary['test'])}")
    unit = "rows" if "quality" in summary else "tokens"
    steps = "1 step" if result.steps == 1 else f"{result.steps} steps"
    say(
        f"{steps}, {summary['tokens']:,} {unit} in {summary['seconds']:.0f} s; "
        f"result in {result.directory}/final"
    )
    if "quality" in summary:
        from whet.recipes.quality.quality import summary_line

        say(summary_line(summary["quality"]))
        return 0
    name = shlex.quote(str(result.directory))
    if summary.get("classification"):
        show_classification(result.directory)
        say(f'try it: whet classify {name} "some text"')
    elif _chats(result.directory):
        say(f"try it: whet chat {name}")
    else:
        say(f'try it: whet generate {name} "some text"')
    return 0


def _chats(run: "Path | None") -> bool:
    """Whether the tokenizer of a run has a chat template."""
    from whet.model_io.tokenizer import tokenizer_of

    assert run is not None
    return bool(getattr(tokenizer_of(run), "chat_template", None))


def draw_missing_plots(run: str) -> bool:
    """Draw the plots of a finished classifier that was killed while drawing them; whether it did."""
    from pathlib import Path

    from whet.run_directory import CLASSIFICATION_FILE, CLASSIFICATION_PLOT, is_finished
    from whet.storage import clear_leftovers

    directory = Path(run)
    plots = directory / CLASSIFICATION_PLOT
    if plots.exists() or not (directory / CLASSIFICATION_FILE).is_file() or not is_finished(directory):
        return False
    clear_leftovers(directory, of=CLASSIFICATION_PLOT)
    show_classification(directory)
    return plots.exists()


def show_classification(run: "Path | None") -> None:
    """The report of a run that classifies, as a table, and its plots where they can be drawn."""
    from whet.cli.console import say
    from whet.errors import ConfigError
    from whet.reporting.text.classifier_text import classification_text, draw, read_report
    from whet.run_directory import CLASSIFICATION_FILE, CLASSIFICATION_PLOT

    assert run is not None
    report = read_report(run)
    say(classification_text(report))
    try:
        say(f"report: {draw(report, run / CLASSIFICATION_PLOT).with_suffix('.json')} and .png beside it")
    except ConfigError as error:
        say(f"report: {run / CLASSIFICATION_FILE} ({error.message}: {error.hint})")
