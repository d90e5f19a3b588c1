"""whet train --nproc, torchrun and whet resume on the command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

import tiny
from distributed.harness import free_port

LIMIT_S = 120


@contextlib.contextmanager
def started(*arguments, **environment):
    """Start a command in a new session, and kill its remaining processes at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in left:
            each.kill()
        process.kill()
        process.communicate()


def run(*arguments, **environment):
    with started(*arguments, **environment) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def write_config(path, tiny_directory, **sections):
    config = tiny.run_config(tiny_directory, path.parent, **sections)
    path.write_text(yaml.safe_dump(config | {"parallel": {"kind": "ddp"}}))
    return str(path)


def test_processes_without_parallel_kind_are_rejected_before_start(tiny_directory, tmp_path):
    config = write_config(tmp_path / "c.yaml", tiny_directory)
    code, out, err = run("whet", "train", config, "parallel.kind=none", "--nproc", "2")
    assert code == 2
    assert err.count("error:") == 1
    assert "2 processes but parallel.kind is none" in err


def test_error_of_all_ranks_is_printed_once(tiny_directory, tmp_path):
    config = write_config(tmp_path / "c.yaml", tiny_directory, data={"train": str(tmp_path / "none.jsonl")})
    code, out, err = run("whet", "train", config, "--nproc", "2")
    assert code == 2, err
    assert err.count("error:") == 1
    assert "none.jsonl" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_unreachable_rendezvous_is_printed_once_per_machine(tiny_directory, tmp_path):
    config = write_config(tmp_path / "c.yaml", tiny_directory)
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables["WHET_RENDEZVOUS_S"] = "1"
    with (
        started("whet", "train", config, RANK="1", LOCAL_RANK="0", **variables) as first,
        started("whet", "train", config, RANK="2", LOCAL_RANK="1", **variables) as second,
    ):
        stderr = [each.communicate(timeout=LIMIT_S)[1] for each in (first, second)]
        assert [first.returncode, second.returncode] == [1, 1]
    assert [text.count("error:") for text in stderr] == [1, 0]
    assert "rank 1 of 3 waited 1 s" in stderr[0]


def wait_for_step(directory, step):
    deadline = time.monotonic() + LIMIT_S
    rows = directory / "metrics.jsonl"
    while not rows.is_file() or len(rows.read_text().splitlines()) < step:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_signal_to_one_rank_saves_once_and_the_run_can_resume(tiny_directory, tmp_path):
    run_directory = tmp_path / "runs" / "test"
    sections = {"data": {"valid": None}, "run": {"steps": 100_000}, "checkpoint": {"every": None}}
    config = write_config(tmp_path / "c.yaml", tiny_directory, **sections)
    with started("whet", "train", config, "--nproc", "2") as process:
        wait_for_step(run_directory, 3)
        last = max(psutil.Process(process.pid).children(), key=lambda each: each.pid)
        last.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 3, err
    assert err.count("to resume: whet resume") == 1
    assert "stopping: rank 1: SIGTERM after step" in err
    [saved] = (run_directory / "checkpoints").iterdir()
    step = json.loads((saved / "state.json").read_text())["step"]
    path = run_directory / "config.yaml"
    path.write_text(path.read_text().replace("steps: 100000", f"steps: {step + 2}"))
    code, out, err = run("whet", "resume", str(run_directory), "--nproc", "2")
    assert code == 0, err
    assert out.count(f"{step + 2} steps") == 1
    assert (run_directory / "final" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [None, 0.2])
def test_stopped_run_does_not_restart(tiny_directory, tmp_path, pause_s):
    """Neither before its first step, nor after a second signal."""
    sections = {"data": {"valid": None}, "run": {"steps": 100_000}, "checkpoint": {"every": None}}
    config = write_config(tmp_path / "c.yaml", tiny_directory, **sections)
    with started("whet", "train", config, "--nproc", "2", "--max-restarts", "2") as process:
        if pause_s is None:
            while len(psutil.Process(process.pid).children()) < 2:
                time.sleep(0.05)
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
        else:
            wait_for_step(tmp_path / "runs" / "test", 3)
            process.send_signal(signal.SIGINT)
            time.sleep(pause_s)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode in ((130,) if pause_s is None else (3, 130)), err
    assert "restarting" not in err
    assert "was terminated by" not in err


@pytest.mark.parametrize("rank", [0, 1])
def test_process_that_dies_before_rendezvous_is_detected(tiny_directory, tmp_path, rank):
    config = write_config(tmp_path / "c.yaml", tiny_directory, data={"valid": None})
    with started("whet", "train", config, "--nproc", "2") as process:
        launcher = psutil.Process(process.pid)
        while len(ranks := launcher.children()) < 2:
            time.sleep(0.01)
        sorted(ranks, key=lambda each: each.pid)[rank].kill()
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert f"rank {rank} of 2 was terminated by SIGKILL" in err


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_no_process_is_left(tiny_directory, tmp_path, victim):
    sections = {"data": {"valid": None}, "run": {"steps": 100_000}}
    config = write_config(tmp_path / "c.yaml", tiny_directory, **sections)
    with started("whet", "train", config, "--nproc", "2") as process:
        wait_for_step(tmp_path / "runs" / "test", 2)
        children = psutil.Process(process.pid).children(recursive=True)
        (children[1] if victim == "rank" else process).send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode not in (0, 3)
        gone, alive = psutil.wait_procs(children, timeout=20)
        assert not alive


@pytest.mark.slow
def test_torchrun(tiny_directory, tmp_path):
    config = write_config(tmp_path / "c.yaml", tiny_directory)
    code, out, err = run(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "whet", "train", config
    )
    assert code == 0, err
    assert out.count("4 steps") == 1
    assert (tmp_path / "runs" / "test" / "final" / "adapter_config.json").is_file()
