"""Input that whet did not write: failures of the libraries that read it, and its text on a terminal."""

import contextlib
import errno
import os
import re
import sys
import threading
from collections.abc import Iterator

from whet.errors import ModelError, RunError, WhetError

_LONGEST_REASON = 300  # characters
_CONTROLS = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # C0, C1; tab and newline stay
_OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory", "DefaultCPUAllocator"),
    *("bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED"),
)
_PANICKED = re.compile(rb"^thread '[^\n]*' (\(\d+\) )?panicked at ", re.MULTILINE)
_STDERR_LOCK = threading.Lock()


@contextlib.contextmanager
def wrong_input(
    problem: str, *, kind: type[WhetError] = ModelError, hint: str | None = None
) -> Iterator[None]:
    """Turn whatever a library raises inside, Rust panics included, into one error that begins with `problem`.

    For code that opens or parses a file: what goes wrong there is wrong with the file. Errors of whet's own,
    interruptions and a lack of memory pass unchanged.
    """
    try:
        yield
    except WhetError:
        raise
    except BaseException as error:
        if is_out_of_memory(error) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise kind(f"{problem}: {reason(error)}", hint=hint) from error


def reason(error: BaseException) -> str:
    """Return what an exception says, on one line of bounded length."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said = str(error)[: 4 * _LONGEST_REASON].partition("Exception raised from ")[0]  # torch's C++ frames
    text = " ".join(said.split())
    text = f"{text[:_LONGEST_REASON]}..." if len(text) > _LONGEST_REASON else text
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if text and isinstance(error, OSError | ValueError) else named


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked: PyO3 raises that as a BaseException of a type that cannot be imported."""
    return type(error).__name__ == "PanicException"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the CPU or a GPU has run out of memory; torch says the former with a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def out_of_memory(error: BaseException) -> RunError:
    """Return the error that names what to change when memory runs out."""
    return RunError(
        f"out of memory ({reason(error)})",
        hint="in training, lower run.micro_batch_tokens, set run.grad_checkpoint=true, shorten "
        "data.max_length, or set method.kind=lora or qlora (whet plan estimates the memory); "
        "otherwise use a smaller model, shorter texts or fewer at once",
    )


@contextlib.contextmanager
def memory_knobs_named() -> Iterator[None]:
    """Say what to change when memory runs out inside."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error) from error


def printable(text: str) -> str:
    r"""Escape control characters, which a terminal would obey: ESC becomes \x1b. Tabs and newlines stay."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(text: str) -> str:
    r"""Escape control characters, tabs and newlines too: for names and other text within a line."""
    return printable(text.replace("\t", "\\t").replace("\n", "\\n"))


@contextlib.contextmanager
def panics_hidden() -> Iterator[None]:
    """Keep what Rust writes to standard error when it panics off the terminal: the exception says it.

    Python's own messages pass; what other code writes to the descriptor meanwhile is delayed until the end.
    """
    if not _STDERR_LOCK.acquire(blocking=False):  # another thread does it already
        yield
        return
    try:
        with contextlib.ExitStack() as restored:
            _capture_stderr(restored)
            yield
    finally:
        _STDERR_LOCK.release()


def _capture_stderr(restored: contextlib.ExitStack) -> None:
    python = sys.stderr
    try:
        python.flush()
        terminal = os.dup(2)
    except (OSError, ValueError, AttributeError):  # closed: nothing to hide
        return
    import tempfile

    captured = restored.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    os.dup2(captured.fileno(), 2)

    def restore() -> None:
        os.dup2(terminal, 2)
        os.close(terminal)
        captured.seek(0)
        written = captured.read()
        if written and not _PANICKED.search(written):
            with contextlib.suppress(OSError):
                os.write(2, written)

    restored.callback(restore)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if python.fileno() == 2:
            sys.stderr = open(  # noqa: SIM115 - closed below, after the last message
                terminal, "w", buffering=1, encoding=python.encoding, errors=python.errors, closefd=False
            )
            # the last added is called first: no thread sees it closed
            restored.callback(sys.stderr.close)
            restored.callback(setattr, sys, "stderr", python)
