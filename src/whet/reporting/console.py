"""The console for messages and progress: standard error, on which text stays text."""

import contextlib
import logging
import os
import sys
from functools import cache
from typing import IO, TYPE_CHECKING, Any, cast

from whet.error_boundary import printable
from whet.runs.run_log import LineFormatter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.segment import Segment


@cache
def notes() -> "Console":
    """The console for messages and progress."""
    return escaping_console(cast("IO[str]", _StandardError()))


def escaping_console(file: IO[str]) -> "Console":
    """A console on which text is text: only rich itself sends escape sequences to the terminal."""
    from rich.console import Console
    from rich.segment import Segment

    class EscapingConsole(Console):
        def render(self, *arguments: Any, **options: Any) -> "Iterator[Segment]":  # Any: as rich has it
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    # synth:house: is no emoji
    return EscapingConsole(file=file, soft_wrap=True, emoji=False, markup=False, highlight=False)


class _StandardError:
    """Standard error, for as long as somebody reads it: a closed pipe must not end a run."""

    def write(self, text: str) -> int:
        with let_go_of(sys.stderr):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with let_go_of(sys.stderr):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stderr, name)


@contextlib.contextmanager
def let_go_of(stream: IO[str], *, but: int | None = None) -> "Iterator[None]":
    """Where a stream can no longer be written to, drop what is written from now on; `but` stays an error."""
    try:
        yield
    except OSError as error:
        if error.errno == but:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class NotesHandler(logging.Handler):
    """Log lines through the console that owns the progress bar, so that they do not tear it."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        notes().print(self.format(record), highlight=False, markup=False)
