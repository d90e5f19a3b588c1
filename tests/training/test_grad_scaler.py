"""fp16 loss scaling: an overflow repeats the batch, and the scale is part of the run's state."""

import math

import pytest
import torch

import whet
from tiny import random_examples, run_config
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream
from whet.data.packing import StepSettings
from whet.hardware import Precision, choose_precision
from whet.objectives.sft import SFT
from whet.training.callbacks import Callback, StopRun
from whet.training.grad_scaler import GROWTH_STEPS, LossScale
from whet.training.trainer import Trainer

SETTINGS = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=64, pack=True)


def trainer(tiny_directory, tmp_path=None, callbacks=(), scale=None, **sections):
    """Return a float32 trainer, so that two of them differ only in the loss scale."""
    torch.manual_seed(0)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=4)
    config = validate_config(run_config(tiny_directory, tmp_path or ".", **sections))
    stream = BatchStream(random_examples(20), SETTINGS, seed=0)
    run = Trainer(model, SFT(), stream, config, callbacks, directory=tmp_path)
    if scale is not None:
        run.state.loss_scale.value = scale
    return run


def test_power_of_two_scale_does_not_change_an_update(tiny_directory):
    plain, scaled = trainer(tiny_directory).fit(), trainer(tiny_directory, scale=2.0**10).fit()
    for a, b in zip(plain.history, scaled.history, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


def overflowing(run, limit):
    """Simulate an overflow: scales above `limit` give an infinite gradient."""
    run.trained[-1].register_hook(
        lambda gradient: gradient * (math.inf if run.state.loss_scale.value > limit else 1.0)
    )


def test_overflow_repeats_the_batch_with_a_smaller_scale(tiny_directory, tmp_path):
    run = trainer(tiny_directory, tmp_path, scale=2.0**12)
    overflowing(run, limit=2.0**7)
    rows = run.fit().history
    plain = trainer(tiny_directory).fit().history
    assert run.state.loss_scale.value == 2.0**7
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    assert not any("skipped" in row for row in rows)
    assert not list(tmp_path.glob("nonfinite*"))


def test_nonfinite_gradient_at_every_scale_is_reported_and_keeps_the_scale(tiny_directory, tmp_path):
    run = trainer(tiny_directory, tmp_path, scale=2.0**5, run={"on_nonfinite": "skip"})
    run.trained[-1].register_hook(lambda gradient: gradient * math.nan)
    before = [p.detach().clone() for p in run.trained]
    assert run.step(next(run.stream))["skipped"]
    assert run.state.loss_scale.value == 2.0**5
    assert all(torch.equal(a, b) for a, b in zip(before, run.trained, strict=True))
    assert (tmp_path / "nonfinite-step-000001.json").is_file()


def test_scale_grows_after_many_good_steps():
    scale = LossScale(2.0**10)
    for _ in range(GROWTH_STEPS - 1):
        scale.note_good_step()
    assert scale.value == 2.0**10
    scale.note_good_step()
    assert (scale.value, scale.good_steps) == (2.0**11, 0)
    off = LossScale()
    for _ in range(GROWTH_STEPS + 1):
        off.note_good_step()
    assert off.value == 1.0


def test_scale_is_part_of_the_state(tiny_directory, tmp_path):
    class StopAt(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("test", unfinished=True) if step == 2 else None

    run = trainer(tiny_directory, tmp_path, [StopAt()], scale=2.0**12)
    overflowing(run, limit=2.0**9)
    run.fit()
    again = trainer(tiny_directory, tmp_path)
    again.restore(tmp_path / "checkpoints" / "step-000002")
    assert again.state.loss_scale == LossScale(2.0**9, 2)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_fp16_trains_with_fp32_weights(tiny_directory, tmp_path, kind):
    sections = {"method": {"kind": kind}, "run": {"precision": "fp16", "steps": 6}}
    if kind == "full":
        sections["optim"] = {"lr": 1e-3}
    result = whet.train(run_config(tiny_directory, tmp_path, **sections))
    losses = [row["eval_loss"] for row in result.history if "eval_loss" in row]
    assert losses[-1] < losses[0]
    assert all(row["loss_scale"] >= 2.0 for row in result.history if "loss" in row)
    f16, f32 = torch.float16, torch.float32
    chosen = choose_precision("fp16", torch.device("cpu"))
    assert chosen == Precision(f16, f32, f16, chosen.reason)
