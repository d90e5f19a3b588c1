"""Log lines: as people see them, and log.txt, which keeps those of a run beside it."""

import contextlib
import logging
from pathlib import Path
from types import TracebackType


class LineFormatter(logging.Formatter):
    """A log line as people see it: the message, with `warning: ` in front of warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return f"{'warning: ' if record.levelno >= logging.WARNING else ''}{super().format(record)}"


class RunLog(logging.Filter):
    """Collects the lines of a logger from the start, and writes them once the run has a directory.

    It lowers the logger's level to INFO. As a filter it sees every line before the handlers do, which go on
    receiving what the level allowed before.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._formatter = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._nowhere = logging.NullHandler()  # without any handler, Python prints warnings itself
        self._logger = logger
        self._waiting: list[str] = []
        self._path: Path | None = None

    def __enter__(self) -> "RunLog":
        self._level, self._shown_from = self._logger.level, self._logger.getEffectiveLevel()
        self._logger.setLevel(min(self._shown_from, logging.INFO))
        self._logger.addFilter(self)
        self._logger.addHandler(self._nowhere)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._path is not None:
            self._write(f"{kind.__name__ if kind else 'error'}: {error}")
        self._logger.removeHandler(self._nowhere)
        self._logger.removeFilter(self)
        self._logger.setLevel(self._level)

    def keep_in(self, path: Path) -> None:
        """Write what was said so far, and everything from now on."""
        self._path = path
        self._write(*self._waiting)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a line; return whether handlers receive it, too."""
        line = self._formatter.format(record)
        if self._path is None:
            self._waiting.append(line)
        else:
            self._write(line)
        return record.levelno >= self._shown_from

    def _write(self, *lines: str) -> None:
        assert self._path is not None
        # a full disk, a directory that is gone: no reason to end a run
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
