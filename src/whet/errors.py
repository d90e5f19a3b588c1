"""Exceptions with messages for users: what is wrong, where, and how to fix it."""

import contextlib
import reprlib
from collections.abc import Iterator

_MAX_LINE = 2000  # characters of a message
_MAX_VALUE = 120  # characters of a quoted value


class WhetError(Exception):
    """Base class of whet's errors: a message for the user and, optionally, a hint how to fix the problem.

    Attributes:
        message: The problem and its location.
        hint: How to fix it, or None.
        exit_code: The exit code of the command line.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        # messages may quote values of any size
        message = "\n".join(shorten(line, _MAX_LINE) for line in message.split("\n"))
        super().__init__(message)
        self.message = message
        self.hint = hint and shorten(hint, _MAX_LINE)

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(WhetError):
    """A config key, an option or an argument is invalid."""

    exit_code = 2


class DataError(WhetError):
    """A data source or a record is invalid."""

    exit_code = 2


class ModelError(WhetError):
    """A model, its files or its name is invalid."""

    exit_code = 2


class CheckpointError(WhetError):
    """A checkpoint or a run directory cannot be used."""

    exit_code = 2


class RunError(WhetError):
    """A run failed."""

    exit_code = 1


class CheckError(RunError):
    """A result was refused, because a check of it failed."""

    exit_code = 4


class StorageError(RunError):
    """A file could not be written: the disk is full, or the directory is missing or not writable."""


@contextlib.contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    """Prefix the errors raised inside with the config key that caused them."""
    try:
        yield
    except WhetError as error:
        if error.message.startswith(key):
            raise
        raise type(error)(f"{key}: {error.message}", hint=error.hint) from error


def check_positive(**counts: int) -> None:
    """Raise a ConfigError for the first argument that is below 1.

    Args:
        **counts: The values by name, such as `steps=0`.
    """
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, not {count}")


def shorten(text: str, max_length: int = _MAX_VALUE) -> str:
    """Shorten text for a message: replace the middle if it has more than `max_length` characters."""
    if len(text) <= max_length:
        return text
    return f"{text[: max_length * 2 // 3]} ... ({len(text)} characters) ... {text[-max_length // 6 :]}"


class _LimitedRepr(reprlib.Repr):
    """A repr with limited depth and length, which does not build more than it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 120, 120
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8

    def repr_int(self, value: int, level: int) -> str:
        """Return an integer, or only its size if it is long, for which Python's repr raises an error."""
        return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length():,} bits"


def short_repr(value: object) -> str:
    """Return repr(value) for a message, with long and deeply nested values shortened."""
    return shorten(_LimitedRepr().repr(value))
