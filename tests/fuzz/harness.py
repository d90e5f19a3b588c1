"""Run cases in worker processes, and report those that hang, abort or fail with an unexpected error."""

import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent
START_S = 240  # to import everything and parse the original files, on a busy machine
CASE_S = 60


@dataclass
class Outcome:
    """The results of the cases of one parser."""

    parser: str
    cases: int = 0
    rejected: int = 0
    problems: list[str] = field(default_factory=list)


def fuzz(parser, count, root):
    """Run `count` cases. A worker that hangs or dies is replaced, and its case is reported."""
    outcome, next_case = Outcome(parser), 0
    while next_case < count:
        next_case = _run_worker(outcome, next_case, count - next_case, root)
    return outcome


def _run_worker(outcome, first, count, root):
    """Run cases in one worker, and return the number of the next case to run."""
    command = [sys.executable, "-m", "fuzz.worker", outcome.parser, str(first), str(count), str(root)]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    errors = (root / "stderr.txt").open("wb")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **threads, "PYTHONPATH": path}
    )
    current = None
    try:
        for line in _lines(process.stdout):
            report = json.loads(line)
            current = report["case"]
            if "problem" in report:
                outcome.cases += 1
                outcome.rejected += report["rejected"]
                if report["problem"]:
                    outcome.problems.append(
                        f"{outcome.parser} {current} ({report['changed']}): {report['problem']}\n{report['trace']}"
                    )
        ending = f"ended with {process.wait(timeout=60)}"
    except TimeoutError:
        ending = f"did not end within {CASE_S} s"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        errors.close()
    if outcome.cases == first + count:
        return first + count
    stderr = (root / "stderr.txt").read_text(errors="replace")[-2000:]
    if current is None:
        raise RuntimeError(f"the worker for {outcome.parser} {ending} before its first case:\n{stderr}")
    outcome.cases += 1
    outcome.problems.append(f"{outcome.parser} {current}: its process {ending}\n{stderr}")
    return current + 1


def _lines(stream):
    """Yield the lines of a pipe; raise TimeoutError if none arrives in time."""
    buffer, timeout = b"", START_S
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            deadline = time.monotonic() + timeout
            while b"\n" not in buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(stream.fileno(), 65536)
                if not chunk:
                    return
                buffer += chunk
            line, _, buffer = buffer.partition(b"\n")
            timeout = CASE_S
            yield line
