"""Run rewards in parallel in worker processes, with a time limit per call, and clean up all processes.

The workers are plain processes that read lines. multiprocessing would import the user's script again.
This protects a run from accidents in rewards. It is not a sandbox: rewards run with the user's permissions.

Functions passed from Python that another process cannot import (from a notebook, lambdas, closures) are
called in this process. Their time is measured, but a call that hangs cannot be interrupted.
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
from whet.error_boundary import escape_to_one_line
from whet.errors import ConfigError, RunError
from whet.parallel.process_tree import kill_session
from whet.rl.rewards.reward_call import bind_reward, call_reward, failure_text
from whet.user_code import find_import_reference

log = logging.getLogger("whet")

_START_TIMEOUT_S = 120.0  # the user's module may import torch
_CALLS_PER_CHUNK = 32  # calls sent to a worker at once: a round trip per call is slower than most rewards
_MAX_SHOWN_CHARS = 1000  # of a prompt and a completion in an error
_MAX_REPLY_BYTES = 2**16
_STOP_TIMEOUT_S = 15.0  # for a supervisor to kill all processes of its worker
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from whet.rl.rewards.supervisor import main; main()"
)


@dataclass(frozen=True)
class RewardInput:
    """A completion to score, with its prompt and its data record."""

    prompt: str
    completion: str
    record: dict[str, Any]  # Any: JSON values


@dataclass(frozen=True)
class _RewardCall:
    """The call of one reward, given by its index, on one completion."""

    inputs: RewardInput
    reward: int


class _RewardFailedError(Exception):
    """A call that returned no valid value; the message gives the reason."""


class _Worker:
    """A worker process that runs rewards, and the supervisor that kills it and its children."""

    def __init__(self, rewards: Mapping[int, Reward], *, memory: int) -> None:
        self._worker_indices = {index: position for position, index in enumerate(rewards)}
        path = json.dumps([os.fspath(part) or str(Path.cwd()) for part in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, path],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run only, which finishes its step with the workers
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        self._unsent, self._buffer = bytearray(), b""
        self._pending: deque[str] = deque()  # ids of the requests without a reply yet
        specs = [{"function": r.function, "arguments": r.arguments} for r in rewards.values()]
        self._send({"rewards": specs, "memory": memory})

    def wait_until_ready(self) -> None:
        """Wait until the worker has imported its rewards; raise an error if it cannot."""
        try:
            self.receive(timeout_s=_START_TIMEOUT_S)
        except EOFError:
            raise _RewardFailedError("its worker process exited") from None
        except TimeoutError:
            raise _RewardFailedError(f"it took more than {_START_TIMEOUT_S:g} s to load") from None

    def send(self, calls: Sequence[_RewardCall]) -> None:
        """Queue calls for the worker, which runs them in this order."""
        for call in calls:
            inputs = call.inputs
            arguments = [inputs.prompt, inputs.completion, inputs.record]
            self._send({"reward": self._worker_indices[call.reward], "arguments": arguments})

    def receive(self, *, timeout_s: float) -> float:
        """Return the value of the oldest pending call.

        Raises:
            _RewardFailedError: the call raised, or returned no finite number.
            TimeoutError: no reply arrived in time.
            EOFError: the worker exited.
        """
        reply = self._receive(self._pending.popleft(), timeout_s)
        if "error" in reply:
            raise _RewardFailedError(reply["error"])
        return float(reply["value"])

    def kill(self) -> None:
        """Tell the supervisor to kill the worker; a pending `receive` then raises EOFError."""
        self._process.terminate()

    def close(self) -> None:
        """Kill the worker and all processes that it started, and close its pipes."""
        self.kill()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode == -signal.SIGKILL:  # a reward may have killed its supervisor
            kill_session(self._process.pid)
        self._requests.close()
        self._replies.close()

    def _send(self, message: dict[str, Any]) -> None:  # Any: JSON values
        """Queue a request for `_receive` to write, because writing to a worker that hangs would block."""
        request_id = secrets.token_hex(16)
        self._pending.append(request_id)
        self._unsent += json.dumps({"id": request_id, **message}, default=str).encode() + b"\n"

    def _receive(self, request_id: str, timeout_s: float) -> dict[str, Any]:  # Any: JSON values
        """Return the reply to a request; ignore all other output, which rewards may have forged."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            if self._unsent:
                selector.register(self._requests, selectors.EVENT_WRITE)
            is_late = False
            while (reply := self._next_reply(request_id)) is None:
                if is_late:
                    raise TimeoutError
                is_late = time.monotonic() > deadline  # this process may have been suspended: read once more
                events = selector.select(max(0.0, deadline - time.monotonic()))
                is_late = is_late or not events
                for key, _ in events:
                    if key.fileobj is self._replies:
                        self._read()
                    else:
                        self._write()
                        if not self._unsent:
                            selector.unregister(self._requests)
        return reply

    def _next_reply(self, request_id: str) -> dict[str, Any] | None:  # Any: JSON values
        prefix = f'{{"id": "{request_id}", '.encode()
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            if line.startswith(prefix):
                message: dict[str, Any] = json.loads(line)  # Any: JSON values
                return message
        self._buffer = self._buffer[-_MAX_REPLY_BYTES:]
        return None

    def _read(self) -> None:
        data = os.read(self._replies.fileno(), 2**16)
        if not data:
            raise EOFError
        self._buffer += data

    def _write(self) -> None:
        try:
            del self._unsent[: os.write(self._requests.fileno(), self._unsent)]
        except BrokenPipeError:  # the worker died: `_read` raises EOFError
            self._unsent.clear()


class RewardPool:
    """The rewards of a run, and the worker processes that run them. Use it as a context manager.

    Args:
        settings: the rewards, and the limits on their calls.
        given: functions passed from Python, by the name of their placeholder in `settings.rewards`.
    """

    def __init__(
        self, settings: GRPOObjective, given: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    ) -> None:  # Any: whatever a reward returns
        self.rewards = settings.rewards
        # all three by the index of the reward
        self._worker_rewards: dict[int, Reward] = {}  # loaded and called by the workers
        self._given: dict[int, Callable[..., Any]] = {}  # passed from Python
        self._local_rewards: dict[
            int, Callable[..., Any]
        ] = {}  # passed from Python and called in this process
        for index, reward in enumerate(self.rewards):
            self._resolve(index, reward, given)
        self.timeout_s = settings.reward_timeout
        self.on_error = settings.on_error
        self.memory = int((settings.reward_memory or psutil.virtual_memory().total / 2**31) * 2**30)
        self.failure_count = 0  # failed calls that were scored as on_error
        self._worker_count = settings.reward_workers or min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(max_workers=self._worker_count)
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()  # None: a worker to start on use
        self._alive: set[_Worker] = set()
        self._is_closed = False
        for _ in range(self._worker_count):
            self._idle.put(None)

    def __enter__(self) -> "RewardPool":
        """Load every reward in a separate worker: an error then names the reward that cannot be loaded."""
        for index, reward in list(self._worker_rewards.items()):
            try:
                self._check_loadable(reward)
            except ConfigError:
                if index not in self._given:
                    raise
                del self._worker_rewards[index]  # for example, its module is not on the worker's path
        for index, function in self._given.items():
            if index not in self._worker_rewards:
                self._bind_local(index, function)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        for worker in list(self._alive):  # ends the calls that the threads wait for
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._alive):
            self._close(worker)

    def _resolve(self, index: int, reward: Reward, given: Mapping[str, Callable[..., Any]]) -> None:
        # Any: whatever a reward returns
        placeholder = parse_placeholder(reward.function)
        if placeholder is None:
            self._worker_rewards[index] = reward
            return
        if (function := given.get(placeholder.name)) is None:
            raise ConfigError(
                f"objective.rewards: {reward.function} is a placeholder for a function passed from Python, "
                "and it was not passed",
                hint=f"pass it to whet.train or whet.resume: rewards={{{placeholder.name!r}: function}}",
            )
        self._given[index] = function
        if (reference := find_import_reference(function)) is not None:
            self._worker_rewards[index] = reward.model_copy(update={"function": reference})

    def _bind_local(self, index: int, function: Callable[..., Any]) -> None:  # Any: whatever a reward returns
        reward = self.rewards[index]
        try:
            self._local_rewards[index] = bind_reward(function, reward.arguments)
        except ValueError as error:
            raise ConfigError(f"objective.rewards: {reward.label} cannot be used: {error}") from None
        log.info("reward %s: called in this process, so a call that hangs is not interrupted", reward.label)

    def _check_loadable(self, reward: Reward) -> None:
        worker = self._start({0: reward})
        try:
            worker.wait_until_ready()
        except _RewardFailedError as error:
            raise ConfigError(f"objective.rewards: {reward.function} cannot be used: {error}") from None
        finally:
            self._close(worker)

    def _start(self, rewards: Mapping[int, Reward]) -> _Worker:
        worker = _Worker(rewards, memory=self.memory)
        self._alive.add(worker)
        return worker

    def _close(self, worker: _Worker) -> None:
        worker.close()
        self._alive.discard(worker)

    def score(self, inputs: Sequence[RewardInput]) -> list[list[float]]:
        """Return the unweighted value of each reward for each completion, [completions][rewards]."""
        calls = [_RewardCall(each, reward) for each in inputs for reward in self._worker_rewards]
        size = max(1, min(_CALLS_PER_CHUNK, -(-len(calls) // self._worker_count)))
        chunks = [calls[start : start + size] for start in range(0, len(calls), size)]
        futures = [self._threads.submit(self._run_chunk, chunk) for chunk in chunks]
        try:
            local_values = iter(
                [
                    self._call_locally(_RewardCall(each, reward))
                    for each in inputs
                    for reward in self._local_rewards
                ]
            )
            worker_values = iter([value for future in futures for value in future.result()])
        finally:
            for future in futures:
                future.cancel()
        return [
            [
                next(local_values if reward in self._local_rewards else worker_values)
                for reward in range(len(self.rewards))
            ]
            for _ in inputs
        ]

    def pop_failure_count(self) -> int:
        """Return the number of failed calls that were scored as on_error, and reset it to 0."""
        count, self.failure_count = self.failure_count, 0
        return count

    def _run_chunk(self, calls: Sequence[_RewardCall]) -> list[float]:
        """Run calls in one worker; if it hangs or dies, a new worker continues after the failed call."""
        worker, values = self._idle.get(), list[float]()
        try:
            while len(values) < len(calls) and not self._is_closed:
                if worker is None:
                    worker = self._start(self._worker_rewards)
                    self._wait_until_ready(worker)
                worker.send(calls[len(values) :])
                try:
                    while len(values) < len(calls):
                        values.append(self._receive(worker, calls[len(values)]))
                except (TimeoutError, EOFError) as error:
                    self._close(worker)
                    worker = None
                    is_late = isinstance(error, TimeoutError)
                    reason = (
                        f"it took more than {self.timeout_s:g} s" if is_late else "its worker process exited"
                    )
                    values.append(self._handle_failure(calls[len(values)], reason))
        except BaseException:
            if worker is not None:  # it has queued calls whose results are not needed
                self._close(worker)
                worker = None
            raise
        finally:
            self._idle.put(worker)
        return values

    def _wait_until_ready(self, worker: _Worker) -> None:
        try:
            worker.wait_until_ready()
        except _RewardFailedError as error:
            raise RunError(
                f"objective.rewards: one of {self._worker_count} worker processes failed to start: {error}",
                hint="each worker loads all rewards; objective.reward_workers sets the number of workers",
            ) from None

    def _receive(self, worker: _Worker, call: _RewardCall) -> float:
        try:
            return worker.receive(timeout_s=self.timeout_s)
        except _RewardFailedError as error:
            return self._handle_failure(call, str(error))

    def _call_locally(self, call: _RewardCall) -> float:
        inputs, started, reason = call.inputs, time.monotonic(), ""
        record = copy.deepcopy(inputs.record)  # a reward may change its argument, but not the run's record
        value = 0.0
        try:
            value = call_reward(self._local_rewards[call.reward], [inputs.prompt, inputs.completion, record])
        except Exception as error:  # user code may raise anything
            reason = failure_text(error)
        if time.monotonic() - started > self.timeout_s:
            reason = f"it took more than {self.timeout_s:g} s"
        return self._handle_failure(call, reason) if reason else value

    def _handle_failure(self, call: _RewardCall, reason: str) -> float:
        if self.on_error is not None:
            self.failure_count += 1
            return self.on_error
        raise RunError(
            f"the reward {self.rewards[call.reward].label} failed: {escape_to_one_line(reason)}\n"
            f"  prompt: {call.inputs.prompt[-_MAX_SHOWN_CHARS:]!r}\n"
            f"  completion: {call.inputs.completion[:_MAX_SHOWN_CHARS]!r}",
            hint="fix the reward, or set objective.on_error to the value for completions whose reward fails",
        )
