"""Run functions on several ranks; each rank is a process forked from a server that has imported torch."""

import multiprocessing
import os
import time
import traceback
from contextlib import suppress

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "whet.runs.run",
        "whet.parallel.sharded_checkpoint",
        "whet.parallel.watchdog",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "transformers.models.llama.modeling_llama",
    ]
)


def run_ranks(function, world, *arguments, limit_s=60):
    """What `function(rank, *arguments)` returned on process rank of a gloo group, in order.

    If a rank fails or the time limit is reached, all ranks are killed.
    """
    ports = SERVER.Queue()
    results = SERVER.Queue()
    ranks = [
        SERVER.Process(target=_run_rank, args=(rank, world, ports, results, function, arguments), daemon=True)
        for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        return _gather(ranks, results, limit_s)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                process.kill()
            process.join()


def _gather(ranks, results, limit_s):
    by_rank = {}
    deadline = time.monotonic() + limit_s
    while len(by_rank) < len(ranks):
        left = deadline - time.monotonic()
        assert left > 0, f"after {limit_s} s only the ranks {sorted(by_rank)} had ended"
        try:
            rank, result, failure = results.get(timeout=min(left, 0.5))
        except multiprocessing.queues.Empty:
            dead = [
                i for i, process in enumerate(ranks) if process.exitcode not in (None, 0) and i not in by_rank
            ]
            assert not dead, f"ranks {dead} died"
            continue
        assert failure is None, f"rank {rank}:\n{failure}"
        by_rank[rank] = result
    return [by_rank[rank] for rank in range(len(ranks))]


def join_group(rank, world, ports):
    """Join a gloo group and return its store; rank 0 sends its port to the others through `ports`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        for _ in range(world - 1):
            ports.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", ports.get(), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return store


def _run_rank(rank, world, ports, results, function, arguments):
    import torch.distributed as dist

    join_group(rank, world, ports)
    try:
        results.put((rank, function(rank, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None
    dist.barrier()
    dist.destroy_process_group()
