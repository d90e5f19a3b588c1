"""The console for messages and progress: standard error, with control characters escaped."""

import contextlib
import logging
import os
import sys
from functools import cache
from typing import IO, TYPE_CHECKING, Any, cast

from whet.error_boundary import escape_control_characters
from whet.runs.run_log import LineFormatter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.segment import Segment


@cache
def stderr_console() -> "Console":
    """Return the shared console on standard error, for messages and progress."""
    return escaping_console(cast("IO[str]", _StandardError()))


def escaping_console(file: IO[str]) -> "Console":
    """Return a rich console that escapes control characters in text; only rich may send escape sequences."""
    from rich.console import Console
    from rich.segment import Segment

    class EscapingConsole(Console):
        def render(self, *arguments: Any, **options: Any) -> "Iterator[Segment]":  # Any: rich's signature
            for segment in super().render(*arguments, **options):
                yield (
                    segment
                    if segment.control
                    else Segment(escape_control_characters(segment.text), segment.style)
                )

    # emoji=False: the colons in "synth:house:40" are not an emoji code
    return EscapingConsole(file=file, soft_wrap=True, emoji=False, markup=False, highlight=False)


class _StandardError:
    """Standard error that ignores a closed pipe, which must not end a run."""

    def write(self, text: str) -> int:
        with discard_after_error(sys.stderr):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with discard_after_error(sys.stderr):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stderr, name)


@contextlib.contextmanager
def discard_after_error(stream: IO[str], *, reraise: int | None = None) -> "Iterator[None]":
    """If writing to a stream fails, discard all later output; raise the error if its errno is `reraise`."""
    try:
        yield
    except OSError as error:
        if error.errno == reraise:
            raise
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


class ConsoleHandler(logging.Handler):
    """Print log lines on the console that owns the progress bar, because other output would break the bar."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record as one line."""
        stderr_console().print(self.format(record), highlight=False, markup=False)
