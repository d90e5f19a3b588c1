"""The command line on several processes: started, watched from outside, and never left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from distributed.harness import _context, free_port, place_of


def write_config(path, settings):
    path.write_text(yaml.safe_dump(settings))
    return path


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "WHET_OFFLINE": "1"}


def torchrun(*arguments):
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def whet_command(*arguments):
    return [sys.executable, "-m", "whet", *arguments]


@contextlib.contextmanager
def started(command, log):
    """A command in a session of its own; all its processes are gone at the end, however they were."""
    with Path(log).open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    family = psutil.Process(process.pid)
    known = {}
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            known = {each.pid: each for each in family.children(recursive=True)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in known.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def rank_processes(process):
    """{rank: process} of those that a command has started."""
    found = {}
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "RANK" in (around := each.environ()):
                found[int(around["RANK"])] = each
    return found


def wait_for_step(run, step, *, log, process, limit_s=90):
    """Until a run's metrics have a step."""
    ends = time.monotonic() + limit_s
    while last_step(run) < step:
        assert process.poll() is None, Path(log).read_text()
        assert time.monotonic() < ends, f"no step {step} after {limit_s} s\n{Path(log).read_text()}"
        time.sleep(0.05)


def last_step(run):
    metrics = Path(run) / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.is_file() else []
    found = [0]
    for row in rows:
        with contextlib.suppress(ValueError):  # the one being written
            found.append(json.loads(row).get("step", 0))
    return max(found)


def errors_in(log):
    return [line for line in Path(log).read_text().splitlines() if line.startswith("error: ")]


def run_command(size, arguments, *, out, trouble=None, limit_s=60):
    """`whet ARGUMENTS` as the ranks of a world, forked and so quick to start: exit codes, seconds, output.

    `trouble` is (rank, step, kind): what happens to a rank before that step.
    """
    context, port = _context(), free_port()
    log = Path(out) / "log"
    ranks = [
        context.Process(target=_whet, args=(rank, size, port, arguments, str(log), trouble))
        for rank in range(size)
    ]
    try:
        for each in ranks:
            each.start()
        ends = time.monotonic() + limit_s
        for each in ranks:
            each.join(max(0.0, ends - time.monotonic()))
        text = log.read_text()
        began = [float(line.split()[1]) for line in text.splitlines() if line.startswith("trouble ")]
        codes = [each.exitcode for each in ranks]
        return codes, time.monotonic() - (began or [time.monotonic()])[0], text
    finally:
        for each in ranks:
            each.kill()
            each.join()


def _whet(rank, size, port, arguments, log, trouble):
    os.environ |= place_of(rank, size, port)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    from whet.cli.app import main

    torch.set_num_threads(1)
    if trouble is not None and trouble[0] == rank:
        _make_trouble(*trouble[1:])
    sys.argv = ["whet", *arguments]
    main()


def _make_trouble(step, kind):
    from whet.training.trainer import Trainer

    honest = Trainer._next_step

    def troubled(self):
        if self.state.step + 1 == step:
            os.write(2, f"trouble {time.monotonic()}\n".encode())
            if kind == "raise":
                raise ValueError("a bad thing")
            if kind == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                time.sleep(600)
        return honest(self)

    Trainer._next_step = troubled
