"""A rank that raises, dies or hangs ends all of them soon, and one message says who, where and after what."""

import os
import re
import signal
import sys
import time
from contextlib import suppress

import pytest

from distributed.ranks import SERVER, joined

LIMIT_S = 3.0
SLACK_S = 60.0  # for the machine to be busy; without a watch it never ends
STEPS = 10**6


def train(rank, world, ports, log, trouble, at):
    """All-reduce for ever, under a watch, until there is trouble at `at` = (rank, step)."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    import torch
    import torch.distributed as dist

    from whet.parallel.watchdog import Watch

    store = joined(rank, world, ports)
    watch = Watch(dist.PrefixStore("whet", store), rank=rank, size=world, limit_s=LIMIT_S)
    watch.start()
    try:
        for step in range(1, STEPS):
            watch.doing("the forward pass")
            if (rank, step) == at:
                print(f"trouble {time.monotonic()}", file=sys.stderr)
                TROUBLES[trouble]()
            with watch.collective("the sum of gradients"):
                dist.all_reduce(torch.ones(1))
            watch.at_step(step)
            time.sleep(0.05)
            if trouble == "none" and step == 20:
                break
    except Exception as error:
        if watch.speaks(error):
            print(f"error: {watch.located(error).message}", file=sys.stderr, flush=True)
        watch.fail(error)
        os._exit(1)
    with watch.collective("the end"):
        dist.barrier()
    watch.stop()
    dist.destroy_process_group()


def raise_an_error():
    raise ValueError("a bad record")


TROUBLES = {
    "raise": raise_an_error,
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
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(LIMIT_S + SLACK_S)
        ended, said = time.monotonic(), log.read_text()
        began = [float(line.split()[1]) for line in said.splitlines() if line.startswith("trouble")]
        return [each.exitcode for each in ranks], ended - (began or [ended])[0], said
    finally:
        for each in ranks:
            with suppress(ProcessLookupError):
                each.kill()
            each.join()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("trouble", "said", "limit_s"),
    [
        (
            "raise",
            r"failed at step 11, the forward pass, after the sum of gradients: ValueError: a bad record$",
            0,
        ),
        ("kill", r"died at step (?:8|9|1.), .*the sum of gradients$", 0),
        pytest.param("leave", r"died at step (?:8|9|1.), .*the sum of gradients$", 0, marks=pytest.mark.slow),
        ("stop", r"gave no sign for 3 s, at step (?:8|9|1.), .*the sum of gradients$", LIMIT_S),
        ("sleep", r"hangs at step 11, the forward pass, after the sum of gradients, for (\d+) s", LIMIT_S),
    ],
)
def test_trouble_on_one_rank_ends_all_and_is_said_once(tmp_path, trouble, said, limit_s, rank):
    codes, took, log = run(tmp_path, trouble, at=(rank, 12))
    assert took < limit_s + SLACK_S
    messages = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, log
    found = re.search(said, messages[0])
    assert found, messages[0]
    assert all(limit_s <= int(seconds) <= round(took) for seconds in found.groups())
    assert messages[0].startswith(f"error: rank {rank} ")
    assert 0 not in (codes if trouble != "leave" else codes[:rank] + codes[rank + 1 :])
    assert None not in codes


def test_a_run_without_trouble_ends_in_silence(tmp_path):
    codes, _, log = run(tmp_path, "none", at=(0, 0), world=3)
    assert codes == [0, 0, 0]
    assert "error" not in log
