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
