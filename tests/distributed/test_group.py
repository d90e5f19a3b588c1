"""What ranks tell one another: shares, order and errors; and worlds that cannot be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributed.harness import free_port, run_world
from whet.config.load_config import make_config
from whet.errors import ConfigError
from whet.parallel.preflight import agreed, check_device, check_sharding
from whet.parallel.process_group import SOLO, UnreachableError, World, joined

CONFIG = {"model": "m", "data": {"train": "t"}, "run": {"steps": 1, "batch_size": 1}}


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_rounds_are_disjoint_exhaustive_and_of_one_length_where_matched(count, shares, tensor, matched):
    items = [f"item {number}" for number in range(count)]
    worlds = [World(rank, shares * tensor, tensor=tensor) for rank in range(shares * tensor)]
    found = [list(world.rounds(items, matched=matched)) for world in worlds]
    for start in range(tensor):  # ranks that compute layers together have the same
        assert found[start::tensor] == found[::tensor]
    counted = [(place, item) for each in found[::tensor] for place, item, counts in each if counts]
    assert sorted(counted) == sorted(enumerate(items))
    assert all(items[place] == item for each in found for place, item, _ in each)
    if matched:
        assert len({len(each) for each in found}) == 1


def test_what_ranks_tell_one_another(tmp_path):
    first, second, third = run_world(3, "tell", out=tmp_path)
    for each in (first, second, third):
        assert each["gathered"] == [0, 1, 2]
        assert each["from main"] == "zero"
        assert each["squares"] == [number**2 for number in range(7)]
        assert each["of none"] == []
        assert each["sums"] == {"loss": 6.0, "layers": [[3.0, 6.0]], "only": 5.0}
        assert each["added"] == [6.0, 9.0]
        assert each["raised"] == "DataError: rank 1 cannot read\n  hint: mend it"
        assert each["exact"]
        assert each["stopped"] == "EvaluationStoppedError: "
        assert "rank 0 and rank 2 do not have the same config: optim.lr: 0.0001 and 0.5" in each["config"]
    assert [each["odd"] for each in (first, second, third)] == 2 * ["RunError: _Odd: here"] + ["_Odd: here"]
    assert len({each["drawn"] for each in (first, second, third)}) == 3
    assert first["turn"] < min(second["turn"], third["turn"])


def test_one_process_is_a_world_of_its_own(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with joined() as world:
        assert world is SOLO
    assert world.gather(3) == [3]
    assert world.sums({"a": [1, 2]}) == {"a": [1, 2]}
    assert world.each([1, 2], lambda mine: [2 * each for each in mine]) == [2, 4]
    tensor = torch.ones(2)
    assert world.add_up(tensor) is tensor
    with pytest.raises(ZeroDivisionError), world.abreast():
        _ = 1 / 0


@pytest.mark.parametrize(
    ("parallel", "count", "message"),
    [
        ({"kind": "none"}, 2, "2 processes but parallel.kind is none"),
        ({"kind": "fsdp", "tensor": 2}, 3, "parallel.tensor=2 does not divide the 3 processes"),
    ],
)
def test_a_number_of_processes_that_does_not_fit_is_refused(parallel, count, message):
    config = make_config(CONFIG | {"parallel": parallel})
    with pytest.raises(ConfigError, match=message):
        config.parallel.check_processes(count)


def test_tensor_needs_fsdp():
    with pytest.raises(ConfigError, match="parallel: tensor > 1 needs kind: fsdp"):
        make_config(CONFIG | {"parallel": {"kind": "ddp", "tensor": 2}})


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw8bit"])
def test_an_optimizer_that_reads_whole_matrices_is_refused_with_fsdp(name):
    config = make_config(CONFIG | {"parallel": {"kind": "fsdp"}, "optim": {"name": name}})
    with pytest.raises(ConfigError, match=f"optim.name {name} reads whole matrices"):
        check_sharding(config)


def test_probes_are_refused_with_fsdp():
    config = make_config(CONFIG | {"parallel": {"kind": "fsdp"}, "log": {"probes": {}}})
    with pytest.raises(ConfigError, match="log.probes look at whole weights"):
        check_sharding(config)


def test_one_process_needs_no_kind():
    assert agreed(SOLO, make_config(CONFIG | {"parallel": {"kind": "fsdp"}})) == SOLO


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "process 4 of this machine has no GPU: torch sees 2"),
        ("cuda:1", "run.device=cuda:1: each of 4 processes has a device of its own"),
        ("mps", "4 processes cannot share the device mps"),
    ],
)
def test_devices_that_are_not_there_are_refused(monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        check_device(World(3, 4, local_rank=3), torch.device(device))
    check_device(World(1, 4, local_rank=1), torch.device("cuda"))
    check_device(World(3, 4, local_rank=3), torch.device("cpu"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rendezvous_nobody_comes_to_ends_with_a_message(monkeypatch, rank):
    port = free_port()
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    message = f"rank {rank} of 2 waited 1 s at 127.0.0.1:{port}"
    with pytest.raises(UnreachableError, match=message), joined(timeout_s=1):
        pass


def test_an_environment_that_is_no_place_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK='first' in the environment is no number"), joined():
        pass
