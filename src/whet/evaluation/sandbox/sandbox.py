"""Run generated Python code with its tests in a separate process with limits.

It protects a machine from code that is wrong: endless loops, fork bombs, memory, full disks, processes left
behind. docs/evaluate.md lists what the kernel adds to that, and what is not protected.
"""

import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from whet.errors import RunError
from whet.parallel.process_tree import kill_session

log = logging.getLogger("whet")

_LAUNCHER_S = 30.0  # for the launcher to start, and to kill all processes of the code
_KILL_S = 2.0  # for processes to end after SIGKILL
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from whet.evaluation.sandbox.launcher import main; main()"
)
_MISSING = {
    "namespaces": "the code has network access, and a process that it leaves behind may survive",
    "Landlock": "the code can change all files that you can change",
    "hidden launcher": "the code can read the memory of its launcher",
}


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program and its child processes."""

    wall_s: float = 10.0
    cpu_s: int = 10  # per process
    memory: int = 2**30  # bytes of address space per process
    file_bytes: int = 2**24  # the largest size of a file
    processes: int = 16  # processes and threads
    output_bytes: int = 2**16  # more is discarded


@dataclass(frozen=True)
class TestProgram:
    """Generated code and its tests, which run in the same module, one after the other."""

    __test__ = False  # not a class of pytest's

    code: str
    tests: str
    entry_point: str | None = None  # the function to pass to `check`, if the tests define it
    calls_check: bool = False


@dataclass(frozen=True)
class ProgramResult:
    """Whether all tests passed, and how the program ended."""

    passed: bool
    problem: str = ""  # "timeout", "error", "signal N" or another reason
    output: str = ""  # what the program printed, up to a limit
    missing: list[str] = field(default_factory=list)  # protections that the kernel does not allow


def run_programs(
    programs: Sequence[TestProgram], *, limits: SandboxLimits | None = None, workers: int | None = None
) -> list[ProgramResult]:
    """Run programs, several at a time, and return their results in order.

    Args:
        programs: the programs.
        limits: their limits.
        workers: how many run at a time. None: half of the CPU cores, at most 8.
    """
    count = workers or max(1, min(8, (os.cpu_count() or 2) // 2))
    with ThreadPoolExecutor(max_workers=count) as threads:
        results = list(threads.map(lambda program: run_program(program, limits=limits), programs))
    for name in dict.fromkeys(name for result in results for name in result.missing):
        log.warning("sandbox: this kernel does not allow %s: %s", name, _MISSING.get(name, ""))
    return results


def run_program(
    program: TestProgram, *, limits: SandboxLimits | None = None, isolates: bool = True
) -> ProgramResult:
    """Run one program in an empty temporary directory, and kill everything that it has started.

    Args:
        program: the code and its tests.
        limits: its limits.
        isolates: whether to use namespaces and Landlock where the kernel allows them.

    Raises:
        RunError: the launcher cannot be started.
    """
    limits = limits or SandboxLimits()
    reply_id = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="whet-sandbox-", ignore_cleanup_errors=True) as directory:
        job = {**_job(program, limits, os.path.realpath(directory)), "isolates": isolates, "id": reply_id}
        path = json.dumps([os.fspath(part) or str(Path.cwd()) for part in sys.path])
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            reply, errors = process.communicate(json.dumps(job).encode(), timeout=limits.wall_s + _LAUNCHER_S)
        except subprocess.TimeoutExpired:
            reply, errors = b"", b""
        finally:
            if process.poll() != 0:  # the code may have killed its launcher
                process.kill()
                process.communicate()
                deadline = time.monotonic() + _KILL_S
                while kill_session(process.pid) and time.monotonic() < deadline:
                    time.sleep(0.01)
    for line in reply.decode(errors="replace").splitlines():
        if line.startswith(reply_id):
            return ProgramResult(**json.loads(line.removeprefix(reply_id)))
    if process.returncode > 0 and errors:
        text = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RunError(f"the sandbox cannot be started: {text}")
    return ProgramResult(passed=False, problem="the launcher was killed")


def _job(program: TestProgram, limits: SandboxLimits, directory: str) -> dict[str, Any]:
    # Any: JSON values
    user = os.getuid()
    threads = sum(
        process.info["num_threads"] or 0
        for process in psutil.process_iter(["uids", "num_threads"])
        if process.info["uids"] and process.info["uids"].real == user
    )
    return {
        "program": {**vars(program), "token": secrets.token_hex(16)},
        "directory": directory,
        "wall_s": limits.wall_s,
        "output_bytes": limits.output_bytes,
        "processes": limits.processes,
        "limits": {
            "CPU": limits.cpu_s,
            "AS": limits.memory,
            "DATA": limits.memory,
            "FSIZE": limits.file_bytes,
            "NPROC": threads + limits.processes,  # it counts all processes of the user
            "NOFILE": 64,
            "CORE": 0,
        },
        "environment": {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": directory,
            "TMPDIR": directory,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    }
