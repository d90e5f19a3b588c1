"""Where commands print: results on standard output, everything said on the way on standard error."""

import logging
import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def notes() -> "Console":
    """The console for messages and progress."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, emoji=False, markup=False)  # synth:house: is no emoji


class _NotesHandler(logging.Handler):
    """Log lines through the console that owns the progress bar, so that they do not tear it."""

    def emit(self, record: logging.LogRecord) -> None:
        notes().print(self.format(record), highlight=False, markup=False)


def set_up_logging() -> None:
    """Show whet's own lines, and keep the libraries below quiet."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("whet")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_NotesHandler())
        logger.propagate = False
