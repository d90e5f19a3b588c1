"""Cases of one parser in a process of its own: `python -m fuzz.worker PARSER FIRST COUNT DIRECTORY`.

Writes a JSON line before and after each case, so that whoever reads them knows which one hangs or aborts.
A case depends on the parser's name and its number alone: any can be run again.
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

ROOM = 3 * 2**30  # of address space above what the process has when it starts: more is a bug, not a lack
MOST_LINES, LONGEST_LINE = 40, 4000


def judge(error):
    """What is wrong with how a case ended, or None."""
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
    if len(lines) > MOST_LINES or max(map(len, lines)) > LONGEST_LINE:
        return f"a message of {len(lines)} lines, the longest of {max(map(len, lines))} characters"
    return None


def run_case(parser, number, base, directory):
    """(what was changed, the exception it ended with or None)"""
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
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))


def main(name, first, count, root):
    from fuzz.parsers import PARSERS

    warnings.simplefilter("ignore")
    parser, root = PARSERS[name], Path(root)
    root.mkdir(parents=True, exist_ok=True)
    base = root / "base"
    if not base.is_dir():
        parser.build(base)
    parser.parse(shutil.copytree(base, root / "warm-up", dirs_exist_ok=True))  # the unchanged files are good
    limit_memory()
    for number in range(first, first + count):
        say(case=number)
        changed, error = run_case(parser, number, base, root / "case")
        problem = judge(error)
        trace = "".join(traceback.format_exception(error))[-3000:] if problem else None
        say(case=number, changed=changed, problem=problem, trace=trace, refused=error is not None)


def say(**fields):
    os.write(REPORT, (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    REPORT = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
