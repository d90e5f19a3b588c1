"""Where commands print: results on standard output, everything said on the way on standard error."""

import contextlib
import errno
import logging
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, cast

import typer

from whet.error_boundary import printable
from whet.errors import ConfigError, StorageError
from whet.reporting.console import NotesHandler, escaping_console, let_go_of, notes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from whet.reporting.progress import RunProgress


def results() -> "Console":
    """The console for results that are more than lines; it replaces what its encoding does not have."""
    file = sys.stdout.stream if isinstance(sys.stdout, _Escaped) else sys.stdout
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="replace")
    return escaping_console(file)


class _Escaped:
    """A terminal on which whatever is printed is text: a model's answer may hold escape sequences."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def escape_terminal() -> None:
    """Show control characters that are printed to a terminal; files and pipes get every byte as it is."""
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = cast("TextIO", _Escaped(sys.stdout))


def say(text: str) -> None:
    """Print a line on standard output, if anybody is there to read it."""
    with let_go_of(sys.stdout, but=errno.ENOSPC):
        print(printable(text), flush=True)


@contextlib.contextmanager
def writing_to(path: str | None, option: str) -> "Iterator[None]":
    """An option that names a file where there is no directory is wrong input; a full disk is not."""
    try:
        yield
    except StorageError as error:
        if path is None or Path(path).absolute().parent.is_dir():
            raise
        raise ConfigError(error.message, hint=f"{option} names a file in a directory that exists") from error


def set_up_logging(*, quiet: bool = False) -> None:
    """Show whet's own lines (`quiet`: only warnings), and keep the libraries below quiet."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("whet")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(NotesHandler())
        logger.propagate = False
    for handler in logger.handlers:
        if isinstance(handler, NotesHandler):  # the logger itself also feeds log.txt
            handler.setLevel(logging.WARNING if quiet else logging.INFO)


@contextlib.contextmanager
def progress_shown(*, quiet: bool = False) -> "Iterator[RunProgress]":
    """Show the progress of runs, unless `quiet`; an interruption is reported, and exits with 130."""
    from rich.console import Console

    from whet.reporting.progress import RunProgress

    set_up_logging(quiet=quiet)
    progress = RunProgress(Console(quiet=True) if quiet else notes())
    try:
        yield progress
    except KeyboardInterrupt as interrupted:
        progress.close()
        notes().print(str(interrupted) or "interrupted", highlight=False)
        raise typer.Exit(130) from interrupted
    finally:
        progress.close()
