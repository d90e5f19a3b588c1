"""A non-finite loss on one rank changes no weight on any rank."""

import json

import pytest

import tiny
from distributed.harness import run_world


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_nonfinite_loss_on_one_rank_skips_or_stops_on_all(tiny_directory, tmp_path, kind):
    # one micro-batch per example, so one per rank
    sections = {"method": {"kind": "full"}, "data": {"pack": False, "valid": None}}
    run = {"steps": 4, "batch_size": 2, "micro_batch_tokens": 160}
    config = tiny.run_config(tiny_directory, tmp_path, **sections, run=run) | {"parallel": {"kind": kind}}
    ranks = run_world(2, "train_with_nonfinite_loss", out=tmp_path / "out", config=config)
    for each in ranks:
        first, second, third, fourth = each["skip"]
        assert first == second != third != fourth
        assert each["skip"] == ranks[0]["skip"]
        assert each["stop"].startswith(
            "step 2: loss nan, gradient norm nan; the update was skipped, the weights are unchanged"
        )
    [stored] = (tmp_path / "runs" / "stop").glob("nonfinite-*.json")
    assert len(json.loads(stored.read_text())["micro_batches"]) == 2  # those of all ranks
    assert [path.name for path in (tmp_path / "runs" / "stop" / "checkpoints").iterdir()] == ["step-000001"]
