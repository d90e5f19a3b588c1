"""log.txt: what whet said during a run, kept beside it."""

import contextlib
import logging
from pathlib import Path
from types import TracebackType


class RunLog(logging.Handler):
    """Collects lines from the start, and writes them once the run has a directory."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self._logger = logger
        self._waiting: list[str] = []
        self._path: Path | None = None

    def __enter__(self) -> "RunLog":
        self._level = self._logger.level
        self._logger.setLevel(min(self._logger.getEffectiveLevel(), logging.INFO))
        self._logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._path is not None:
            self._write(f"{kind.__name__ if kind else 'error'}: {error}")
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def keep_in(self, path: Path) -> None:
        """Write what was said so far, and everything from now on."""
        self._path = path
        self._write(*self._waiting)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        line = self.format(record)
        if self._path is None:
            self._waiting.append(line)
        else:
            self._write(line)

    def _write(self, *lines: str) -> None:
        assert self._path is not None
        # a full disk, a directory that is gone: no reason to end a run
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
