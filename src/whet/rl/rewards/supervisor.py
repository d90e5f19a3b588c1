"""The process between a run and a reward worker. It kills the worker and all processes the worker started.

The supervisor is a session leader. On Linux it also adopts orphans (PR_SET_CHILD_SUBREAPER), to kill children
that moved to another session. It exits when the worker exits, on SIGTERM, and when the run exits: the request
pipe hangs up even after kill -9.
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

from whet.parallel.launch import die_with_parent
from whet.rl.rewards import worker

_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_KILL_S = 10.0  # a limit, because processes of another user or stuck in the kernel do not end


def main() -> None:
    """Fork a worker that communicates on stdin and stdout, wait for it or the run to end, and clean up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # sigwait receives them; they never interrupt cleanup
    signal.signal(signal.SIGCHLD, lambda *_: None)  # macOS does not report signals ignored by default
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    die_with_parent(signal.SIGTERM)
    pid = os.fork()  # before any thread is started
    if pid == 0:
        _become_worker(os.getppid())
    os.close(1)  # otherwise the reply pipe would stay open after the worker exits
    threading.Thread(target=_wait_for_hangup, daemon=True).start()
    while pid not in _reap_children() and signal.sigwait(_SIGNALS) != signal.SIGTERM:
        pass
    _kill_descendants()
    os._exit(0)


def kill_session(leader: int) -> bool:
    """Send SIGKILL to every process of a session except its leader; return whether there were any."""
    return _kill(pid for pid in psutil.pids() if pid != leader and _session_of(pid) == leader)


def _become_worker(supervisor_pid: int) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.setpgid(0, 0)  # a reward that kills its process group does not reach the supervisor
        die_with_parent()
        if os.getppid() == supervisor_pid:
            worker.main()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _wait_for_hangup() -> None:
    poller = select.poll()
    poller.register(0, 0)  # POLLHUP is always reported
    poller.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_descendants() -> None:
    """Kill descendants until none is left; orphans become children of this process and are killed, too."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        _reap_children()
        children = _kill(child.pid for child in psutil.Process().children(recursive=True))
        if not kill_session(os.getpid()) and not children:
            return
        time.sleep(0.01)


def _reap_children() -> list[int]:
    """Return the pids of children and adopted orphans that have exited since the last call."""
    pids: list[int] = []
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            pids.append(pid)
    return pids


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
