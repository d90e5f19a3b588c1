"""A distributed job when one of its processes is killed, suspended or terminated."""

import json
import re
import signal
import socket
import time

import psutil
import pytest

import tiny
from distributed.commands import (
    errors_in,
    rank_processes,
    run_command,
    started,
    torchrun,
    wait_for_step,
    whet_command,
    write_config,
)
from whet.storage import check_manifest

LIMIT_S = 10
LONG = 100_000  # steps: no test waits for the end


def config(tiny_directory, tmp_path, *, kind="ddp", steps=LONG, timeout=LIMIT_S, **sections):
    settings = tiny.run_config(
        tiny_directory,
        tmp_path,
        run={"steps": steps, "batch_size": 4},
        data={"valid": None},
        checkpoint={"every": 5, "keep": 3},
        optim={"warmup": 2},
        **sections,
    )
    settings["parallel"] = {"kind": kind, "timeout": timeout}
    return write_config(tmp_path / "config.yaml", settings)


def all_ended(processes):
    _, alive = psutil.wait_procs(processes, timeout=3)
    return not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("kind", "expected", "limit_s"),
    [
        ("raise", "rank 1 failed at step 4, between steps, after .*: ValueError: a test error", 0),
        # its last heartbeat is up to a tenth of a second old, and may have been sent within a collective
        ("kill", r"rank 1 \(process \d+ on .*\) died at step 4, (?:between steps, after|waiting in) .*", 0),
        (
            "hang",
            r"rank 1 hangs at step 4, between steps, after .*, for (\d+) s .*rank 0 is at step 4, .*",
            2,
        ),
    ],
)
def test_trouble_on_one_rank_ends_the_command(tiny_directory, tmp_path, kind, expected, limit_s):
    path = config(tiny_directory, tmp_path, timeout=2)
    codes, elapsed_s, log = run_command(2, ["train", str(path)], out=tmp_path, trouble=(1, 5, kind))
    assert elapsed_s < limit_s + 60
    assert codes[0] == 1
    # a rank that hangs ends when it reads the failure, and is killed if that takes too long
    assert codes[1] in {"raise": [1], "kill": [-signal.SIGKILL], "hang": [1, -signal.SIGKILL]}[kind]
    (message,) = errors_in(tmp_path / "log")
    match = re.fullmatch(f"error: {expected}", message)
    assert match, message
    assert all(limit_s <= int(seconds) <= round(elapsed_s) for seconds in match.groups())
    assert "Traceback" not in log


def test_signal_to_one_rank_saves_once_on_all(tiny_directory, tmp_path):
    path = config(tiny_directory, tmp_path, kind="fsdp")
    codes, _, log = run_command(2, ["train", str(path)], out=tmp_path, trouble=(1, 7, "terminate"))
    assert codes == [3, 3], log
    run = tmp_path / "runs" / "test"
    assert sorted(each.name for each in (run / "checkpoints").iterdir()) == ["step-000005", "step-000007"]
    check_manifest(run / "checkpoints" / "step-000007")
    assert "rank 1: SIGTERM after step 7" in log
    assert not errors_in(tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected", "limit_s"),
    [
        pytest.param(signal.SIGKILL, r"rank 1 \(process \d+ on .*\) died at step \d+, .*", 0, id="killed"),
        pytest.param(
            signal.SIGSTOP,
            r"rank 1 \(process \d+ on .*\) sent no heartbeat for 10 s, at step \d+, .*",
            LIMIT_S,
            id="stopped",
        ),
    ],
)
def test_killed_or_suspended_rank_ends_the_job(tiny_directory, tmp_path, number, expected, limit_s):
    log, run = tmp_path / "log", tmp_path / "runs" / "test"
    command = whet_command("train", str(config(tiny_directory, tmp_path)), "--nproc", "2")
    with started(command, log) as process:
        wait_for_step(run, 7, log=log, process=process)
        ranks = rank_processes(process)
        ranks[1].send_signal(number)
        sent_at = time.monotonic()
        code = process.wait(limit_s + 60)
        elapsed_s = time.monotonic() - sent_at
        assert elapsed_s < limit_s + 60, elapsed_s
        assert code == 1
        assert all_ended(ranks.values())
    (message,) = errors_in(log)
    assert re.fullmatch(f"error: {expected}", message), message
    assert ", after " in message or ", waiting in " in message  # the last collective
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["a rank", "whet", "torchrun"])
def test_signal_to_any_process_saves_once_on_all(tiny_directory, tmp_path, to):
    log, run = tmp_path / "log", tmp_path / "runs" / "test"
    path = str(config(tiny_directory, tmp_path, kind="fsdp"))
    command = whet_command("train", path, "--nproc", "2")
    if to == "torchrun":
        command = torchrun("--standalone", "--nproc-per-node=2", "-m", "whet", "train", path)
    with started(command, log) as process:
        wait_for_step(run, 7, log=log, process=process)
        ranks = rank_processes(process)
        (ranks[1] if to == "a rank" else process).send_signal(signal.SIGTERM)
        code = process.wait(60)
        assert code == 3 if to != "torchrun" else code != 0  # torchrun has other exit codes
        assert all_ended(ranks.values())
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    last = max(row["step"] for row in rows if "loss" in row)
    newest = max((run / "checkpoints").iterdir())
    assert newest.name == f"step-{last:06d}"
    check_manifest(newest)
    assert "SIGTERM" in log.read_text()
    assert not errors_in(log)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "--nproc"])
def test_job_restarts_from_last_checkpoint_after_losing_a_rank(tiny_directory, tmp_path, launcher):
    log, run = tmp_path / "log", tmp_path / "runs" / "test"
    path = str(config(tiny_directory, tmp_path, kind="fsdp", steps=60))
    command = whet_command("train", path, "--nproc", "2", "--max-restarts", "1")
    if launcher == "torchrun":
        command = torchrun(
            "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "whet", "train", path
        )
    with started(command, log) as process:
        wait_for_step(run, 12, log=log, process=process)
        rank_processes(process)[1].kill()
        assert process.wait(120) == 0, log.read_text()
    text = log.read_text()
    assert re.search(r"resuming after step \d+", text)
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 61))
    assert (run / "final" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_two_machines_train_one_run(tiny_directory, tmp_path):
    """Two torchrun agents that share an address only, as on two nodes."""
    from distributed.harness import free_port

    path = str(config(tiny_directory, tmp_path, kind="fsdp", steps=8))
    port = free_port()

    def agent(node):
        return torchrun(
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={node}",
            "--rdzv-backend=c10d",
            "--rdzv-id=test",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            *("-m", "whet", "train", path),
        )

    logs = [tmp_path / f"log-{node}" for node in (0, 1)]
    with started(agent(0), logs[0]) as first, started(agent(1), logs[1]) as second:
        assert first.wait(120) == 0, logs[0].read_text()
        assert second.wait(30) == 0, logs[1].read_text()
    run = tmp_path / "runs" / "test"
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert len(list((run / "checkpoints" / "step-000008").glob("shard-*"))) == 2
    assert (run / "final" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_lost_machine_ends_the_other(tiny_directory, tmp_path):
    from distributed.harness import free_port

    path = str(config(tiny_directory, tmp_path))
    port = free_port()
    common = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=lost")
    agents = [
        torchrun(
            *common, f"--node-rank={node}", f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "whet", "train", path
        )
        for node in (0, 1)
    ]
    logs = [tmp_path / f"log-{node}" for node in (0, 1)]
    run = tmp_path / "runs" / "test"
    with started(agents[0], logs[0]) as first:
        wait_for_port(port)  # the first agent hosts the rendezvous, and is not the one that is lost
        with started(agents[1], logs[1]) as second:
            wait_for_step(run, 5, log=logs[0], process=first)
            has_rank_1 = 0 in rank_processes(first)
            for each in [*psutil.Process(second.pid).children(recursive=True), second]:
                each.kill()
            assert first.wait(60) != 0
    messages = [message for log in logs for message in errors_in(log)]
    # if rank 0 is lost, so is the store that would have named it
    assert not has_rank_1 or any(
        re.search(r"rank 1 \(.*\) died at step \d+", message) for message in messages
    )


def wait_for_port(port, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("no process listens")
