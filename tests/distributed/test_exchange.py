"""Processes exchange JSON only, never pickles, and listen on the loopback interface only."""

import json
import re
from pathlib import Path

import psutil
import pytest

import tiny
import whet
from distributed.commands import rank_processes, started, wait_for_step, whet_command, write_config
from distributed.harness import run_world
from whet.errors import CheckpointError, ConfigError, RunError, StorageError
from whet.parallel.object_exchange import describe_error, restore_error

SOURCE = Path(whet.__file__).parent
PICKLES = re.compile(
    r"\b(?:all_gather|gather|broadcast|scatter|send|recv)_object(?:_list)?\b|\bimport (?:pickle|dill)"
)


def test_no_module_pickles():
    matches = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PICKLES.search(line)
    ]
    assert matches == []


def test_sharded_run_uses_no_pickling_collective(tiny_directory, tmp_path):
    settings = tiny.run_config(
        tiny_directory,
        tmp_path,
        method={"kind": "full"},
        eval={"every": 2},
        checkpoint={"every": 2},
        run={"steps": 4, "batch_size": 4},
    )
    config = {**settings, "parallel": {"kind": "fsdp"}}
    first, second = run_world(2, "forbid_pickle", out=tmp_path / "ranks", timeout=120, config=config)
    assert first == second
    assert (Path(first) / "final").is_dir()
    assert list(Path(first).glob("checkpoints/step-*/shard-00002.safetensors"))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("wrong", hint="do it"),
        CheckpointError("gone"),
        StorageError("full\n", hint=None),
        ValueError("x", 3),
        MemoryError(),
        FileNotFoundError(2, "No such file or directory", "/a/file"),
    ],
)
def test_error_keeps_type_and_text(error):
    received = restore_error(json.loads(json.dumps(describe_error(error))))
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert received.args == error.args


class _Foreign(Exception):
    pass


def test_error_of_unknown_type_becomes_run_error():
    for kind in (
        "os:system",
        "builtins:eval",
        "whet.errors:no_such",
        "nowhere:Error",
        f"{__name__}:_Foreign",
    ):
        received = restore_error({"type": kind, "text": "words", "arguments": ["words"], "hint": None})
        assert type(received) is RunError
        assert "words" in received.message


def test_local_processes_listen_on_loopback_only(tiny_directory, tmp_path):
    settings = tiny.run_config(
        tiny_directory, tmp_path, run={"steps": 100_000, "batch_size": 4}, checkpoint={"every": 1000}
    )
    config = write_config(tmp_path / "c.yaml", {**settings, "parallel": {"kind": "ddp"}})
    log = tmp_path / "log"
    with started(whet_command("train", str(config), "--nproc", "2"), log) as process:
        wait_for_step(tmp_path / "runs" / "test", 2, log=log, process=process)
        ranks = rank_processes(process)
        assert len(ranks) == 2
        addresses = [
            connection.laddr.ip
            for rank_process in (psutil.Process(process.pid), *ranks.values())
            for connection in rank_process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
    assert addresses, "the store of rank 0 listens"
    assert set(addresses) <= {"127.0.0.1", "::1"}
