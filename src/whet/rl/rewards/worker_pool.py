"""Rewards in processes of their own: in parallel, each call with a time limit, none left behind.

The processes are plain ones that read lines, not multiprocessing's: those would run the user's script again.
This isolates a run from accidents in rewards. It is not a sandbox: rewards run with the user's rights.

Functions that were passed from Python and that no other process can import (of a notebook, lambdas, closures)
are called in this process: their time is measured, and a call that hangs cannot be ended.
"""

import copy
import json
import logging
import os
import queue
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import psutil

from whet.config.objectives.grpo import GRPOObjective, Reward
from whet.config.placeholder import parse_placeholder
from whet.error_boundary import one_line
from whet.errors import ConfigError, RunError
from whet.rl.rewards.reward_call import bind_reward, failure_text, judge
from whet.rl.rewards.supervisor import kill_session
from whet.user_code import importable_reference

log = logging.getLogger("whet")

_START_S = 120.0  # to import somebody's module: it may bring torch along
_TOGETHER = 32  # calls handed to a process at once: waiting for each answer takes longer than most rewards
_SHOWN = 1000  # characters of a completion in an error
_LONGEST = 2**16  # bytes of an answer
_END_S = 15.0  # for a supervisor to end all processes of its worker
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from whet.rl.rewards.supervisor import main; main()"
)


@dataclass(frozen=True)
class Judged:
    """A completion to judge."""

    prompt: str
    completion: str
    record: dict[str, Any]  # Any: JSON values


@dataclass(frozen=True)
class Call:
    """One reward on one completion."""

    judged: Judged
    reward: int


class _FailedError(Exception):
    """A call that brought no number, and why."""


class _Worker:
    """One process that runs rewards, with the supervisor that ends it and its children."""

    def __init__(self, rewards: Mapping[int, Reward], *, memory: int) -> None:
        self._numbers = {index: number for number, index in enumerate(rewards)}
        path = json.dumps([os.fspath(part) or str(Path.cwd()) for part in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, path],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which finishes its step with these
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        self._unsent, self._rest = bytearray(), b""
        self._sent: deque[str] = deque()  # ids of the requests without an answer yet
        described = [{"function": r.function, "arguments": r.arguments} for r in rewards.values()]
        self._send({"rewards": described, "memory": memory})

    def wait_until_ready(self) -> None:
        """Until the rewards are imported, or cannot be."""
        try:
            self.answer(timeout_s=_START_S)
        except EOFError:
            raise _FailedError("its process ended") from None
        except TimeoutError:
            raise _FailedError(f"it took more than {_START_S:g} s to load") from None

    def send(self, calls: Sequence[Call]) -> None:
        """Calls to be made one after the other."""
        for call in calls:
            judged = call.judged
            arguments = [judged.prompt, judged.completion, judged.record]
            self._send({"reward": self._numbers[call.reward], "arguments": arguments})

    def answer(self, *, timeout_s: float) -> float:
        """What the next of the calls came to."""
        answer = self._receive(self._sent.popleft(), timeout_s)
        if "error" in answer:
            raise _FailedError(answer["error"])
        return float(answer["value"])

    def kill(self) -> None:
        """Let the supervisor end it, whatever it does; who waits for its answer finds out."""
        self._process.terminate()

    def end(self) -> None:
        """Kill it and all processes that it started, and forget it."""
        self.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode == -signal.SIGKILL:  # a reward can kill its supervisor, too
            kill_session(self._process.pid)
        self._requests.close()
        self._answers.close()

    def _send(self, message: dict[str, Any]) -> None:  # Any: JSON values
        """To be written while `_receive` waits: a process that hangs reads nothing, and pipes are short."""
        identity = secrets.token_hex(16)
        self._sent.append(identity)
        self._unsent += json.dumps({"id": identity, **message}, default=str).encode() + b"\n"

    def _receive(self, identity: str, timeout_s: float) -> dict[str, Any]:  # Any: JSON values
        """The answer to a request; whatever else comes through the pipe is not from the worker's own code."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as ready:
            ready.register(self._answers, selectors.EVENT_READ)
            if self._unsent:
                ready.register(self._requests, selectors.EVENT_WRITE)
            late = False
            while (answer := self._next_answer(identity)) is None:
                if late:
                    raise TimeoutError
                late = time.monotonic() > deadline  # this process may have been stopped: read once more
                events = ready.select(max(0.0, deadline - time.monotonic()))
                late = late or not events
                for key, _ in events:
                    if key.fileobj is self._answers:
                        self._read()
                    else:
                        self._write()
                        if not self._unsent:
                            ready.unregister(self._requests)
        return answer

    def _next_answer(self, identity: str) -> dict[str, Any] | None:  # Any: JSON values
        start = f'{{"id": "{identity}", '.encode()
        while b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            if line.startswith(start):
                message: dict[str, Any] = json.loads(line)  # Any: JSON values
                return message
        self._rest = self._rest[-_LONGEST:]
        return None

    def _read(self) -> None:
        new = os.read(self._answers.fileno(), 2**16)
        if not new:
            raise EOFError
        self._rest += new

    def _write(self) -> None:
        try:
            del self._unsent[: os.write(self._requests.fileno(), self._unsent)]
        except BrokenPipeError:  # it has died, which `_read` finds out
            self._unsent.clear()


class RewardPool:
    """The rewards of a run, ready to be called, from `with` to its end.

    Args:
        settings: which rewards there are, and how their calls are limited.
        given: functions passed from Python, for the placeholders among the rewards, by name.
    """

    def __init__(
        self, settings: GRPOObjective, given: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    ) -> None:  # Any: whatever a reward returns
        self.rewards = settings.rewards
        self._imported: dict[int, Reward] = {}  # what the processes load, by the index of the reward
        self._given: dict[int, Callable[..., Any]] = {}  # what was passed from Python
        self._here: dict[int, Callable[..., Any]] = {}  # of these, what is called in this process
        for index, reward in enumerate(self.rewards):
            self._resolve(index, reward, given)
        self.timeout_s = settings.reward_timeout
        self.on_error = settings.on_error
        self.memory = int((settings.reward_memory or psutil.virtual_memory().total / 2**31) * 2**30)
        self.failures = 0  # calls that counted as on_error
        self._count = settings.reward_workers or min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(max_workers=self._count)
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()  # None: one to start anew
        self._alive: set[_Worker] = set()
        self._ended = False
        for _ in range(self._count):
            self._idle.put(None)

    def __enter__(self) -> "RewardPool":
        """Try every reward by itself, so that an error names the one that is wrong."""
        for index, reward in list(self._imported.items()):
            try:
                self._try(reward)
            except ConfigError:
                if index not in self._given:
                    raise
                del self._imported[index]  # the path of its module is not that of this process, say
        for index, function in self._given.items():
            if index not in self._imported:
                self._bind(index, function)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        for worker in list(self._alive):  # so that no call waits any longer
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._alive):
            self._end(worker)

    def _resolve(self, index: int, reward: Reward, given: Mapping[str, Callable[..., Any]]) -> None:
        # Any: whatever a reward returns
        placeholder = parse_placeholder(reward.function)
        if placeholder is None:
            self._imported[index] = reward
            return
        if (function := given.get(placeholder.name)) is None:
            raise ConfigError(
                f"objective.rewards: {reward.function} stands for a function that is passed from Python, "
                "and it is not here",
                hint=f"whet.train and whet.resume take it: rewards={{{placeholder.name!r}: function}}",
            )
        self._given[index] = function
        if (reference := importable_reference(function)) is not None:
            self._imported[index] = reward.model_copy(update={"function": reference})

    def _bind(self, index: int, function: Callable[..., Any]) -> None:  # Any: whatever a reward returns
        reward = self.rewards[index]
        try:
            self._here[index] = bind_reward(function, reward.arguments)
        except ValueError as error:
            raise ConfigError(f"objective.rewards: {reward.label} cannot be used: {error}") from None
        log.info("reward %s: called in this process, where a call that hangs is not ended", reward.label)

    def _try(self, reward: Reward) -> None:
        worker = self._start({0: reward})
        try:
            worker.wait_until_ready()
        except _FailedError as error:
            raise ConfigError(f"objective.rewards: {reward.function} cannot be used: {error}") from None
        finally:
            self._end(worker)

    def _start(self, rewards: Mapping[int, Reward]) -> _Worker:
        worker = _Worker(rewards, memory=self.memory)
        self._alive.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        worker.end()
        self._alive.discard(worker)

    def score(self, judged: Sequence[Judged]) -> list[list[float]]:
        """What each reward says of each completion, [completions][rewards]."""
        calls = [Call(each, reward) for each in judged for reward in self._imported]
        size = max(1, min(_TOGETHER, -(-len(calls) // self._count)))
        pieces = [calls[start : start + size] for start in range(0, len(calls), size)]
        futures = [self._threads.submit(self._run, piece) for piece in pieces]
        try:
            own = iter([self._call_here(Call(each, reward)) for each in judged for reward in self._here])
            values = iter([value for future in futures for value in future.result()])
        finally:
            for future in futures:
                future.cancel()
        return [
            [next(own if reward in self._here else values) for reward in range(len(self.rewards))]
            for _ in judged
        ]

    def take_failures(self) -> int:
        """Calls that counted as on_error since this was asked last."""
        found, self.failures = self.failures, 0
        return found

    def _run(self, calls: Sequence[Call]) -> list[float]:
        """Some calls in one process; where it hangs or dies, another one goes on behind that call."""
        worker, values = self._idle.get(), list[float]()
        try:
            while len(values) < len(calls) and not self._ended:
                if worker is None:
                    worker = self._start(self._imported)
                    self._wait_for(worker)
                worker.send(calls[len(values) :])
                try:
                    while len(values) < len(calls):
                        values.append(self._answer(worker, calls[len(values)]))
                except (TimeoutError, EOFError) as error:
                    self._end(worker)
                    worker = None
                    slow = isinstance(error, TimeoutError)
                    why = f"it took more than {self.timeout_s:g} s" if slow else "it ended its process"
                    values.append(self._failed(calls[len(values)], why))
        except BaseException:
            if worker is not None:  # it still has calls to make that nobody waits for
                self._end(worker)
                worker = None
            raise
        finally:
            self._idle.put(worker)
        return values

    def _wait_for(self, worker: _Worker) -> None:
        try:
            worker.wait_until_ready()
        except _FailedError as error:
            raise RunError(
                f"objective.rewards: one of {self._count} processes for them could not be started: {error}",
                hint="each loads all of the rewards; objective.reward_workers says how many there are",
            ) from None

    def _answer(self, worker: _Worker, call: Call) -> float:
        try:
            return worker.answer(timeout_s=self.timeout_s)
        except _FailedError as error:
            return self._failed(call, str(error))

    def _call_here(self, call: Call) -> float:
        judged, started, why = call.judged, time.monotonic(), ""
        record = copy.deepcopy(judged.record)  # it is the run's: a reward may change its own
        value = 0.0
        try:
            value = judge(self._here[call.reward], [judged.prompt, judged.completion, record])
        except Exception as error:  # whatever somebody else's code raises
            why = failure_text(error)
        if time.monotonic() - started > self.timeout_s:
            why = f"it took more than {self.timeout_s:g} s"
        return self._failed(call, why) if why else value

    def _failed(self, call: Call, why: str) -> float:
        if self.on_error is not None:
            self.failures += 1
            return self.on_error
        raise RunError(
            f"the reward {self.rewards[call.reward].label} failed: {one_line(why)}\n"
            f"  prompt: {call.judged.prompt[-_SHOWN:]!r}\n  completion: {call.judged.completion[:_SHOWN]!r}",
            hint="fix it, or set objective.on_error to the value that such a completion shall have",
        )
