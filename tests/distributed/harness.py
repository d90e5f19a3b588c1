"""Run functions in a world of a few local processes, with a time limit and without leaked processes."""

import functools
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path

TESTS_DIR = Path(__file__).parent


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@functools.cache
def _context():
    """Return a context that forks processes from one that has done all imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["whet.runs.run", "transformers", "distributed.checks"])
    return context


def run_world(size, check, *, out, timeout=60, **arguments):
    """Return the results of `checks.CHECK(world, **arguments)` on all ranks; fail if any rank raises."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "WHET_TOKENS": os.environ["WHET_TOKENS"]}
    processes = [
        _context().Process(target=_work, args=(rank, size, port, check, str(out), arguments, environment))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert not late, f"{check}: ranks {late} of {size} are still running after {timeout} s"
    finally:
        for process in processes:
            process.kill()
            process.join()
    paths = [out / f"rank-{rank}.json" for rank in range(size)]
    dead = {rank: process.exitcode for rank, process in enumerate(processes) if not paths[rank].is_file()}
    texts = [path.read_text() for path in paths if path.is_file()]
    assert not dead, f"{check}: exit codes of ranks that died: {dead}; the others: {texts}"
    outcomes = [json.loads(each) for each in texts]
    errors = [f"rank {rank}:\n{each['error']}" for rank, each in enumerate(outcomes) if "error" in each]
    assert not errors, "\n".join(errors)
    return [each["result"] for each in outcomes]


def rank_environment(rank, size, port):
    """What a process is texts of its world."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _work(rank, size, port, check, out, arguments, environment):
    os.environ |= {**environment, **rank_environment(rank, size, port)}
    sys.path.insert(0, str(TESTS_DIR.parent))
    import torch

    from distributed import checks
    from whet.parallel.process_group import distributed_world

    torch.set_num_threads(1)
    try:
        with distributed_world(timeout_s=30) as world:
            outcomes = {"result": getattr(checks, check)(world, out=Path(out), **arguments)}
    except BaseException:
        outcomes = {"error": traceback.format_exc()}
    path = Path(out) / f"rank-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(outcomes))
    path.with_suffix(".part").rename(path)
