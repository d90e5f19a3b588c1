"""A loss that is not finite on one rank changes no weight on any."""

import json

import pytest

import tiny
from distributed.harness import run_world


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_loss_that_is_no_number_on_one_rank_is_skipped_or_stops_on_all(tiny_directory, tmp_path, kind):
    # a micro-batch for each example: two for each rank would be four
    sections = {"method": {"kind": "full"}, "data": {"pack": False, "valid": None}}
    run = {"steps": 4, "batch_size": 2, "micro_batch_tokens": 160}
    config = tiny.run_config(tiny_directory, tmp_path, **sections, run=run) | {"parallel": {"kind": kind}}
    ranks = run_world(2, "train_with_nonfinite_loss", out=tmp_path / "out", config=config)
    for each in ranks:
        first, second, third, fourth = each["skip"]
        assert first == second != third != fourth
        assert each["skip"] == ranks[0]["skip"]
        assert each["stop"].startswith("step 2: loss nan, gradient norm nan: the weights were left")
    [kept] = (tmp_path / "runs" / "stop").glob("nonfinite-*.json")
    assert len(json.loads(kept.read_text())["micro_batches"]) == 2  # those of all ranks
    assert [path.name for path in (tmp_path / "runs" / "stop" / "checkpoints").iterdir()] == ["step-000001"]
