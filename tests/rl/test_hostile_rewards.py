"""Rewards that fork, write to foreign descriptors or leak processes: values stay correct, processes are killed."""

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from whet.config.objectives.grpo import GRPOObjective
from whet.errors import RunError
from whet.rl.rewards.worker_pool import RewardInput, RewardPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and PR_SET_CHILD_SUBREAPER")

# each reward returns the length of the completion; for the completion "evil" it first calls the function `kind`
REWARDS = """
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time

FORGED = b'\\n{"value": 99.0}\\n{"id": 0, "value": 99.0}\\n{"id": null, "value": 99.0}\\n'

def sleep():
    time.sleep(60)
    os._exit(0)

def write_everywhere(data):
    for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if fd > 2:
            try:
                os.write(fd, data)
            except OSError:
                pass

def forks_and_both_return():
    os.fork()

def forks_twice_and_all_return():
    os.fork()
    os.fork()

def child_raises():
    if os.fork() == 0:
        raise ValueError("from the child")

def parent_waits_for_a_child_that_returns():
    if (pid := os.fork()):
        os.waitpid(pid, 0)

def forks_behind_pythons_back():
    ctypes.CDLL(None).fork()

def writes_answers():
    write_everywhere(FORGED)

def writes_half_a_line():
    write_everywhere(b'{"value": 99.0')

def prints_answers():
    sys.stdout.write(FORGED.decode())
    sys.stdout.flush()

def child_writes_answers():
    if os.fork() == 0:
        write_everywhere(FORGED)
        sleep()

def program_writes_answers():
    script = "for fd in range(3, 1024):\\n try: os.write(fd, %r)\\n except OSError: pass" % FORGED
    subprocess.run([sys.executable, "-S", "-c", "import os\\n" + script], close_fds=False)

def thread_writes_answers():
    def work():
        for _ in range(200):
            write_everywhere(FORGED * 100)
    threading.Thread(target=work, daemon=True).start()

def leaves_a_program():
    subprocess.Popen(["sleep", "60"])

def leaves_many_children():
    for _ in range(40):
        if os.fork() == 0:
            sleep()

def leaves_a_daemon():
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.closerange(0, 1024)
            sleep()
        os._exit(0)
    os.waitpid(pid, 0)

def leaves_a_multiprocessing_child():
    multiprocessing.get_context("fork").Process(target=sleep).start()

def ignores_signals():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

def kills_its_group():
    leaves_a_daemon()
    os.killpg(0, signal.SIGKILL)

def kills_its_parent():
    leaves_a_program()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)

def dies_and_leaves_a_child():
    if os.fork():
        os._exit(3)

def exits():
    leaves_a_daemon()
    sys.exit(0)

def takes_memory():
    bytearray(2**31)

def hangs():
    leaves_a_daemon()
    leaves_a_program()
    time.sleep(60)

def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)

def closes_everything():
    os.closerange(3, 1024)

def reward(prompt, completion, record, kind):
    if completion == "evil":
        globals()[kind]()
    return len(completion)
"""
HARMLESS = [
    *("forks_and_both_return", "forks_twice_and_all_return", "child_raises"),
    *("parent_waits_for_a_child_that_returns", "forks_behind_pythons_back"),
    *("writes_answers", "writes_half_a_line", "prints_answers"),
    *("child_writes_answers", "program_writes_answers", "thread_writes_answers"),
    *("leaves_a_program", "leaves_many_children", "leaves_a_daemon", "leaves_a_multiprocessing_child"),
    "ignores_signals",
]
FATAL = [
    *("kills_its_group", "kills_its_parent", "dies_and_leaves_a_child", "exits", "takes_memory"),
    *("hangs", "stops_itself", "closes_everything"),
]


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "hostile.py").write_text(REWARDS)
    return tmp_path / "hostile.py"


@pytest.fixture
def marker(monkeypatch):
    """A unique environment variable that all processes started by the test inherit."""
    name = uuid.uuid4().hex
    monkeypatch.setenv("WHET_TEST_MARKER", name)
    yield name
    for process in marked_processes(name):
        process.kill()


def marked_processes(name):
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("WHET_TEST_MARKER") == name and process.pid != os.getpid():
                processes.append(process)
        except psutil.Error:  # owned by another user, or exited
            continue
    return processes


def pool(path, kind, **settings):
    reward = {"function": f"{path}:reward", "arguments": {"kind": kind}}
    return RewardPool(
        GRPOObjective(rewards=[reward], **{"reward_workers": 2, "reward_memory": 1.0, **settings})
    )


@pytest.mark.parametrize("kind", [*HARMLESS, *FATAL])
def test_reward_cannot_change_other_values_or_leak_processes(rewards, marker, kind):
    timeout_s = 2.0 if kind in ("hangs", "stops_itself") else 60.0
    evil = -1.0 if kind in FATAL else 4.0
    texts = ["evil", "a", "abc", "evil", "ab", "abcdef"]
    with pool(rewards, kind, on_error=-1.0, reward_timeout=timeout_s) as reward_pool:
        for _ in range(2):
            values = reward_pool.score([RewardInput("", text, {}) for text in texts])
            assert values == [[evil if text == "evil" else float(len(text))] for text in texts]
        assert reward_pool.pop_failure_count() == (4 if kind in FATAL else 0)
        assert marked_processes(marker)
    assert marked_processes(marker) == []


def test_memory_error_names_the_limit(rewards, marker):
    with (
        pool(rewards, "takes_memory", reward_timeout=60.0) as reward_pool,
        pytest.raises(
            RunError, match="more memory than objective.reward_memory allows \\(1 GiB\\)"
        ) as caught,
    ):
        reward_pool.score([RewardInput("", "evil", {})])
    assert "completion: 'evil'" in caught.value.message
    assert marked_processes(marker) == []


SCRIPT = """
import os, signal, sys
from whet.config.objectives.grpo import GRPOObjective
from whet.rl.rewards.worker_pool import RewardInput, RewardPool

signal.signal(signal.SIGINT, signal.default_int_handler)
path, kind, ending = sys.argv[1:]
reward = {"function": path + ":reward", "arguments": {"kind": kind}}
timeout_s = 2.0 if ending == "time-out" else 50.0
with RewardPool(GRPOObjective(rewards=[reward], reward_workers=2, reward_timeout=timeout_s)) as pool:
    print("started", flush=True)
    pool.score([RewardInput("", "evil", {})] * 2)
    print("scored", flush=True)
    if ending == "error":
        raise ValueError
    if ending == "exit":
        os._exit(4)
"""


@pytest.mark.parametrize(
    ("ending", "kind", "code"),
    [
        ("normal", "leaves_a_daemon", 0),
        ("error", "leaves_many_children", 1),
        ("exit", "leaves_a_daemon", 4),
        ("time-out", "hangs", 1),
        ("SIGINT", "hangs", -signal.SIGINT),
        ("SIGTERM", "hangs", -signal.SIGTERM),
        ("SIGKILL", "hangs", -signal.SIGKILL),
    ],
)
def test_reward_processes_end_with_the_run(rewards, marker, ending, kind, code):
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(rewards), kind, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with run:
        assert run.stdout.readline() == "started\n"
        if ending.startswith("SIG"):
            # the script, two supervisors, two workers, and the daemon and the program of each worker
            assert wait_until(60, lambda: len(marked_processes(marker)) >= 1 + 2 * 4)
            run.send_signal(getattr(signal, ending))
        assert run.wait(60) == code
    assert wait_until(20, lambda: not marked_processes(marker))


def wait_until(seconds, condition):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
