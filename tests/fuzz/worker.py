"""Run cases of one parser in a separate process: `python -m fuzz.worker PARSER FIRST COUNT DIRECTORY`.

Writes a JSON line before and after each case, so that the reader knows which one hangs or aborts. A case
depends only on the name of the parser and its number, so every case can be reproduced.
"""

import json
import os
import random
import resource
import shutil
import sys
import traceback
import warnings
from pathlib import Path

MEMORY_LIMIT = 3 * 2**30  # additional address space; needing more is a bug
MAX_LINES, MAX_LINE_LENGTH = 40, 4000


def find_problem(error):
    """Return the problem with the outcome of a case, or None."""
    from whet.error_boundary import is_out_of_memory
    from whet.errors import WhetError

    if error is None:
        return None
    if is_out_of_memory(error):
        return f"memory: {error!r}"
    if not isinstance(error, WhetError):
        return f"unexpected {type(error).__name__}: {str(error)[:300]}"
    if error.exit_code != 2:
        return f"exit code {error.exit_code}: {error}"
    lines = str(error).splitlines()
    if len(lines) > MAX_LINES or max(map(len, lines)) > MAX_LINE_LENGTH:
        return f"a message of {len(lines)} lines, the longest of {max(map(len, lines))} characters"
    return None


def run_case(parser, number, base, directory):
    """Return a description of the mutation, and the exception of the case or None."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(base, directory)
    rng = random.Random(f"{parser.name} {number}")
    changed = parser.change(directory, rng)
    try:
        parser.parse(directory)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return changed, error
    return changed, None


def limit_memory():
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, size + MEMORY_LIMIT))


def main(name, first, count, root):
    from fuzz.parsers import PARSERS

    warnings.simplefilter("ignore")
    parser, root = PARSERS[name], Path(root)
    root.mkdir(parents=True, exist_ok=True)
    base = root / "base"
    if not base.is_dir():
        parser.build(base)
    parser.parse(shutil.copytree(base, root / "warm-up", dirs_exist_ok=True))  # the original files are valid
    limit_memory()
    for number in range(first, first + count):
        report(case=number)
        changed, error = run_case(parser, number, base, root / "case")
        problem = find_problem(error)
        trace = "".join(traceback.format_exception(error))[-3000:] if problem else None
        report(case=number, changed=changed, problem=problem, trace=trace, rejected=error is not None)


def report(**fields):
    os.write(REPORT, (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    REPORT = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
