"""A process that runs rewards: one line of JSON in, one line out.

It ends as soon as whoever started it is gone, even in the middle of a reward that hangs.
"""

import importlib
import importlib.util
import inspect
import json
import math
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from whet.parallel.launch import end_with_parent
from whet.training.rewards.builtin import BUILTIN, check_arguments

Message = dict[str, Any]  # Any: JSON values


def main() -> None:
    """Load the rewards that the first line names, then answer every line."""
    end_with_parent()  # a regular expression that backtracks does not let `_read` find out
    requests, answers = _private_pipes()
    lines: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    try:
        rewards = [load(each["function"], each["arguments"]) for each in lines.get()["rewards"]]
    except Exception as error:  # whatever somebody else's module raises
        _write(answers, {"error": _said(error)})
        return
    _write(answers, {"ready": True})
    while True:
        job = lines.get()
        try:
            _write(answers, {"value": _number(rewards[job["reward"]](*job["arguments"]))})
        except Exception as error:
            _write(answers, {"error": _said(error)})


def _private_pipes() -> tuple[TextIO, TextIO]:
    """The pipes to the parent, kept from the rewards: these print to stderr, and read nothing."""
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: TextIO, lines: queue.SimpleQueue[Message]) -> None:
    for line in requests:
        lines.put(json.loads(line))
    os._exit(0)  # the parent has closed its end, or died


def _write(answers: TextIO, message: Message) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


class _NoNumberError(Exception):
    """A reward returned something else."""


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, _NoNumberError) else f"{type(error).__name__}: {error}"


def _number(value: Any) -> float:  # Any: whatever a reward returns
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise _NoNumberError(f"it returned {value!r}, which is no number") from None
    if not math.isfinite(found):
        raise _NoNumberError(f"it returned {found}")
    return found


def load(function: str, arguments: Message) -> Callable[..., Any]:  # Any: whatever a reward returns
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
