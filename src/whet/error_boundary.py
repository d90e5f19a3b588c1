"""Untrusted input: convert the exceptions of libraries that parse it, and escape it for terminals."""

import contextlib
import errno
import os
import re
import sys
import threading
from collections.abc import Iterator

from whet.errors import ModelError, RunError, WhetError

_MAX_REASON = 300  # characters
_CONTROLS = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # C0 and C1 except tab and newline
_OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory", "DefaultCPUAllocator"),
    *("bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED"),
)
_PANIC = re.compile(rb"^thread '[^\n]*' (\(\d+\) )?panicked at ", re.MULTILINE)
_STDERR_LOCK = threading.Lock()


@contextlib.contextmanager
def invalid_input_errors(
    problem: str, *, kind: type[WhetError] = ModelError, hint: str | None = None
) -> Iterator[None]:
    """Convert any exception raised inside, including Rust panics, to a WhetError.

    Use it around code that opens or parses a file, where every failure means that the file is invalid.
    WhetErrors, interruptions and out-of-memory errors pass unchanged.

    Args:
        problem: The start of the message; the reason of the exception follows.
        kind: The error to raise.
        hint: The hint of the error.
    """
    try:
        yield
    except WhetError:
        raise
    except BaseException as error:
        if is_out_of_memory(error) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise kind(f"{problem}: {error_text(error)}", hint=hint) from error


def error_text(error: BaseException) -> str:
    """Return the message of an exception on one line of limited length."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    message = str(error)[: 4 * _MAX_REASON].partition("Exception raised from ")[0]  # drops torch's C++ frames
    text = " ".join(message.split())
    text = f"{text[:_MAX_REASON]}..." if len(text) > _MAX_REASON else text
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if text and isinstance(error, OSError | ValueError) else named


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a Rust panic, a BaseException of PyO3 that cannot be imported."""
    return type(error).__name__ == "PanicException"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the CPU or a GPU ran out of memory; for the CPU, torch raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)


def out_of_memory_error(error: BaseException) -> RunError:
    """Return an error for running out of memory, with a hint on the settings that reduce it."""
    return RunError(
        f"out of memory ({error_text(error)})",
        hint="in training, lower run.micro_batch_tokens or data.max_length, set run.grad_checkpoint=true, "
        "or set method.kind=lora or qlora (whet plan estimates the memory); "
        "otherwise use a smaller model, shorter texts or a smaller batch",
    )


@contextlib.contextmanager
def out_of_memory_hints() -> Iterator[None]:
    """Convert out-of-memory errors raised inside to one with a hint on the settings to change."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error) from error


def escape_control_characters(text: str) -> str:
    r"""Escape control characters, which a terminal would interpret, except tabs and newlines."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def escape_to_one_line(text: str) -> str:
    r"""Escape control characters including tabs and newlines, for text within a line."""
    return escape_control_characters(text.replace("\t", "\\t").replace("\n", "\\n"))


@contextlib.contextmanager
def hide_rust_panics() -> Iterator[None]:
    """Hide the message that Rust prints to standard error on a panic: the exception repeats it.

    Output of Python passes through. Output of other code to the descriptor is delayed until the end.
    """
    if not _STDERR_LOCK.acquire(blocking=False):  # another thread captures stderr already
        yield
        return
    try:
        with contextlib.ExitStack() as stack:
            _capture_stderr(stack)
            yield
    finally:
        _STDERR_LOCK.release()


def _capture_stderr(stack: contextlib.ExitStack) -> None:
    stderr = sys.stderr
    try:
        stderr.flush()
        terminal = os.dup(2)
    except (OSError, ValueError, AttributeError):  # closed: nothing to hide
        return
    import tempfile

    captured = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    os.dup2(captured.fileno(), 2)

    def restore() -> None:
        os.dup2(terminal, 2)
        os.close(terminal)
        captured.seek(0)
        written = captured.read()
        if written and not _PANIC.search(written):
            with contextlib.suppress(OSError):
                os.write(2, written)

    stack.callback(restore)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stderr.fileno() == 2:
            sys.stderr = open(  # noqa: SIM115 - closed below, after the last message
                terminal, "w", buffering=1, encoding=stderr.encoding, errors=stderr.errors, closefd=False
            )
            # callbacks run in reverse order: sys.stderr is replaced before the file is closed
            stack.callback(sys.stderr.close)
            stack.callback(setattr, sys, "stderr", stderr)
