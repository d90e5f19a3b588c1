"""The process between a run and a reward worker. It kills the worker and all processes the worker started.

The supervisor is a session leader. On Linux it also adopts orphans (PR_SET_CHILD_SUBREAPER), to kill children
that moved to another session. It exits when the worker exits, on SIGTERM, and when the run exits: the request
pipe hangs up even after kill -9.
"""

import os
import select
import signal
import threading
import traceback
from typing import NoReturn

from whet.parallel.launch import die_with_parent
from whet.parallel.process_tree import adopt_orphans, kill_descendants, reap_children
from whet.rl.rewards import worker

_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


def main() -> None:
    """Fork a worker that communicates on stdin and stdout, wait for it or the run to end, and clean up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # sigwait receives them; they never interrupt cleanup
    signal.signal(signal.SIGCHLD, lambda *_: None)  # macOS does not report signals ignored by default
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    pid = os.fork()  # before any thread is started
    if pid == 0:
        _become_worker(os.getppid())
    os.close(1)  # otherwise the reply pipe would stay open after the worker exits
    threading.Thread(target=_wait_for_hangup, daemon=True).start()
    while pid not in reap_children() and signal.sigwait(_SIGNALS) != signal.SIGTERM:
        pass
    kill_descendants()
    os._exit(0)


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
