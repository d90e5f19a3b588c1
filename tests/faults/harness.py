"""Runs of the command in processes of their own, which can be killed at any file operation or moment.

A fork server that has imported everything starts each process in milliseconds, so that many can die.
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
    """One file operation of a run: which, on what, and the how-manieth time."""

    operation: str
    place: str
    count: int = 1


@dataclass
class Fault:
    """What happens at a boundary: `kill` the process, or fail as the system does (an errno)."""

    kill_at: Boundary | None = None
    errno: int | None = None
    only: str = ""  # fail where the place holds this
    first: int = 10**9  # so many times
    record: str | None = None  # a file that gets every boundary

    def install(self):
        import whet.storage

        self.seen = {}
        self.failed = 0
        whet.storage.boundary = self

    def __call__(self, operation, path):
        place = place_of(path)
        count = self.seen[operation, place] = self.seen.get((operation, place), 0) + 1
        if self.record is not None:
            with Path(self.record).open("a") as file:
                file.write(json.dumps([operation, place, count]) + "\n")
        if self.kill_at == Boundary(operation, place, count):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal may reach another thread first
        if self.errno is not None and self.only in place and self.failed < self.first:
            self.failed += 1
            raise OSError(self.errno, os.strerror(self.errno), str(path))


def place_of(path):
    """The last two parts of a path inside `runs` or `tokens`, without what marks it as temporary.

    What lies outside of them has one name: that of a case's own directory is another one in every test.
    """
    parts = [re.sub(r"^\.(.+)\.(writing|old|removed)-\d+$", r"\1", part) for part in Path(path).parts]
    home = next((part for part in ("runs", "tokens") if part in parts), None)
    if home is None:
        return "outside"
    return "/".join(parts[parts.index(home) :][-2:])


def _child(arguments, fault, output):
    import torch

    from whet.cli import app

    if output is not None:  # tokens of its own, so that dying while they are written is tried, too
        os.environ["WHET_TOKENS"] = str(Path(output).parent / "tokens")
    if output is None:  # a reader that has gone
        reading, descriptor = os.pipe()
        os.close(reading)
    else:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
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
    """Start a whet command; the caller joins or kills it. Without an output, nobody reads what it says."""
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
    """Run a whet command to its end: its exit code (negative: the signal that ended it)."""
    process = start(*arguments, fault=fault, output=output)
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {timeout} s")
    return process.exitcode


class Case:
    """A run that can be started, killed and resumed, in a directory of its own."""

    def __init__(self, directory, config):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.run = self.directory / "runs" / "test"
        self.output = self.directory / "output.txt"
        self.config = self.directory / "config.yaml"
        config = {**config, "run": {**config["run"], "dir": str(self.directory / "runs"), "name": "test"}}
        self.config.write_text(yaml.safe_dump(config))

    def go(self, fault=None):
        """Train, or resume if there is something to resume."""
        return whet_process(*self.command(), fault=fault, output=self.output)

    def command(self):
        return ("resume", self.run) if (self.run / "config.yaml").is_file() else ("train", self.config)

    def kill_after(self, seconds, *, begun):
        """Kill it so long after its start, or after the first row it writes; False where it was quicker."""
        metrics = self.run / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.is_file() else 0
        process = start(*self.command(), output=self.output)
        while begun and process.is_alive() and not (metrics.is_file() and metrics.stat().st_size > size):
            time.sleep(0.002)
        process.join(seconds)
        alive = process.is_alive()
        process.kill()
        process.join()
        return alive

    def finish(self, resumes=50):
        """Go on until it is over."""
        for _ in range(resumes):
            code = self.go()
            if code == 0 or (code == 2 and "has finished" in self.said()):
                return
            assert code == 3, f"exit code {code}:\n{self.said()}"
        raise AssertionError("it does not come to an end")

    def said(self):
        return self.output.read_text() if self.output.is_file() else ""

    def rows(self):
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def result(self):
        """Everything that must be the same, bit for bit: rows without times, and the bytes of final/."""
        files = {
            path.name: path.read_bytes() for path in sorted((self.run / "final").iterdir()) if path.is_file()
        }
        return [timeless(row) for row in self.rows()], files


def timeless(value):
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return value


def same(found, expected):
    """Compare two results; the first difference is what a failing test shows."""
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == theirs
    assert found[1].keys() == expected[1].keys()
    different = [name for name in found[1] if found[1][name] != expected[1][name]]
    assert not different


def boundaries(case, kinds=None):
    """Every file operation of a whole run of this case, in order."""
    record = case.directory / "boundaries.jsonl"
    assert case.go(Fault(record=str(record))) == 0, case.said()
    found = [Boundary(*json.loads(line)) for line in record.read_text().splitlines()]
    with suppress(OSError):
        record.unlink()
    return found


def interesting(found):
    """All of them, but of the many writes into one file the first, the second and the last."""
    last = {(b.operation, b.place): b.count for b in found}
    return [
        b
        for b in found
        if b.operation not in ("write", "append") or b.count <= 2 or b.count == last[b.operation, b.place]
    ]
