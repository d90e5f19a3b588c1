"""The process between a run and a reward worker: it ends the worker and every process that the worker left.

It leads a session, and on Linux adopts orphans (PR_SET_CHILD_SUBREAPER), so that children which moved to a
session of their own are ended, too. It ends with the worker, on SIGTERM, and when the run is gone: the
request pipe hangs up even after kill -9.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import NoReturn

import psutil

from whet.parallel.launch import end_with_parent
from whet.rl.rewards import worker

_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_KILL_S = 10.0  # for processes to end; those of another user, or stuck in the kernel, do not


def main() -> None:
    """Fork a worker that talks on stdin and stdout; wait until it or the run has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # waited for below: none interrupts the killing
    signal.signal(signal.SIGCHLD, lambda *_: None)  # macOS does not report what is ignored by default
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    end_with_parent(signal.SIGTERM)
    pid = os.fork()  # before any thread is started
    if pid == 0:
        _become_worker(os.getppid())
    os.close(1)  # else its end would not be the end of the worker's answers
    threading.Thread(target=_wait_for_hangup, daemon=True).start()
    while pid not in _reaped() and signal.sigwait(_SIGNALS) != signal.SIGTERM:
        pass
    _kill_descendants()
    os._exit(0)


def kill_session(leader: int) -> bool:
    """Send SIGKILL to every process of a session except its leader; return whether there was one."""
    return _kill(pid for pid in psutil.pids() if pid != leader and _session_of(pid) == leader)


def _become_worker(supervisor: int) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.setpgid(0, 0)  # a reward that kills its process group does not reach the supervisor
        end_with_parent()
        if os.getppid() == supervisor:
            worker.main()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _wait_for_hangup() -> None:
    hangup = select.poll()
    hangup.register(0, 0)  # no event but POLLHUP, which needs no registration
    hangup.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_descendants() -> None:
    """Kill until none is left: whoever is orphaned by that becomes a child of this process."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        _reaped()
        children = _kill(child.pid for child in psutil.Process().children(recursive=True))
        if not kill_session(os.getpid()) and not children:
            return
        time.sleep(0.01)


def _reaped() -> list[int]:
    """Children, and orphans that have become some, that have ended since this was called last."""
    ended: list[int] = []
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.append(pid)
    return ended


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
