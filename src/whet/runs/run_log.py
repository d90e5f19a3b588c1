"""Log output of a run: the format of log lines on the terminal, and log.txt in the run directory."""

import contextlib
import logging
from pathlib import Path
from types import TracebackType


class LineFormatter(logging.Formatter):
    """Formats log lines for the terminal: the message, prefixed with `warning: ` for warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted line of a log record."""
        return f"{'warning: ' if record.levelno >= logging.WARNING else ''}{super().format(record)}"


class RunLog(logging.Filter):
    """A context manager that buffers log lines until the run directory exists, then writes them to log.txt.

    It lowers the logger's level to INFO. It is a filter, so it sees every line before the handlers do, and
    passes on only the lines that the original level allows.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._formatter = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._null_handler = logging.NullHandler()  # without any handler, Python prints warnings itself
        self._logger = logger
        self._buffer: list[str] = []
        self._path: Path | None = None

    def __enter__(self) -> "RunLog":
        self._original_level = self._logger.level
        self._handler_level = self._logger.getEffectiveLevel()
        self._logger.setLevel(min(self._handler_level, logging.INFO))
        self._logger.addFilter(self)
        self._logger.addHandler(self._null_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._path is not None:
            self._write(f"{kind.__name__ if kind else 'error'}: {error}")
        self._logger.removeHandler(self._null_handler)
        self._logger.removeFilter(self)
        self._logger.setLevel(self._original_level)

    def write_to(self, path: Path) -> None:
        """Write the buffered lines, and all later ones, to a file."""
        self._path = path
        self._write(*self._buffer)

    def filter(self, record: logging.LogRecord) -> bool:
        """Record a line, and return whether handlers receive it, too."""
        line = self._formatter.format(record)
        if self._path is None:
            self._buffer.append(line)
        else:
            self._write(line)
        return record.levelno >= self._handler_level

    def _write(self, *lines: str) -> None:
        assert self._path is not None
        # a full disk or a deleted directory must not end the run
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
