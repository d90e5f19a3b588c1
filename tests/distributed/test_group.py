"""Collectives of a world: shares, order and errors; and invalid worlds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributed.harness import free_port, run_world
from whet.config.load_config import validate_config
from whet.errors import ConfigError
from whet.parallel.preflight import apply_parallel_config, check_device, check_sharding
from whet.parallel.process_group import SINGLE_PROCESS, RendezvousError, World, distributed_world

CONFIG = {"model": "m", "data": {"train": "t"}, "run": {"steps": 1, "batch_size": 1}}


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_rounds_are_disjoint_exhaustive_and_equal_if_matched(count, shares, tensor, matched):
    items = [f"item {number}" for number in range(count)]
    worlds = [World(rank, shares * tensor, tp_size=tensor) for rank in range(shares * tensor)]
    rounds = [list(world.local_items(items, pad=matched)) for world in worlds]
    for start in range(tensor):  # tensor-parallel ranks have the same items
        assert rounds[start::tensor] == rounds[::tensor]
    counted = [(index, item) for each in rounds[::tensor] for index, item, counts in each if counts]
    assert sorted(counted) == sorted(enumerate(items))
    assert all(items[index] == item for each in rounds for index, item, _ in each)
    if matched:
        assert len({len(each) for each in rounds}) == 1


def test_collectives(tmp_path):
    first, second, third = run_world(3, "exercise_world", out=tmp_path)
    for each in (first, second, third):
        assert each["gathered"] == [0, 1, 2]
        assert each["from main"] == "zero"
        assert each["squares"] == [number**2 for number in range(7)]
        assert each["of none"] == []
        assert each["sums"] == {"loss": 6.0, "layers": [[3.0, 6.0]], "only": 5.0}
        assert each["added"] == [6.0, 9.0]
        assert each["raised"] == "DataError: rank 1 cannot read\n  hint: fix it"
        assert each["exact"]
        assert each["stopped"] == "EvaluationStoppedError: "
        assert "rank 0 and rank 2 do not have the same config: optim.lr: 0.0001 and 0.5" in each["config"]
    assert [each["odd"] for each in (first, second, third)] == 2 * ["RunError: _UnusualError: here"] + [
        "_UnusualError: here"
    ]
    assert len({each["drawn"] for each in (first, second, third)}) == 3
    assert first["turn"] < min(second["turn"], third["turn"])


def test_single_process_world(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with distributed_world() as world:
        assert world is SINGLE_PROCESS
    assert world.gather(3) == [3]
    assert world.sum_values({"a": [1, 2]}) == {"a": [1, 2]}
    assert world.map_items([1, 2], lambda items: [2 * each for each in items]) == [2, 4]
    tensor = torch.ones(2)
    assert world.all_reduce_sum(tensor) is tensor
    with pytest.raises(ZeroDivisionError), world.sync_errors():
        _ = 1 / 0


@pytest.mark.parametrize(
    ("parallel", "count", "message"),
    [
        ({"kind": "none"}, 2, "2 processes but parallel.kind is none"),
        ({"kind": "fsdp", "tensor": 2}, 3, "parallel.tensor=2 does not divide the 3 processes"),
    ],
)
def test_invalid_process_count_is_rejected(parallel, count, message):
    config = validate_config(CONFIG | {"parallel": parallel})
    with pytest.raises(ConfigError, match=message):
        config.parallel.check_processes(count)


def test_tensor_needs_fsdp():
    with pytest.raises(ConfigError, match="parallel: tensor > 1 needs kind: fsdp"):
        validate_config(CONFIG | {"parallel": {"kind": "ddp", "tensor": 2}})


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw8bit"])
def test_optimizers_of_full_matrices_are_rejected_with_fsdp(name):
    config = validate_config(CONFIG | {"parallel": {"kind": "fsdp"}, "optim": {"name": name}})
    with pytest.raises(ConfigError, match=f"optim.name {name} needs full matrices"):
        check_sharding(config)


def test_probes_are_rejected_with_fsdp():
    config = validate_config(CONFIG | {"parallel": {"kind": "fsdp"}, "log": {"probes": {}}})
    with pytest.raises(ConfigError, match="log.probes need full weights"):
        check_sharding(config)


def test_one_process_needs_no_kind():
    assert (
        apply_parallel_config(SINGLE_PROCESS, validate_config(CONFIG | {"parallel": {"kind": "fsdp"}}))
        == SINGLE_PROCESS
    )


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "process 4 on this machine has no GPU: torch finds 2"),
        ("cuda:1", "run.device=cuda:1: each of the 4 processes needs its own device"),
        ("mps", "4 processes cannot share the device mps"),
    ],
)
def test_missing_devices_are_rejected(monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        check_device(World(3, 4, local_rank=3), torch.device(device))
    check_device(World(1, 4, local_rank=1), torch.device("cuda"))
    check_device(World(3, 4, local_rank=3), torch.device("cpu"))


@pytest.mark.parametrize("rank", [0, 1])
def test_rendezvous_timeout(monkeypatch, rank):
    port = free_port()
    variables = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    message = f"rank {rank} of 2 waited 1 s at 127.0.0.1:{port}"
    with pytest.raises(RendezvousError, match=message), distributed_world(timeout_s=1):
        pass


def test_invalid_environment_is_rejected(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match="the environment variable RANK='first' is not an integer"),
        distributed_world(),
    ):
        pass
