"""The process between whet and generated code: it isolates, limits and kills the code.

It reads one job as JSON from stdin, and writes one result as JSON to stdout. The code has neither: its pipes
are other ones. With namespaces, the code runs below the first process of a process namespace, which ends
with the code and takes all other processes of the code with it.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from whet.evaluation.sandbox import isolation
from whet.parallel.launch import die_with_parent
from whet.parallel.process_tree import adopt_orphans, descendants, kill_descendants, reap_children

Job = dict[str, Any]  # Any: JSON values

_POLL_S = 0.02
# It reads what to run from descriptor 3, and reports on 4 that it has finished.
# The token is written only after the last test, so neither an exit code nor printed text can claim success.
_PROGRAM = """
import json, os, sys, types
def run(write, exit, pid):
    with os.fdopen(3, "rb") as file:
        job = json.load(file)
    os.set_inheritable(4, False)
    token = job.pop("token").encode()
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    exec(compile(job["code"], "candidate.py", "exec"), module.__dict__)
    exec(compile(job["tests"], "tests.py", "exec"), module.__dict__)
    if job["calls_check"]:
        module.check(getattr(module, job["entry_point"]))
    if os.getpid() == pid:
        write(4, token)
    try:
        sys.stdout.flush()
    finally:
        exit(0)
run(os.write, os._exit, os.getpid())
"""


def main() -> None:
    """Run the job on stdin, and print its result."""
    whet = os.getppid()
    job: Job = json.load(sys.stdin)
    missing: list[str] = []
    adopt_orphans()
    has_namespaces = job["isolates"] and _try(isolation.unshare_namespaces, "namespaces", missing)
    _try(isolation.hide_from_debuggers, "hidden launcher", missing)
    program = tempfile.TemporaryFile()  # noqa: SIM115  # open until the process ends
    program.write(json.dumps(job["program"]).encode())
    program.seek(0)
    output_fd, child_output = os.pipe()
    passed_fd, child_passed = os.pipe()
    notes_fd, child_notes = os.pipe()
    pid = os.fork()
    if pid == 0:
        for fd in (output_fd, passed_fd, notes_fd):
            os.close(fd)
        _run_below(job, program.fileno(), child_output, child_passed, child_notes, first=has_namespaces)
    for fd in (child_output, child_passed, child_notes):
        os.close(fd)
    try:
        result = _watch(job, pid, whet, output_fd, passed_fd)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # with namespaces, this kills everything below; else the group of the code, also while it forks
            (os.kill if has_namespaces else os.killpg)(pid, signal.SIGKILL)
        kill_descendants()
    missing += json.loads(_read_all(notes_fd) or "[]")
    # code of a privileged user could write to this pipe through /proc, but does not know the id
    sys.stdout.write(f"\n{job['id']}{json.dumps({**result, 'missing': missing})}\n")
    sys.stdout.flush()
    os._exit(0)


def _try(protect: Callable[[], None], name: str, missing: list[str]) -> bool:
    try:
        protect()
    except OSError:
        missing.append(name)
        return False
    return True


def _watch(
    job: Job, pid: int, whet: int, output_fd: int, passed_fd: int
) -> dict[str, Any]:  # Any: JSON values
    """Return how the process ended, and what it printed, up to a limit."""
    deadline = time.monotonic() + job["wall_s"]
    output, limit = b"", job["output_bytes"]
    problem, is_open = "", True
    while True:
        readable = select.select([output_fd] if is_open else [], [], [], _POLL_S)[0]
        if readable:
            data = os.read(output_fd, 2**16)
            is_open = bool(data)
            output += data[: limit - len(output)]
        statuses = reap_children()
        if pid in statuses:
            break
        if time.monotonic() > deadline:
            problem = "timeout"
        elif len(descendants()) > job["processes"] + 1:  # root is exempt from RLIMIT_NPROC
            problem = "too many processes"
        elif os.getppid() != whet:
            os._exit(1)
        if problem:
            break
    output += _read_all(output_fd).encode()[: limit - len(output)]
    passed = not problem and _read_all(passed_fd) == job["program"]["token"]
    if not problem and not passed:
        problem = _describe_end(os.waitstatus_to_exitcode(statuses[pid]))
    return {"passed": passed, "problem": problem, "output": output.decode(errors="replace")}


def _describe_end(code: int) -> str:
    if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return "timeout"
    if code < 0 or code > 128:
        return f"signal {-code if code < 0 else code - 128}"
    return "error" if code else "exited before the last test"


def _read_all(fd: int) -> str:
    data = b""
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):  # a process of the code that has not ended yet holds the pipe
        while len(data) < 2**16 and (chunk := os.read(fd, 2**16)):
            data += chunk
    return data.decode(errors="replace")


def _run_below(job: Job, program: int, output: int, passed: int, notes: int, *, first: bool) -> NoReturn:
    """Run the code in this process, or in a child if this process is the first of its namespace."""
    try:
        die_with_parent()
        if not first or (pid := os.fork()) == 0:
            _become_program(job, program, output, passed, notes)
        for fd in (output, passed, notes):
            os.close(fd)
        while True:
            exited, status = os.wait()  # also adopted orphans
            if exited == pid:
                code = os.waitstatus_to_exitcode(status)
                os._exit(128 - code if code < 0 else code)
    finally:
        os._exit(1)


def _become_program(job: Job, program_fd: int, output: int, passed: int, notes: int) -> NoReturn:
    """Limit this process, and replace it by the program."""
    try:
        os.setpgid(0, 0)  # code that kills its process group does not reach the launcher
        die_with_parent()
        os.nice(5)
        os.chdir(job["directory"])
        missing: list[str] = []
        if job["isolates"]:
            _try(lambda: isolation.forbid_changes_outside(job["directory"]), "Landlock", missing)
        os.write(notes, json.dumps(missing).encode())
        os.close(notes)
        devnull = os.open(os.devnull, os.O_RDONLY)
        # away from the descriptors that they are copied to
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (devnull, output, output, program_fd, passed)]
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(5, 1024)
        isolation.limit_resources(job["limits"])
        arguments = [sys.executable, "-I", "-B", "-c", _PROGRAM]
        os.execve(sys.executable, arguments, job["environment"])
    finally:
        os._exit(1)
