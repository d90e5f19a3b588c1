"""A watchdog that ends all ranks, with one error message, if a rank dies, hangs or fails.

Each rank writes heartbeats with its current activity into the store of the rendezvous, and a thread reads
those of the other ranks. Collectives alone would time out after many minutes, without naming rank and step.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from whet.errors import RunError, WhetError

TIMEOUT_S = 50.0  # after the first step; including the time to end all ranks, under a minute
START_TIMEOUT_S = 1800.0  # before the first step, when models are loaded and layers compiled
LONG_TIMEOUT_S = 3600.0  # of long operations, such as saving a large model to a slow disk
FAILED = 1
STARTING = "starting"
_FAILURE_KEY = "failure"  # in the store: the rank that reports why the run failed
_DEATH_S = 5.0  # time to detect a dead process after its connections broke


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # only Linux has these files
        return f"{socket.gethostname()} {uuid.getnode()}"


@dataclass
class Heartbeat:
    """The state of a rank, which it writes to the store. Only the rank itself changes it."""

    step: int = 0
    activity: str = STARTING
    collective: str = "none"  # the last collective that the rank has entered
    waiting: bool = False  # whether it is still in that collective
    activity_timeout_s: float = START_TIMEOUT_S  # timeout of the current activity
    count: int = 0  # increases with every change of activity
    sequence: int = 0  # increases with every heartbeat; a suspended process sends none
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=_machine)  # where `pid` is valid; host names may not be unique

    def describe(self) -> str:
        """Return the step, the activity and the last collective for a message."""
        if self.waiting:
            return f"at step {self.step}, waiting in {self.collective}"
        after = "" if self.collective == "none" else f", after {self.collective}"
        return f"at step {self.step}, {self.activity}{after}"


@dataclass
class _PeerState:
    """The last heartbeat of a rank, and when it changed, by the clock of the observing rank."""

    heartbeat: Heartbeat
    heartbeat_at: float  # when the last heartbeat arrived
    progress_at: float  # when the activity last changed

    def update(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.sequence != self.heartbeat.sequence:
            self.heartbeat_at = now
        if heartbeat.count != self.heartbeat.count:
            self.progress_at = now
        self.heartbeat = heartbeat


class Watchdog:
    """The watchdog of one rank, which observes all ranks. It does nothing in a run of one rank.

    Args:
        store: a torch store that all ranks share.
        rank: this process's rank.
        size: the number of ranks.
        timeout_s: how long a rank may send no heartbeat or make no progress after its first step.
    """

    def __init__(
        self, store: Any = None, *, rank: int = 0, size: int = 1, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout_s = timeout_s
        self.heartbeat = Heartbeat()
        # a separate connection, because the original may be blocked; Any: torch's stores have no types
        self._store: Any = None if store is None else store.clone()
        self._peers: dict[int, _PeerState] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._activity_timeout_s = START_TIMEOUT_S

    @property
    def _interval_s(self) -> float:
        return min(1.0, self.timeout_s / 20)

    def start(self) -> None:
        """Start to send heartbeats and to observe those of the other ranks."""
        if self._store is None or self.size == 1:
            return
        self._checked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="whet-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._run_guard, name="whet-guard", daemon=True).start()

    def stop(self) -> None:
        """Stop observing, because all ranks are done."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(self.timeout_s)
            self._thread = None

    def report_activity(self, activity: str, *, collective: str | None = None) -> None:
        """Report the current activity of this rank, which counts as progress.

        Args:
            activity: the activity.
            collective: a collective that is part of the activity.
        """
        self.heartbeat.activity = activity
        self.heartbeat.collective = collective or self.heartbeat.collective
        self.heartbeat.activity_timeout_s = self._activity_timeout_s
        self.heartbeat.count += 1

    def report_step(self, step: int) -> None:
        """Report a completed step; from now on the normal timeout applies."""
        self.heartbeat.step = step
        self._activity_timeout_s = self.timeout_s
        self.report_activity("between steps")
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the thread gets the same error and handles it
                self._send_heartbeat()  # a step may be shorter than the interval of the thread

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Report that this rank is in a collective within the `with` block."""
        self.heartbeat.collective, self.heartbeat.waiting = name, True
        self.heartbeat.count += 1
        yield  # not in a try block: after an error the heartbeat still names the collective
        self.heartbeat.waiting = False
        self.heartbeat.count += 1

    @contextlib.contextmanager
    def long_operation(self, activity: str) -> Iterator[None]:
        """Report a long operation within the `with` block, with a timeout of at least an hour."""
        previous, previous_timeout_s = self.heartbeat.activity, self._activity_timeout_s
        self._activity_timeout_s = max(previous_timeout_s, LONG_TIMEOUT_S)
        self.report_activity(activity)
        yield
        self._activity_timeout_s = previous_timeout_s
        self.report_activity(previous)

    def claim_report(self, error: BaseException) -> bool:
        """Return whether this rank should print the reason why the run failed; the other ranks then end.

        If another rank dies, the broken connection looks like a failure of this rank. For such errors, wait
        first: the watchdog thread may find the dead rank, report it and end this process.
        """
        if self._thread is None:
            return True
        deadline = time.monotonic() + max(_DEATH_S, 4 * self._interval_s)
        while _is_broken_connection(error) and time.monotonic() < deadline:
            time.sleep(0.05)
        is_first = self._claim_report()
        self._stopped.set()
        return is_first

    def add_rank_context(self, error: Exception) -> Exception:
        """Return an error that names the rank, the step, the activity and the last collective."""
        if (
            self._thread is None
            or self.heartbeat.activity == STARTING
            or getattr(error, "is_collective", False)
        ):
            return error
        text = error.message if isinstance(error, WhetError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, WhetError) else "run it again with --debug for the traceback"
        located = RunError(f"rank {self.rank} failed {self.heartbeat.describe()}: {text}", hint=hint)
        located.exit_code = getattr(error, "exit_code", FAILED)
        return located

    def fail(self, error: BaseException) -> None:
        """Report that this rank ends with an error, so that the other ranks end, too."""
        if self._thread is not None:
            self.claim_report(error)
            self._keep_store_alive()

    def _run(self) -> None:
        """Send a heartbeat and check the other ranks, in a loop."""
        try:
            self._send_heartbeat()
            keys = [f"heartbeat/{rank}" for rank in range(self.size)]
            self._store.wait(keys, timedelta(seconds=START_TIMEOUT_S))
            while True:
                self._check_peers(time.monotonic())
                self._checked_at = time.monotonic()
                if self._stopped.wait(self._interval_s):
                    return
                self._send_heartbeat()
        except RuntimeError:  # the store is gone, and with it the process that hosted it
            if not self._stopped.wait(2 * self._interval_s):
                self._handle_lost_store("died")

    def _run_guard(self) -> None:
        """Detect that the thread in `_run` is blocked, as happens if the host of the store is suspended."""
        while not self._stopped.wait(self._interval_s):
            if time.monotonic() - self._checked_at > self._heartbeat_timeout_s(self.heartbeat):
                self._handle_lost_store(f"sent no heartbeat for {self.timeout_s:g} s,")

    def _heartbeat_timeout_s(self, heartbeat: Heartbeat) -> float:
        """Return how long a rank may send no heartbeat; loading may hold the interpreter lock for long."""
        return self.timeout_s if heartbeat.step else START_TIMEOUT_S

    def _send_heartbeat(self) -> None:
        self.heartbeat.sequence += 1
        self._store.set(f"heartbeat/{self.rank}", json.dumps(asdict(self.heartbeat)))

    def _check_peers(self, now: float) -> None:
        if self._store.check([_FAILURE_KEY]):
            self._end(None)
        for rank, text in enumerate(
            self._store.multi_get([f"heartbeat/{rank}" for rank in range(self.size)])
        ):
            heartbeat = Heartbeat(**json.loads(text))
            if rank in self._peers:
                self._peers[rank].update(heartbeat, now)
            else:
                self._peers[rank] = _PeerState(heartbeat, now, now)
        if (failure := self._find_failure(now)) is not None and not self._stopped.is_set():
            self._end(*failure)

    def _find_failure(self, now: float) -> tuple[str, Heartbeat] | None:
        """Return a message about a rank that died, is suspended or hangs, and its last heartbeat."""
        for rank, peer in self._peers.items():
            last = peer.heartbeat
            name = f"rank {rank} (process {last.pid} on {last.host})"
            if last.machine == self.heartbeat.machine and not _is_running(last.pid):
                return f"{name} died {last.describe()}", last
            if now - peer.heartbeat_at > self._heartbeat_timeout_s(last):
                return f"{name} sent no heartbeat for {self.timeout_s:g} s, {last.describe()}", last
        late = {
            rank: peer
            for rank, peer in self._peers.items()
            if now - peer.progress_at > max(self.timeout_s, peer.heartbeat.activity_timeout_s)
        }
        working = {rank: peer for rank, peer in late.items() if not peer.heartbeat.waiting}
        if not working and len(late) < len(self._peers):
            return None  # the late ranks wait in a collective for a rank that makes progress
        culprits = working or late
        if not culprits:
            return None
        first = min(culprits, key=lambda rank: culprits[rank].progress_at)
        culprit = culprits[first]
        others = "; ".join(
            f"rank {rank} is {peer.heartbeat.describe()}"
            for rank, peer in self._peers.items()
            if rank != first
        )
        duration = f"for {now - culprit.progress_at:.0f} s"
        return f"rank {first} hangs {culprit.heartbeat.describe()}, {duration} ({others})", culprit.heartbeat

    def _kill(self, heartbeat: Heartbeat) -> None:
        """Kill a rank of this machine, which may hang and cannot be asked to end."""
        if heartbeat.machine == self.heartbeat.machine and heartbeat.pid not in (0, self.heartbeat.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(heartbeat.pid, signal.SIGKILL)

    def _claim_report(self) -> bool:
        """Return whether this rank is the first to claim the report of the failure."""
        try:
            return bool(self._store.compare_set(_FAILURE_KEY, "", str(self.rank)) == str(self.rank).encode())
        except RuntimeError:  # the rank that hosted the store has ended, which is the failure
            return False

    def _end(self, message: str | None, culprit: Heartbeat | None = None) -> None:
        """Kill the culprit and end this process, even if it is blocked; one rank prints the message."""
        if message is not None and self._claim_report():
            _print_error(message)
        if culprit is not None:
            time.sleep(4 * self._interval_s)  # it may host the store, which the other ranks still read
            self._kill(culprit)
        self._keep_store_alive()
        os._exit(FAILED)

    def _keep_store_alive(self) -> None:
        """Wait on rank 0, which may host the store, until the other ranks have read the failure or ended."""
        deadline = time.monotonic() + 4 * self._interval_s
        others = [peer.heartbeat for rank, peer in self._peers.items() if rank != self.rank]
        while self.rank == 0 and time.monotonic() < deadline:
            local = [heartbeat for heartbeat in others if heartbeat.machine == self.heartbeat.machine]
            if others == local and others and not any(_is_running(each.pid) for each in local):
                return
            time.sleep(0.05)

    def _handle_lost_store(self, reason: str) -> None:
        """End this process; rank 1 reports that the host of the store (rank 0, or torchrun) has failed."""
        if self.rank == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _print_error(f"torchrun on the first machine {reason} {self.heartbeat.describe()}")
        elif self.rank != 0:
            host = self._peers[0].heartbeat if self._peers else Heartbeat(pid=0)
            self._kill(host)
            if self.rank == 1:
                _print_error(f"rank 0 (process {host.pid} on {host.host}) {reason} {host.describe()}")
        os._exit(FAILED)


def _print_error(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()


def _is_running(pid: int) -> bool:
    """Return whether a process of this machine exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):  # only Linux has this file
        return True


def _is_broken_connection(error: BaseException) -> bool:
    """Return whether gloo or NCCL may have raised the error because another process has ended."""
    words = ("connection", "gloo", "nccl", "timed out", "socket")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
