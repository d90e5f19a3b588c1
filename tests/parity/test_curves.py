"""A whole run, step by step, against the loop that people write around transformers."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))


def test_the_loss_of_every_step_is_that_of_transformers(tmp_path, monkeypatch):
    """Model, masks, loss, clipping, decay, schedule, optimizer: any of them wrong would show within 30 steps."""
    from benchmarks import curves

    monkeypatch.setattr(curves, "choose_device", lambda: torch.device("cpu"))  # in float32
    monkeypatch.setattr(sys, "argv", ["curves", "--small", "--out", str(tmp_path / "curves.json")])
    curves.main()
    found = json.loads((tmp_path / "curves.json").read_text())
    theirs, ours, eight = (found["curves"][kind] for kind in ("transformers", "whet", "whet-fp8"))
    assert theirs[0] - theirs[-1] > 1
    assert ours == pytest.approx(theirs, abs=2e-5)
    assert eight == pytest.approx(theirs, abs=0.02)
