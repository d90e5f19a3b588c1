"""The `whet` command: parsing, errors and exit codes. Each command lives in a file of its own."""

import contextlib
import os
import sys
import threading
import traceback
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from whet import __version__
from whet.cli import (
    ablate,
    advise,
    chat,
    classify,
    compare,
    data,
    diagnose,
    doctor,
    evaluate,
    export,
    generate,
    lab,
    ledger,
    merge,
    plan,
    pull,
    report,
    resume,
    runs,
    score_distrust,
    sweep,
    teach,
    tokenizer,
    train,
)
from whet.cli.console import escape_terminal
from whet.error_boundary import is_out_of_memory, is_panic, out_of_memory, printable, reason
from whet.errors import ModelError, RunError, WhetError, shorten

_DEBUG = "run it again with --debug for the traceback"
_MOST_LINES = 40
_LONGEST_LINE = 2000


class _Commands(TyperGroup):
    """Commands, some of which are named by two words: `data score-distrust` beside `data CONFIG`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Any: click's types, which typer may vendor
        """Return a command's name, the command, and the arguments that are left."""
        if len(args) > 1 and (name := f"{args[0]} {args[1]}") in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="whet",
    cls=_Commands,
    help="Train, fine-tune, align, evaluate and use language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: a third faster to show
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", context_settings={"help_option_names": []})(train.command)
app.command("resume")(resume.command)
app.command("data")(data.command)
app.command("data score-distrust")(score_distrust.command)
app.command("teach")(teach.command)
app.command("chat")(chat.command)
app.command("generate")(generate.command)
app.command("eval")(evaluate.command)
app.command("classify")(classify.command)
app.command("advise")(advise.command)
app.command("merge")(merge.command)
app.command("export")(export.command)
app.command("plan")(plan.command)
app.command("ablate")(ablate.command)
app.command("sweep")(sweep.command)
app.command("diagnose")(diagnose.command)
app.command("report")(report.command)
app.command("compare")(compare.command)
app.command("runs")(runs.command)
app.command("pull")(pull.command)
app.command("doctor")(doctor.command)
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(ledger.app, name="ledger")
app.add_typer(lab.app, name="lab")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"whet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_show_version, help="Show the version."
    ),
) -> None:
    """Train, fine-tune, align, evaluate and use language models."""


def main() -> NoReturn:
    """Run the command line: one message and an exit code for every error, a traceback only with --debug."""
    if "RANK" in os.environ:  # when a process dies, torch would print a trace of every connection to it
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1  # accepted before and after the command's name
    escape_terminal()
    try:
        app(arguments)
    except SystemExit as end:
        _leave(end.code)
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if _was_interrupted(error):
            _leave(130)
        if debug:
            print(printable(traceback.format_exc()), file=sys.stderr)
        known = _known(error)
        _complain(str(known))
        _leave(known.exit_code)
    _leave(0)


def _leave(code: int | str | None) -> NoReturn:
    """Exit, at once while a checkpoint is being written: torch aborts where its threads outlive Python."""
    if any(thread.name == "whet-save" for thread in threading.enumerate()):  # training/checkpoint_writer
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)


def _was_interrupted(error: BaseException) -> bool:
    """Return whether it was Ctrl-C: pydantic wraps one that comes while it builds a schema, on import."""
    return type(error).__name__ == "SchemaError" and "KeyboardInterrupt" in str(error)


def _known(error: BaseException) -> WhetError:
    """What an error means to the user: the last net, below the places that know which file is wrong."""
    if isinstance(error, WhetError):
        return error
    if is_out_of_memory(error):
        return out_of_memory(error)
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return RunError(f"{where}{error.strerror or error}")
    if is_panic(error):
        return ModelError(f"a library failed on its input: {reason(error)}", hint=_DEBUG)
    name, text = type(error).__name__, reason(error)
    return RunError(f"unexpected {text if text.startswith(name) else f'{name}: {text}'}", hint=_DEBUG)


def _complain(message: str) -> None:
    lines = message.splitlines() or [""]
    if len(lines) > _MOST_LINES:  # the last one may be the hint
        lines[_MOST_LINES - 2 : -1] = [
            f"  ... {len(lines) - _MOST_LINES + 1} lines left out (--debug shows all)"
        ]
    print(printable("error: " + "\n".join(shorten(line, _LONGEST_LINE) for line in lines)), file=sys.stderr)
