"""Several processes of one command on this machine, as torchrun would start them, without torch."""

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
_GRACE_S = 10.0  # for the others to notice that one has failed


def launch(arguments: Sequence[str], count: int, *, restarts: int = 0) -> int:
    """Run `whet ARGUMENTS` in `count` processes and return the exit code of all together.

    A process that fails takes the others with it; all are started again as often as `restarts` says, and go
    on from the last checkpoint.
    """
    if "RANK" in os.environ:
        raise ConfigError("--nproc starts processes, and torchrun has started this one", hint="leave out one")
    stopped: list[int] = []  # signals that came
    for restart in range(restarts):
        try:
            code = _launch_once(arguments, count, restart, stopped)
        except RunError as error:
            code = _complain(f"error: {error}")
        if code != FAILED or stopped:
            return code
        _complain(f"starting again ({restart + 1} of {restarts})")
    return _launch_once(arguments, count, restarts, stopped)


def catch_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:  # Any: handlers
    """Install a handler for Ctrl-C, SIGTERM and SIGHUP, and return the handlers that were there before.

    A signal that the process was started with as ignored stays ignored: SIGHUP under nohup, SIGINT in a
    background job of a script. Such a run is stopped with SIGTERM.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in caught}


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Get a signal as soon as the thread that started this process is gone, however it goes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def _complain(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return FAILED


def _launch_once(arguments: Sequence[str], count: int, restart: int, stopped: list[int]) -> int:
    """The same, once. Signals are passed on to all processes, and noted in `stopped`."""
    port = str(_free_port())
    started = [_start(arguments, rank, count, port, restart) for rank in range(count)]

    def pass_on(number: int, _: FrameType | None) -> None:
        stopped.append(number)
        _pass_on(number, started)

    before = catch_stop_signals(pass_on)
    try:
        return _wait(started, stopped)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    arguments: Sequence[str], rank: int, count: int, port: str, restart: int
) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // count)
    place = {
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
        env={**os.environ, **place},
        start_new_session=True,  # Ctrl-C comes to this process only, which passes it on: once
        preexec_fn=end_with_parent,  # noqa: PLW1509 # no threads are running here
    )


def _pass_on(number: int, started: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in started:
        if process.poll() is None:
            process.send_signal(number)


def _wait(started: Sequence["subprocess.Popen[bytes]"], stopped: Sequence[int]) -> int:
    """Until all have ended; 0 only where all of them did well."""
    failed_at: float | None = None
    bad: list[int] = []  # ranks that failed, the first one first
    while True:
        now = [process.poll() for process in started]
        failed = (rank for rank, code in enumerate(now) if code not in (None, 0, UNFINISHED))
        bad += [rank for rank in failed if rank not in bad]
        if None not in now:
            break
        if bad and failed_at is None:
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
            _pass_on(signal.SIGKILL, started)
        time.sleep(0.05)
    codes = [process.returncode for process in started]
    said = [codes[rank] for rank in bad if codes[rank] > 0]
    if stopped and any(codes):  # whatever a rank made of it: a second signal ends some where they are
        return UNFINISHED if UNFINISHED in codes else INTERRUPTED
    if bad and not said:  # else: one that failed has said why, and the others were ended for it
        by = signal.Signals(-codes[bad[0]]).name
        raise RunError(f"rank {bad[0]} of {len(codes)} was ended by {by}")
    return said[0] if said else max(codes)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
