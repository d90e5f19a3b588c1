"""Start one command in several processes on this machine, as torchrun does, without importing torch."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from whet.errors import ConfigError, RunError

FAILED, UNFINISHED, INTERRUPTED = 1, 3, 130  # exit codes; only the first is a failure
_GRACE_S = 10.0  # for the other processes to end after one has failed


def launch(arguments: Sequence[str], count: int, *, restarts: int = 0) -> int:
    """Run `whet ARGUMENTS` in `count` processes and return their common exit code.

    If one process fails, the others are ended.

    Args:
        arguments: the command line after `whet`.
        count: the number of processes.
        restarts: how often all processes are restarted after a failure; they resume from the last checkpoint.

    Raises:
        ConfigError: torchrun has started this process.
        RunError: a signal ended a process, and no restarts are left.
    """
    if "RANK" in os.environ:
        raise ConfigError(
            "--nproc cannot be used in a process that torchrun has started", hint="use --nproc or torchrun"
        )
    signals: list[int] = []  # received stop signals
    for restart in range(restarts):
        try:
            code = _launch_once(arguments, count, restart, signals)
        except RunError as error:
            code = _print_failure(f"error: {error}")
        if code != FAILED or signals:
            return code
        _print_failure(f"restarting ({restart + 1} of {restarts})")
    return _launch_once(arguments, count, restarts, signals)


def catch_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:  # Any: handlers
    """Install a handler for SIGINT, SIGTERM and SIGHUP, and return the previous handlers.

    Signals that the process was started to ignore stay ignored: SIGHUP under nohup, SIGINT in a background
    job of a script. Such a run is stopped with SIGTERM.
    """
    stop_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [number for number in stop_signals if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in caught}


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when the thread that started it ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def _print_failure(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return FAILED


def _launch_once(arguments: Sequence[str], count: int, restart: int, signals: list[int]) -> int:
    """Launch without restarts; forward stop signals to all processes, and append them to `signals`."""
    port = str(_free_port())
    processes = [_start(arguments, rank, count, port, restart) for rank in range(count)]

    def forward(number: int, _: FrameType | None) -> None:
        signals.append(number)
        _send_signal(number, processes)

    previous_handlers = catch_stop_signals(forward)
    try:
        return _wait(processes, signals)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _start(
    arguments: Sequence[str], rank: int, count: int, port: str, restart: int
) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // count)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "whet", *arguments],
        env={**os.environ, **variables},
        start_new_session=True,  # Ctrl-C reaches the launcher only, which forwards it once
        preexec_fn=die_with_parent,  # noqa: PLW1509 # the launcher has no threads
    )


def _send_signal(number: int, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _wait(processes: Sequence["subprocess.Popen[bytes]"], signals: Sequence[int]) -> int:
    """Wait until all processes have ended; return 0 only if all of them succeeded."""
    failed_at: float | None = None
    failed_ranks: list[int] = []  # in the order of failure
    while True:
        current = [process.poll() for process in processes]
        failed = (rank for rank, code in enumerate(current) if code not in (None, 0, UNFINISHED))
        failed_ranks += [rank for rank in failed if rank not in failed_ranks]
        if None not in current:
            break
        if failed_ranks and failed_at is None:
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
            _send_signal(signal.SIGKILL, processes)
        time.sleep(0.05)
    codes = [process.returncode for process in processes]
    error_codes = [codes[rank] for rank in failed_ranks if codes[rank] > 0]
    if signals and any(codes):  # for any exit codes, because a second signal ends ranks abruptly
        return UNFINISHED if UNFINISHED in codes else INTERRUPTED
    if failed_ranks and not error_codes:  # otherwise a failed rank has printed the reason
        name = signal.Signals(-codes[failed_ranks[0]]).name
        raise RunError(f"rank {failed_ranks[0]} of {len(codes)} was terminated by {name}")
    return error_codes[0] if error_codes else max(codes)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port
