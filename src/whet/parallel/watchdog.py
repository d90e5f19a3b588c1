"""Signs of life: a rank that dies, hangs or fails ends the run for all, soon, and with one message.

Each rank puts what it is doing into the store that the ranks met through, and a thread looks at the signs of
the others. Collectives themselves would wait for many minutes, and then know neither who nor where.
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

LIMIT_S = 50.0  # after the first step; with the time to tell everybody, under a minute
START_S = 1800.0  # models are read and layers compiled before the first step is done
PATIENT_S = 3600.0  # for what may take long without a sign: a large model on its way to a slow disk
FAILED = 1
STARTING = "starting"
_FAILURE = "failure"  # in the store: which rank was the first to say why the run is over
_UNKNOWN_S = 5.0  # for a death to be seen after its connections broke


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # only Linux has these files
        return f"{socket.gethostname()} {uuid.getnode()}"


@dataclass
class Sign:
    """What a rank was last known to do. Only the rank itself changes it."""

    step: int = 0
    doing: str = STARTING
    collective: str = "none"  # the last one it has entered
    waiting: bool = False  # and is still in
    patience_s: float = START_S  # how long it may do the same
    count: int = 0  # of the things it has done
    beat: int = 0  # of its thread: a stopped process has none
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=_machine)  # where a process has this number: hosts may share names

    def describe(self) -> str:
        """Where it is, in words."""
        where = f"in {self.collective}" if self.waiting else f"{self.doing}, after {self.collective}"
        return f"at step {self.step}, {where}"


@dataclass
class _Seen:
    """What another rank was seen to do, and since when; by the clock of this one."""

    sign: Sign
    beat_at: float
    moved_at: float

    def update(self, sign: Sign, now: float) -> None:
        if sign.beat != self.sign.beat:
            self.beat_at = now
        if sign.count != self.sign.count:
            self.moved_at = now
        self.sign = sign


class Watch:
    """Keeps an eye on all ranks, from one of them. For a run of one rank there is nothing to see."""

    def __init__(self, store: Any = None, *, rank: int = 0, size: int = 1, limit_s: float = LIMIT_S) -> None:
        self.rank, self.size = rank, size
        self.limit_s = limit_s  # for which a rank may give no sign
        self.sign = Sign()
        # a connection of its own, as the other one may be waiting; Any: torch's stores have no types
        self._store: Any = None if store is None else store.clone()
        self._seen: dict[int, _Seen] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._usual_s = START_S

    @property
    def _pause_s(self) -> float:
        return min(1.0, self.limit_s / 20)

    def start(self) -> None:
        """Begin to give signs and to look for those of others."""
        if self._store is None or self.size == 1:
            return
        self._looked_at = time.monotonic()
        self._thread = threading.Thread(target=self._look, name="whet-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="whet-guard", daemon=True).start()

    def stop(self) -> None:
        """Everybody is done: nobody's silence means anything from now on."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(self.limit_s)
            self._thread = None

    def doing(self, what: str, *, exchanging: str | None = None) -> None:
        """Note what this rank does now, and what is exchanged on the way: it is alive."""
        self.sign.doing = what
        self.sign.collective = exchanging or self.sign.collective
        self.sign.patience_s = self._usual_s
        self.sign.count += 1

    def at_step(self, step: int) -> None:
        """Note that a step is done; from then on all should go quickly."""
        self.sign.step = step
        self._usual_s = self.limit_s
        self.doing("between steps")
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the thread sees it, too, and knows what to do
                self._beat()  # a step may be shorter than the pauses of the thread

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Note a collective, in which this rank waits for others."""
        self.sign.collective, self.sign.waiting = name, True
        self.sign.count += 1
        yield  # a failure leaves it as it is: that is where the rank was
        self.sign.waiting = False
        self.sign.count += 1

    @contextlib.contextmanager
    def patiently(self, what: str) -> Iterator[None]:
        """Note something that takes as long as it takes."""
        before, usual_s = self.sign.doing, self._usual_s
        self._usual_s = max(usual_s, PATIENT_S)
        self.doing(what)
        yield
        self._usual_s = usual_s
        self.doing(before)

    def speaks(self, error: BaseException) -> bool:
        """Whether it is for this rank to say why the run is over; from now on the others end.

        What breaks when another rank dies looks like a failure of this one, so the culprit is looked for
        first: the thread finds it, says so, and ends this process.
        """
        if self._thread is None:
            return True
        ends = time.monotonic() + max(_UNKNOWN_S, 4 * self._pause_s)
        while _is_broken_connection(error) and time.monotonic() < ends:
            time.sleep(0.05)
        first = self._claim()
        self._stopped.set()
        return first

    def located(self, error: Exception) -> Exception:
        """An error with the place where it happened: the rank, the step and the last collective."""
        if self._thread is None or self.sign.doing == STARTING or getattr(error, "is_of_all", False):
            return error
        told = error.message if isinstance(error, WhetError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, WhetError) else "run it again with --debug for the traceback"
        found = RunError(f"rank {self.rank} failed {self.sign.describe()}: {told}", hint=hint)
        found.exit_code = getattr(error, "exit_code", FAILED)
        return found

    def fail(self, error: BaseException) -> None:
        """This rank ends with an error: nobody shall wait for it."""
        if self._thread is not None:
            self.speaks(error)
            self._linger()

    def _look(self) -> None:
        """The thread: a sign, a look at the others, a pause."""
        try:
            self._beat()
            self._store.wait([f"sign/{rank}" for rank in range(self.size)], timedelta(seconds=START_S))
            while True:
                self._look_at_others(time.monotonic())
                self._looked_at = time.monotonic()
                if self._stopped.wait(self._pause_s):
                    return
                self._beat()
        except RuntimeError:  # the store is gone, and with it whoever kept it
            if not self._stopped.wait(2 * self._pause_s):
                self._lose_store("died")

    def _guard(self) -> None:
        """Another thread, for the one that looks may wait for ever for a store that has been stopped."""
        while not self._stopped.wait(self._pause_s):
            if time.monotonic() - self._looked_at > self._silence_s(self.sign):
                self._lose_store(f"gave no sign for {self.limit_s:g} s,")

    def _silence_s(self, sign: Sign) -> float:
        """How long a process may be silent: loading may hold on to the interpreter, steps do not."""
        return self.limit_s if sign.step else START_S

    def _beat(self) -> None:
        self.sign.beat += 1
        self._store.set(f"sign/{self.rank}", json.dumps(asdict(self.sign)))

    def _look_at_others(self, now: float) -> None:
        if self._store.check([_FAILURE]):
            self._end(None)
        for rank, text in enumerate(self._store.multi_get([f"sign/{rank}" for rank in range(self.size)])):
            sign = Sign(**json.loads(text))
            if rank in self._seen:
                self._seen[rank].update(sign, now)
            else:
                self._seen[rank] = _Seen(sign, now, now)
        if (trouble := self._find_trouble(now)) is not None and not self._stopped.is_set():
            self._end(*trouble)

    def _find_trouble(self, now: float) -> tuple[str, Sign] | None:
        """Who has died, stopped or hangs, in words, and its last sign."""
        for rank, seen in self._seen.items():
            name = f"rank {rank} (process {seen.sign.pid} on {seen.sign.host})"
            if seen.sign.machine == self.sign.machine and not _is_running(seen.sign.pid):
                return f"{name} died {seen.sign.describe()}", seen.sign
            if now - seen.beat_at > self._silence_s(seen.sign):
                return f"{name} gave no sign for {self.limit_s:g} s, {seen.sign.describe()}", seen.sign
        late = {
            rank: seen
            for rank, seen in self._seen.items()
            if now - seen.moved_at > max(self.limit_s, seen.sign.patience_s)
        }
        working = {rank: seen for rank, seen in late.items() if not seen.sign.waiting}
        if not working and len(late) < len(self._seen):
            return None  # those who wait do so for somebody who moves
        culprits = working or late
        if not culprits:
            return None
        first = min(culprits, key=lambda rank: culprits[rank].moved_at)
        found = culprits[first]
        others = "; ".join(
            f"rank {rank} is {seen.sign.describe()}" for rank, seen in self._seen.items() if rank != first
        )
        since = f"for {now - found.moved_at:.0f} s"
        return f"rank {first} hangs {found.sign.describe()}, {since} ({others})", found.sign

    def _kill(self, sign: Sign) -> None:
        """What neither listens nor works cannot be asked to end."""
        if sign.machine == self.sign.machine and sign.pid not in (0, self.sign.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(sign.pid, signal.SIGKILL)

    def _claim(self) -> bool:
        """Whether this rank is the first to say why the run is over."""
        try:
            return bool(self._store.compare_set(_FAILURE, "", str(self.rank)) == str(self.rank).encode())
        except RuntimeError:  # with the store went a rank, which is the reason
            return False

    def _end(self, message: str | None, culprit: Sign | None = None) -> None:
        """End this process, whatever it waits in, and whoever is to blame; one rank says why."""
        if message is not None and self._claim():
            _say(message)
        if culprit is not None:
            time.sleep(4 * self._pause_s)  # it may keep the store
            self._kill(culprit)
        self._linger()
        os._exit(FAILED)

    def _linger(self) -> None:
        """The store may end with this process: not before all have read why, or have ended."""
        ends = time.monotonic() + 4 * self._pause_s
        others = [seen.sign for rank, seen in self._seen.items() if rank != self.rank]
        while self.rank == 0 and time.monotonic() < ends:
            here = [sign for sign in others if sign.machine == self.sign.machine]
            if others == here and others and not any(_is_running(sign.pid) for sign in here):
                return
            time.sleep(0.05)

    def _lose_store(self, how: str) -> None:
        """Rank 0 keeps the store, unless torchrun does: the first of the others says so."""
        if self.rank == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _say(f"torchrun on the first machine {how} {self.sign.describe()}")
        elif self.rank != 0:
            keeper = self._seen[0].sign if self._seen else Sign(pid=0)
            self._kill(keeper)
            if self.rank == 1:
                _say(f"rank 0 (process {keeper.pid} on {keeper.host}) {how} {keeper.describe()}")
        os._exit(FAILED)


def _say(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()


def _is_running(pid: int) -> bool:
    """Whether a process of this machine is there and no zombie."""
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
    """Whether an error is what gloo or NCCL say when another process has gone."""
    signs = ("connection", "gloo", "nccl", "timed out", "socket")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
