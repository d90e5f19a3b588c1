"""A process that runs rewards: it reads one request per line of JSON, and writes one reply per line.

A reply repeats the id of its request, which cannot be guessed, and only the worker process itself replies.
Text that rewards print, data that they write to file descriptors they did not open, and values that forked
children return are therefore never mistaken for a reply.
"""

import contextlib
import fcntl
import functools
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from whet.rl.rewards.builtin import BUILTIN, check_arguments
from whet.rl.rewards.reward_call import bind_reward, call_reward, failure_text
from whet.user_code import load_user_object

WorkerMessage = dict[str, Any]  # Any: JSON values

_PRIVATE_FD = 200  # the lowest descriptor of the pipes: rewards may use or close lower ones


def main() -> None:
    """Load the rewards named in the first request, then reply to every further request."""
    requests, replies = _private_pipes()
    start = json.loads(requests.readline())
    reply = _Reply(replies, start["memory"])
    rewards: list[Callable[..., Any]] = []  # Any: whatever a reward returns

    def load_all() -> float:
        rewards.extend(_load_reward(each["function"], each["arguments"]) for each in start["rewards"])
        return len(rewards)

    _limit_memory(start["memory"])
    if not reply(start["id"], load_all):
        return
    for line in requests:
        job = json.loads(line)
        reply(job["id"], functools.partial(call_reward, rewards[job["reward"]], job["arguments"]))


class _Reply:
    """Writes replies to requests, from this process only, never from a forked child."""

    def __init__(self, replies: BinaryIO, memory: int) -> None:
        self.replies = replies
        self.memory = memory
        self.pid = os.getpid()

    def __call__(self, request_id: str, compute: Callable[[], float]) -> bool:
        """Send the result of `compute`, or its error; return whether it succeeded."""
        try:
            result: WorkerMessage = {"value": compute()}
        except MemoryError:
            limit = f"{self.memory / 2**30:.3g} GiB"
            result = {"error": f"it needed more memory than objective.reward_memory allows ({limit})"}
        except Exception as error:  # user code may raise anything
            result = {"error": failure_text(error)}
        if os.getpid() != self.pid:  # this is a child that the reward forked
            os._exit(0)
        # the newline before the reply ends a line that a reward may have left incomplete
        self.replies.write(b"\n" + json.dumps({"id": request_id, **result}).encode() + b"\n")
        return "value" in result


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes to the run (requests, replies), moved away from stdin and stdout.

    For rewards and their children, stdin is empty, stdout goes to stderr, and the pipes are closed on fork.
    """
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PRIVATE_FD) for fd in (0, 1)]
    requests, replies = os.fdopen(fds[0], "rb"), os.fdopen(fds[1], "wb", buffering=0)

    def close_in_child() -> None:
        while fds:
            os.close(fds.pop())

    os.register_at_fork(after_in_child=close_in_child)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a worker exits without flushing
    return requests, replies


def _limit_memory(size: int) -> None:
    """Limit the private memory of this process, and of each of its children separately, to `size` bytes."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set, or the platform has none
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _load_reward(function: str, arguments: WorkerMessage) -> Callable[..., Any]:  # Any: what a reward returns
    """Load a reward by name and bind its arguments; raise an error if either is invalid."""
    reward = bind_reward(BUILTIN.get(function) or load_user_object(function), arguments)
    check_arguments(function, arguments)
    return reward
