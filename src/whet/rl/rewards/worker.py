"""A process that runs rewards: one line of JSON in, one line out.

An answer repeats the id of its request, which nobody can guess, and only the worker itself answers: what
rewards print, what they write to descriptors that they did not open, and what their children return is not
taken for an answer.
"""

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from whet.rl.rewards.builtin import BUILTIN, check_arguments

WorkerMessage = dict[str, Any]  # Any: JSON values

_PRIVATE_FD = 200  # and above: out of the way of code that uses or closes low numbers
_SHOWN = 2000  # characters of an error


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
        reply(job["id"], functools.partial(_judge, rewards[job["reward"]], job["arguments"]))


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
            result = {"error": _said(error)[:_SHOWN]}
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


class _NoNumberError(Exception):
    """A reward returned something else."""


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, _NoNumberError) else f"{type(error).__name__}: {error}"


def _judge(reward: Callable[..., Any], arguments: list[Any]) -> float:  # Any: whatever a reward returns
    value = reward(*arguments)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _NoNumberError(f"it returned {value!r}, which is no number") from None
    if not math.isfinite(number):
        raise _NoNumberError(f"it returned {number}")
    return number


def load(function: str, arguments: WorkerMessage) -> Callable[..., Any]:  # Any: whatever a reward returns
    """A reward by its name, with its arguments, or an error that says what is wrong with either."""
    found: Any = BUILTIN.get(function)  # Any: what a module calls by this name
    if found is None:
        place, _, name = function.rpartition(":")
        module = _module(place)
        found = getattr(module, name, None)
        if not callable(found):
            known = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
            raise ValueError(f"{place} has no function {name!r} (it has: {', '.join(known) or 'none'})")
    try:
        inspect.signature(found).bind("", "", {}, **arguments)
    except TypeError as error:
        raise ValueError(f"it is called as {inspect.signature(found)}: {error}") from None
    check_arguments(function, arguments)
    return lambda prompt, completion, record: found(prompt, completion, record, **arguments)


def _module(place: str) -> Any:  # Any: a module
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    sys.path.insert(0, str(path.parent))  # for what stands beside it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
