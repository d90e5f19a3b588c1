"""The `whet` command: argument parsing, error messages and exit codes. Each command has its own module."""

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
    clean,
    compare,
    convert,
    data,
    diagnose,
    doctor,
    evaluate,
    export,
    generate,
    init,
    lab,
    ledger,
    merge,
    plan,
    pull,
    push,
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
from whet.error_boundary import (
    error_text,
    escape_control_characters,
    is_out_of_memory,
    is_panic,
    out_of_memory_error,
)
from whet.errors import ModelError, RunError, WhetError, shorten

_DEBUG_HINT = "rerun with --debug to see the traceback"
_MAX_LINES = 40
_MAX_LINE_LENGTH = 2000


class _Commands(TyperGroup):
    """A group with two-word commands (`data clean` next to `data CONFIG`) and help panels."""

    # Any below: click's types, which typer may vendor

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return a command's name, the command, and the remaining arguments."""
        if len(args) > 1 and (name := f"{args[0]} {args[1]}") in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in one section per help panel, without importing rich."""
        panels: dict[str, list[tuple[str, Any]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(
                    (name, command)
                )
        width = max(len(name) for commands in panels.values() for name, _ in commands)
        limit = formatter.width - 6 - width
        for panel, commands in panels.items():
            with formatter.section(panel):
                formatter.write_dl(
                    [(name.ljust(width), command.get_short_help_str(limit)) for name, command in commands]
                )


app = typer.Typer(
    name="whet",
    cls=_Commands,
    help="Train, fine-tune, align, evaluate and use language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help needs no rich, so it appears faster
    context_settings={"help_option_names": ["-h", "--help"]},
)
_TRAIN, _DATA, _USE = "Train", "Data", "Use"
_EVALUATE, _COMPARE, _ADVANCED = "Evaluate", "Compare", "Advanced"

app.command("init", rich_help_panel=_TRAIN)(init.command)
app.command("convert", rich_help_panel=_TRAIN)(convert.command)
app.command("train", rich_help_panel=_TRAIN, context_settings={"help_option_names": []})(train.command)
app.command("resume", rich_help_panel=_TRAIN)(resume.command)
app.command("plan", rich_help_panel=_TRAIN)(plan.command)
app.command("advise", rich_help_panel=_TRAIN)(advise.command)
app.command("doctor", rich_help_panel=_TRAIN)(doctor.command)
app.command("data", rich_help_panel=_DATA)(data.command)
app.command("data clean", rich_help_panel=_DATA)(clean.command)
app.add_typer(tokenizer.app, name="tokenizer", rich_help_panel=_DATA)
app.command("chat", rich_help_panel=_USE)(chat.command)
app.command("generate", rich_help_panel=_USE)(generate.command)
app.command("classify", rich_help_panel=_USE)(classify.command)
app.command("merge", rich_help_panel=_USE)(merge.command)
app.command("export", rich_help_panel=_USE)(export.command)
app.command("pull", rich_help_panel=_USE)(pull.command)
app.command("push", rich_help_panel=_USE)(push.command)
app.command("eval", rich_help_panel=_EVALUATE)(evaluate.command)
app.command("report", rich_help_panel=_EVALUATE)(report.command)
app.command("runs", rich_help_panel=_COMPARE)(runs.command)
app.command("compare", rich_help_panel=_COMPARE)(compare.command)
app.command("sweep", rich_help_panel=_COMPARE)(sweep.command)
app.command("teach", rich_help_panel=_ADVANCED)(teach.command)
app.command("diagnose", rich_help_panel=_ADVANCED)(diagnose.command)
app.command("ablate", rich_help_panel=_ADVANCED)(ablate.command)
app.add_typer(lab.app, name="lab", rich_help_panel=_ADVANCED)
app.add_typer(ledger.app, name="ledger", rich_help_panel=_ADVANCED)
app.command("data score-distrust", rich_help_panel=_ADVANCED)(score_distrust.command)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"whet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback when an error occurs."),
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
    ),
) -> None:
    """Train, fine-tune, align, evaluate and use language models."""


def main() -> NoReturn:
    """Run the command line. An error prints one message and sets the exit code; --debug adds a traceback."""
    if "RANK" in os.environ:  # otherwise torch prints a trace per connection when a process dies
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1  # accepted before and after the command's name
    escape_terminal()
    try:
        app(arguments)
    except SystemExit as exit_request:
        _exit(exit_request.code)
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if _was_interrupted(error):
            _exit(130)
        if debug:
            print(escape_control_characters(traceback.format_exc()), file=sys.stderr)
        user_error = _to_whet_error(error)
        _print_error(str(user_error))
        _exit(user_error.exit_code)
    _exit(0)


def _exit(code: int | str | None) -> NoReturn:
    """Exit the process, skipping interpreter shutdown while a checkpoint is being written.

    torch aborts if its threads outlive the Python interpreter.
    """
    if any(thread.name == "whet-save" for thread in threading.enumerate()):  # training/checkpoint_writer
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)


def _was_interrupted(error: BaseException) -> bool:
    """Return whether Ctrl-C caused the error: pydantic wraps it if it occurs while building a schema."""
    return type(error).__name__ == "SchemaError" and "KeyboardInterrupt" in str(error)


def _to_whet_error(error: BaseException) -> WhetError:
    """Convert any exception to a WhetError. Code that knows which input is invalid raises a better one."""
    if isinstance(error, WhetError):
        return error
    if is_out_of_memory(error):
        return out_of_memory_error(error)
    if isinstance(error, OSError):
        prefix = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return RunError(f"{prefix}{error.strerror or error}")
    if is_panic(error):
        return ModelError(f"a library failed on its input: {error_text(error)}", hint=_DEBUG_HINT)
    name, text = type(error).__name__, error_text(error)
    return RunError(f"unexpected {text if text.startswith(name) else f'{name}: {text}'}", hint=_DEBUG_HINT)


def _print_error(message: str) -> None:
    lines = message.splitlines() or [""]
    if len(lines) > _MAX_LINES:  # the last line may be the hint
        lines[_MAX_LINES - 2 : -1] = [
            f"  ... {len(lines) - _MAX_LINES + 1} lines omitted (--debug shows all)"
        ]
    print(
        escape_control_characters("error: " + "\n".join(shorten(line, _MAX_LINE_LENGTH) for line in lines)),
        file=sys.stderr,
    )
