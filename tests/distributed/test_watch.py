"""A rank that raises, dies or hangs ends all ranks soon, with one message that names rank, step and collective."""

import os
import re
import signal
import sys
import time
from contextlib import suppress

import pytest

from distributed.ranks import SERVER, join_group

LIMIT_S = 3.0
SLACK_S = 60.0  # for a busy machine; without a watchdog the test never ends
STEPS = 10**6


def train(rank, world, ports, log, trouble, at):
    """All-reduce in a loop under a watchdog, with trouble at `at` = (rank, step)."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    import torch
    import torch.distributed as dist

    from whet.parallel.watchdog import Watchdog

    store = join_group(rank, world, ports)
    watch = Watchdog(dist.PrefixStore("whet", store), rank=rank, size=world, timeout_s=LIMIT_S)
    watch.start()
    try:
        for step in range(1, STEPS):
            watch.report_activity("the forward pass")
            if (rank, step) == at:
                print(f"trouble {time.monotonic()}", file=sys.stderr)
                TROUBLES[trouble]()
            with watch.collective("all-reduce of gradients"):
                dist.all_reduce(torch.ones(1))
            watch.report_step(step)
            time.sleep(0.05)
            if trouble == "none" and step == 20:
                break
    except Exception as error:
        if watch.claim_report(error):
            print(f"error: {watch.add_rank_context(error).message}", file=sys.stderr, flush=True)
        watch.fail(error)
        os._exit(1)
    with watch.collective("barrier"):
        dist.barrier()
    watch.stop()
    dist.destroy_process_group()


def raise_error():
    raise ValueError("a bad record")


TROUBLES = {
    "raise": raise_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(600),
    "leave": lambda: os._exit(0),
    "none": lambda: None,
}


def run(tmp_path, trouble, *, at, world=2):
    log, ports = tmp_path / "log", SERVER.Queue()
    ranks = [
        SERVER.Process(target=train, args=(rank, world, ports, log, trouble, at), daemon=True)
        for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_S + SLACK_S)
        ended, text = time.monotonic(), log.read_text()
        started_at = [float(line.split()[1]) for line in text.splitlines() if line.startswith("trouble")]
        return [process.exitcode for process in ranks], ended - (started_at or [ended])[0], text
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                process.kill()
            process.join()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("trouble", "expected", "limit_s"),
    [
        (
            "raise",
            r"failed at step 11, the forward pass, after all-reduce of gradients: ValueError: a bad record$",
            0,
        ),
        ("kill", r"died at step (?:8|9|1.), .*all-reduce of gradients$", 0),
        pytest.param(
            "leave", r"died at step (?:8|9|1.), .*all-reduce of gradients$", 0, marks=pytest.mark.slow
        ),
        ("stop", r"sent no heartbeat for 3 s, at step (?:8|9|1.), .*all-reduce of gradients$", LIMIT_S),
        ("sleep", r"hangs at step 11, the forward pass, after all-reduce of gradients, for (\d+) s", LIMIT_S),
    ],
)
def test_trouble_on_one_rank_ends_all_with_one_message(tmp_path, trouble, expected, limit_s, rank):
    codes, elapsed_s, log = run(tmp_path, trouble, at=(rank, 12))
    assert elapsed_s < limit_s + SLACK_S
    messages = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, log
    match = re.search(expected, messages[0])
    assert match, messages[0]
    assert all(limit_s <= int(seconds) <= round(elapsed_s) for seconds in match.groups())
    assert messages[0].startswith(f"error: rank {rank} ")
    assert 0 not in (codes if trouble != "leave" else codes[:rank] + codes[rank + 1 :])
    assert None not in codes


def test_run_without_trouble_ends_silently(tmp_path):
    codes, _, log = run(tmp_path, "none", at=(0, 0), world=3)
    assert codes == [0, 0, 0]
    assert "error" not in log
