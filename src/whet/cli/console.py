"""Output of the commands: results go to standard output, messages and progress to standard error."""

import contextlib
import errno
import logging
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, cast

import typer

from whet.error_boundary import escape_control_characters
from whet.errors import ConfigError, StorageError
from whet.reporting.console import ConsoleHandler, discard_after_error, escaping_console, stderr_console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from whet.reporting.progress import RunProgress


def stdout_console() -> "Console":
    """Return a rich console on standard output; characters that its encoding lacks are replaced."""
    file = sys.stdout.stream if isinstance(sys.stdout, _EscapedStream) else sys.stdout
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="replace")
    return escaping_console(file)


class _EscapedStream:
    """A terminal that shows control characters as escapes: generated text may contain escape sequences."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escape_control_characters(text))
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def escape_terminal() -> None:
    """Show control characters as escapes on a terminal; files and pipes receive every byte unchanged."""
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = cast("TextIO", _EscapedStream(sys.stdout))


def print_line(text: str) -> None:
    """Print a line on standard output; a closed pipe is ignored, a full disk is an error."""
    with discard_after_error(sys.stdout, reraise=errno.ENOSPC):
        print(escape_control_characters(text), flush=True)


@contextlib.contextmanager
def output_option(path: str | None, option: str) -> "Iterator[None]":
    """Raise a ConfigError if a write fails because the directory of an option's path does not exist.

    Other storage errors, such as a full disk, are raised unchanged.
    """
    try:
        yield
    except StorageError as error:
        if path is None or Path(path).absolute().parent.is_dir():
            raise
        raise ConfigError(error.message, hint=f"{option} needs a file in an existing directory") from error


def set_up_logging(*, quiet: bool = False) -> None:
    """Print whet's log lines (only warnings if `quiet`), and silence the libraries that whet uses."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("whet")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(ConsoleHandler())
        logger.propagate = False
    for handler in logger.handlers:
        if isinstance(handler, ConsoleHandler):  # not the logger's level: it also writes log.txt
            handler.setLevel(logging.WARNING if quiet else logging.INFO)


@contextlib.contextmanager
def show_progress(*, quiet: bool = False) -> "Iterator[RunProgress]":
    """Yield a callback that shows the progress of runs, unless `quiet`; Ctrl-C exits with code 130."""
    from rich.console import Console

    from whet.reporting.progress import RunProgress

    set_up_logging(quiet=quiet)
    progress = RunProgress(Console(quiet=True) if quiet else stderr_console())
    try:
        yield progress
    except KeyboardInterrupt as interrupted:
        progress.close()
        stderr_console().print(str(interrupted) or "interrupted", highlight=False)
        raise typer.Exit(130) from interrupted
    finally:
        progress.close()
