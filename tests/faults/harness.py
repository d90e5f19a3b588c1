"""Run whet commands in separate processes, which can be killed at any file operation or moment.

A fork server with all imports done starts each process in milliseconds, so that tests can kill many.
"""

import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

TIMES = {
    "tokens_per_s",
    "mean_tokens_per_s",
    "steps_per_s",
    "tflops_per_s",
    "step_s",
    "elapsed_s",
    "peak_gib",
    "eval_s",
    "probe_s",
    "seconds",
    "s",
    "directory",
}
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "whet.cli.app",
        "whet.runs.run",
        "whet.reporting.progress",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
        "transformers.tokenization_utils_tokenizers",
        "torch._dynamo",
    ]
)


@dataclass(frozen=True)
class Boundary:
    """One file operation of a run: the operation, its location, and its count at that location."""

    operation: str
    location: str
    count: int = 1


@dataclass
class Fault:
    """A fault at a boundary: kill the process, or raise an OSError with an errno."""

    kill_at: Boundary | None = None
    errno: int | None = None
    only: str = ""  # fail only if the location contains this
    first: int = 10**9  # fail at most this many times
    record: str | None = None  # a file to which every boundary is appended

    def install(self):
        import whet.storage

        self.seen = {}
        self.failed = 0
        whet.storage.before_file_operation = self

    def __call__(self, operation, path):
        location = location_of(path)
        count = self.seen[operation, location] = self.seen.get((operation, location), 0) + 1
        if self.record is not None:
            with Path(self.record).open("a") as file:
                file.write(json.dumps([operation, location, count]) + "\n")
        if self.kill_at == Boundary(operation, location, count):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal may reach another thread first
        if self.errno is not None and self.only in location and self.failed < self.first:
            self.failed += 1
            raise OSError(self.errno, os.strerror(self.errno), str(path))


def location_of(path):
    """Return the last two parts of a path inside `runs` or `tokens`, without the marks of temporary names.

    All other paths are "outside", because a case has a different directory in every test.
    """
    parts = [re.sub(r"^\.(.+)\.(writing|old|removed)-\d+$", r"\1", part) for part in Path(path).parts]
    home = next((part for part in ("runs", "tokens") if part in parts), None)
    if home is None:
        return "outside"
    return "/".join(parts[parts.index(home) :][-2:])


def _child(arguments, fault, output):
    import torch

    from whet.cli import app

    if output is not None:  # a separate token cache, so that kills while it is written are tested
        os.environ["WHET_TOKENS"] = str(Path(output).parent / "tokens")
    if output is None:  # a pipe whose reader has closed it
        read_fd, write_fd = os.pipe()
        os.close(read_fd)
    else:
        write_fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(write_fd, 1)
    os.dup2(write_fd, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    if fault is not None:
        fault.install()
    sys.argv = ["whet", *map(str, arguments)]
    try:
        app.main()
    finally:
        if output is not None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"peak {peak} MiB", flush=True)


def start(*arguments, fault=None, output):
    """Start a whet command; the caller joins or kills it. If `output` is None, its output pipe is closed."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # the server is started by the first process, with this environment
    try:
        process = _SERVER.Process(target=_child, args=(arguments, fault, output and str(output)))
        process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return process


def whet_process(*arguments, fault=None, output, timeout=120):
    """Run a whet command to its end, and return its exit code (negative: the signal that ended it)."""
    process = start(*arguments, fault=fault, output=output)
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {timeout} s")
    return process.exitcode


class Case:
    """A run in its own directory that can be started, killed and resumed."""

    def __init__(self, directory, config):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.run = self.directory / "runs" / "test"
        self.output = self.directory / "output.txt"
        self.config = self.directory / "config.yaml"
        config = {**config, "run": {**config["run"], "dir": str(self.directory / "runs"), "name": "test"}}
        self.config.write_text(yaml.safe_dump(config))

    def run_once(self, fault=None):
        """Train, or resume if the run exists; return the exit code."""
        return whet_process(*self.command(), fault=fault, output=self.output)

    def command(self):
        return ("resume", self.run) if (self.run / "config.yaml").is_file() else ("train", self.config)

    def kill_after(self, seconds, *, after_first_row):
        """Kill the run some seconds after its start or first row; return False if it ended before."""
        metrics = self.run / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.is_file() else 0
        process = start(*self.command(), output=self.output)
        while (
            after_first_row
            and process.is_alive()
            and not (metrics.is_file() and metrics.stat().st_size > size)
        ):
            time.sleep(0.002)
        process.join(seconds)
        was_running = process.is_alive()
        process.kill()
        process.join()
        return was_running

    def finish(self, resumes=50):
        """Resume until the run has finished."""
        for _ in range(resumes):
            code = self.run_once()
            if code == 0 or (code == 2 and "has already finished" in self.output_text()):
                return
            assert code == 3, f"exit code {code}:\n{self.output_text()}"
        raise AssertionError("the run does not finish")

    def output_text(self):
        return self.output.read_text() if self.output.is_file() else ""

    def rows(self):
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def result(self):
        """Return everything that must be bit-identical: rows without times, and the files of final/."""
        files = {
            path.name: path.read_bytes() for path in sorted((self.run / "final").iterdir()) if path.is_file()
        }
        return [without_times(row) for row in self.rows()], files


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return value


def assert_same_result(result, expected):
    """Compare two results, so that a failure shows the first difference."""
    for ours, theirs in zip(result[0], expected[0], strict=True):
        assert ours == theirs
    assert result[1].keys() == expected[1].keys()
    different = [name for name in result[1] if result[1][name] != expected[1][name]]
    assert not different


def boundaries(case, kinds=None):
    """Return every file operation of an uninterrupted run of this case, in order."""
    record = case.directory / "boundaries.jsonl"
    assert case.run_once(Fault(record=str(record))) == 0, case.output_text()
    operations = [Boundary(*json.loads(line)) for line in record.read_text().splitlines()]
    with suppress(OSError):
        record.unlink()
    return operations


def distinct_boundaries(operations):
    """Return all boundaries, but only the first, second and last of many writes to one file."""
    last = {(b.operation, b.location): b.count for b in operations}
    return [
        b
        for b in operations
        if b.operation not in ("write", "append") or b.count <= 2 or b.count == last[b.operation, b.location]
    ]
