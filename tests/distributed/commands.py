"""Start whet commands on several processes, observe them from outside, and clean up their processes."""

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

from distributed.harness import _context, free_port, rank_environment


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
    """Start a command in a new session, and kill all its processes at the end."""
    with Path(log).open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    family = psutil.Process(process.pid)
    children = {}
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = {each.pid: each for each in family.children(recursive=True)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in children.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def rank_processes(process):
    """Return {rank: process} of the ranks that a command has started."""
    ranks = {}
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "RANK" in (variables := each.environ()):
                ranks[int(variables["RANK"])] = each
    return ranks


def wait_for_step(run, step, *, log, process, limit_s=90):
    """Wait until a step is in the metrics of a run."""
    deadline = time.monotonic() + limit_s
    while last_step(run) < step:
        assert process.poll() is None, Path(log).read_text()
        assert time.monotonic() < deadline, f"no step {step} after {limit_s} s\n{Path(log).read_text()}"
        time.sleep(0.05)


def last_step(run):
    metrics = Path(run) / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.is_file() else []
    steps = [0]
    for row in rows:
        with contextlib.suppress(ValueError):  # the row may be incomplete
            steps.append(json.loads(row).get("step", 0))
    return max(steps)


def errors_in(log):
    return [line for line in Path(log).read_text().splitlines() if line.startswith("error: ")]


def run_command(size, arguments, *, out, trouble=None, limit_s=60):
    """Run `whet ARGUMENTS` as forked ranks, and return exit codes, seconds since the trouble, and output.

    `trouble` is (rank, step, kind): what to do to a rank before that step.
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
        deadline = time.monotonic() + limit_s
        for each in ranks:
            each.join(max(0.0, deadline - time.monotonic()))
        text = log.read_text()
        started_at = [float(line.split()[1]) for line in text.splitlines() if line.startswith("trouble ")]
        codes = [each.exitcode for each in ranks]
        return codes, time.monotonic() - (started_at or [time.monotonic()])[0], text
    finally:
        for each in ranks:
            each.kill()
            each.join()


def _whet(rank, size, port, arguments, log, trouble):
    os.environ |= rank_environment(rank, size, port)
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

    original = Trainer._next_step

    def next_step(self):
        if self.state.step + 1 == step:
            os.write(2, f"trouble {time.monotonic()}\n".encode())
            if kind == "raise":
                raise ValueError("a test error")
            if kind == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                time.sleep(600)
        return original(self)

    Trainer._next_step = next_step
