"""A process that runs rewards: one line of JSON in, one line out.

An answer repeats the id of its request, which nobody can guess, and only the worker itself answers: what
rewards print, what they write to descriptors that they did not open, and what their children return is not
taken for an answer.
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
from whet.rl.rewards.reward_call import bind_reward, failure_text, judge
from whet.user_code import load_user_object

WorkerMessage = dict[str, Any]  # Any: JSON values

_PRIVATE_FD = 200  # and above: out of the way of code that uses or closes low numbers


def main() -> None:
    """Load the rewards that the first line names, then answer every line."""
    requests, answers = _private_pipes()
    start = json.loads(requests.readline())
    reply = _Reply(answers, start["memory"])
    rewards: list[Callable[..., Any]] = []  # Any: whatever a reward returns

    def load_all() -> float:
        rewards.extend(load(each["function"], each["arguments"]) for each in start["rewards"])
        return len(rewards)

    _limit_memory(start["memory"])
    if not reply(start["id"], load_all):
        return
    for line in requests:
        job = json.loads(line)
        reply(job["id"], functools.partial(judge, rewards[job["reward"]], job["arguments"]))


class _Reply:
    """Answers requests, from this process only."""

    def __init__(self, answers: BinaryIO, memory: int) -> None:
        self.answers = answers
        self.memory = memory
        self.pid = os.getpid()

    def __call__(self, identity: str, compute: Callable[[], float]) -> bool:
        """Send what `compute` returns or raises; return whether it returned."""
        try:
            result: WorkerMessage = {"value": compute()}
        except MemoryError:
            limit = f"{self.memory / 2**30:.3g} GiB"
            result = {"error": f"it needed more memory than objective.reward_memory allows ({limit})"}
        except Exception as error:  # whatever somebody else's code raises
            result = {"error": failure_text(error)}
        if os.getpid() != self.pid:  # a child that the reward forked returned here
            os._exit(0)
        # a line of its own, also where somebody wrote half a line before
        self.answers.write(b"\n" + json.dumps({"id": identity, **result}).encode() + b"\n")
        return "value" in result


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the run, kept from the rewards and their children: these print to stderr, read nothing."""
    private = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _PRIVATE_FD) for number in (0, 1)]
    requests, answers = os.fdopen(private[0], "rb"), os.fdopen(private[1], "wb", buffering=0)

    def close_in_child() -> None:
        while private:
            os.close(private.pop())

    os.register_at_fork(after_in_child=close_in_child)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a worker ends without a flush
    return requests, answers


def _limit_memory(size: int) -> None:
    """Let every private allocation count, of this process and of each of its children by itself."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or there are none here
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def load(function: str, arguments: WorkerMessage) -> Callable[..., Any]:  # Any: whatever a reward returns
    """A reward by its name, with its arguments, or an error that says what is wrong with either."""
    reward = bind_reward(BUILTIN.get(function) or load_user_object(function), arguments)
    check_arguments(function, arguments)
    return reward
