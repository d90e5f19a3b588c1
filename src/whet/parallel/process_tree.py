"""Find, reap and kill the processes that a process has started, also those that moved to another session."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

_KILL_S = 10.0  # a limit, because processes of another user or stuck in the kernel do not end


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process instead of init's; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def descendants() -> list[int]:
    """Return the pids of all processes below this one."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


def kill_descendants() -> None:
    """Kill descendants until none is left; orphans become children of this process and are killed, too."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        reap_children()
        children = _kill(descendants())
        if not kill_session(os.getpid()) and not children:
            return
        time.sleep(0.01)


def kill_session(leader: int) -> bool:
    """Send SIGKILL to every process of a session except its leader; return whether there were any."""
    return _kill(pid for pid in psutil.pids() if pid != leader and _session_of(pid) == leader)


def reap_children() -> dict[int, int]:
    """Return the wait statuses of children and adopted orphans that have exited since the last call."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (exited := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[exited[0]] = exited[1]
    return statuses


def _kill(pids: Iterable[int]) -> bool:
    killed = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            killed = True
    return killed


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
