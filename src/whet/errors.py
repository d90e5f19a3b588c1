"""The errors a user can act on: what is wrong, where, and what to do about it."""

import contextlib
import reprlib
from collections.abc import Iterator

_LONGEST_LINE = 2000
_LONGEST_VALUE = 120


class WhetError(Exception):
    """A failure with a message for the user and, where there is one, a hint how to mend it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        # some message or other quotes a value of any size
        message = "\n".join(shorten(line, _LONGEST_LINE) for line in message.split("\n"))
        super().__init__(message)
        self.message = message
        self.hint = hint and shorten(hint, _LONGEST_LINE)

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(WhetError):
    """The configuration is wrong."""

    exit_code = 2


class DataError(WhetError):
    """A data source or a record is wrong."""

    exit_code = 2


class ModelError(WhetError):
    """A model, its files or its name is wrong."""

    exit_code = 2


class CheckpointError(WhetError):
    """A checkpoint or a run directory cannot be used."""

    exit_code = 2


class RunError(WhetError):
    """The run itself failed."""

    exit_code = 1


class StorageError(RunError):
    """The disk is full, or a directory is gone or may not be written to."""


@contextlib.contextmanager
def blamed_on(key: str) -> Iterator[None]:
    """Put a config key before the errors raised inside: the one that named what is wrong."""
    try:
        yield
    except WhetError as error:
        if error.message.startswith(key):
            raise
        raise type(error)(f"{key}: {error.message}", hint=error.hint) from error


def check_positive(**counts: int) -> None:
    """Refuse a count below one, by its name."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, not {count}")


def shorten(text: str, longest: int = _LONGEST_VALUE) -> str:
    """Return a text as a message shows it: cut in the middle where it has more characters than `longest`."""
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]} ... ({len(text)} characters) ... {text[-longest // 6 :]}"


class _Shown(reprlib.Repr):
    """Python's notation for a value, of which only as much is built as is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 120, 120
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8

    def repr_int(self, value: int, level: int) -> str:
        """An integer, which Python itself refuses to write where it is long."""
        return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length():,} bits"


def shown(value: object) -> str:
    """Return repr(value) for a message: long, deep and shared values are cut."""
    return shorten(_Shown().repr(value))
