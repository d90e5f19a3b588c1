"""Functions run by several ranks at once, each a process forked from a server that has imported torch."""

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
    """What `function(rank, *arguments)` returned on each rank of a gloo group, in order.

    A rank that fails, or time that runs out, ends them all.
    """
    ports = SERVER.Queue()
    results = SERVER.Queue()
    ranks = [
        SERVER.Process(target=_one, args=(rank, world, ports, results, function, arguments), daemon=True)
        for rank in range(world)
    ]
    try:
        for each in ranks:
            each.start()
        return _gather(ranks, results, limit_s)
    finally:
        for each in ranks:
            with suppress(ProcessLookupError):
                each.kill()
            each.join()


def _gather(ranks, results, limit_s):
    found = {}
    ends = time.monotonic() + limit_s
    while len(found) < len(ranks):
        left = ends - time.monotonic()
        assert left > 0, f"after {limit_s} s only the ranks {sorted(found)} had ended"
        try:
            rank, result, failure = results.get(timeout=min(left, 0.5))
        except multiprocessing.queues.Empty:
            dead = [i for i, each in enumerate(ranks) if each.exitcode not in (None, 0) and i not in found]
            assert not dead, f"ranks {dead} died"
            continue
        assert failure is None, f"rank {rank}:\n{failure}"
        found[rank] = result
    return [found[rank] for rank in range(len(ranks))]


def joined(rank, world, ports):
    """The store of a gloo group that this process has become a rank of; rank 0 tells the others its port."""
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


def _one(rank, world, ports, results, function, arguments):
    import torch.distributed as dist

    joined(rank, world, ports)
    try:
        results.put((rank, function(rank, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None
    dist.barrier()
    dist.destroy_process_group()
