"""The losses of a complete run match those of a plain transformers training loop."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))


def test_loss_of_every_step_matches_transformers(tmp_path, monkeypatch):
    """An error in the model, mask, loss, clipping, decay, schedule or optimizer would show within 30 steps."""
    from benchmarks import curves

    monkeypatch.setattr(curves, "choose_device", lambda: torch.device("cpu"))  # in float32
    monkeypatch.setattr(sys, "argv", ["curves", "--small", "--out", str(tmp_path / "curves.json")])
    curves.main()
    results = json.loads((tmp_path / "curves.json").read_text())
    theirs, ours, fp8 = (results["curves"][kind] for kind in ("transformers", "whet", "whet-fp8"))
    assert theirs[0] - theirs[-1] > 1
    assert ours == pytest.approx(theirs, abs=2e-5)
    assert fp8 == pytest.approx(theirs, abs=0.02)
