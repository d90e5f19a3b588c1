"""NaN and infinity from any source: weights and moments do not change, and the batch is saved."""

import json
import math
from dataclasses import replace

import pytest
import torch

import whet
from tiny import random_examples, run_config
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream
from whet.data.packing import StepSettings
from whet.errors import RunError
from whet.objectives.sft import SFT
from whet.training.callbacks import Callback
from whet.training.trainer import Trainer

OPTIMIZERS = ["adamw", "adam", "sgd", "lion"]
SETTINGS = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=64, pack=True)


def trainer(tiny_directory, tmp_path=None, full=False, callbacks=(), **sections):
    torch.manual_seed(0)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    if full:
        model.requires_grad_(True)
    else:
        whet.attach_lora(model, rank=4)
    config = validate_config(run_config(tiny_directory, tmp_path or ".", **sections))
    stream = BatchStream(random_examples(20), SETTINGS, seed=0)
    return Trainer(model, SFT(), stream, config, callbacks, directory=tmp_path)


def in_data_weights(run, value):
    """Set the weight of one token of the second micro-batch."""
    first, second, *rest = next(run.stream)
    weights = torch.ones(second.tokens.shape)
    weights.flatten()[second.supervised_positions[0]] = value
    return [first, replace(second, weights=weights), *rest]


def in_model_weights(run, value):
    """Set a frozen weight, or a trained one in full training."""
    linear = run.model.layers[0].mlp.down_proj
    with torch.no_grad():
        getattr(linear, "base", linear).weight[0, 0] = value
    return next(run.stream)


def in_gradients(run, value):
    """Set only the gradient; the loss itself is finite."""
    run.trained[-1].register_hook(lambda gradient: gradient * value)
    return next(run.stream)


def memory(run):
    """Return copies of all trained weights and moments."""
    moments = [v for p in run.trained for v in run.optimizer.state[p].values() if torch.is_tensor(v)]
    return [t.detach().clone() for t in (*run.trained, *moments)]


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("inject", [in_data_weights, in_gradients])
def test_nonfinite_step_changes_nothing(tiny_directory, tmp_path, inject, optimizer, value):
    sections = {"optim": {"name": optimizer, "weight_decay": 0.1}, "run": {"on_nonfinite": "skip"}}
    run = trainer(tiny_directory, tmp_path, **sections)
    run.step(next(run.stream))
    run.step(next(run.stream))
    before = memory(run)
    batches = inject(run, value)
    metrics = run.step(batches)
    assert metrics["skipped"]
    after = memory(run)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    saved = json.loads((tmp_path / "nonfinite-step-000003.json").read_text())
    assert [m["records"] for m in saved["micro_batches"]] == [list(batch.origins) for batch in batches]
    assert [m["tokens"] for m in saved["micro_batches"]] == [batch.tokens.tolist() for batch in batches]
    assert not (math.isfinite(float(saved["loss"])) and math.isfinite(float(saved["grad_norm"])))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("full", [False, True])
def test_nonfinite_weight_does_not_spread(tiny_directory, tmp_path, optimizer, full):
    run = trainer(tiny_directory, tmp_path, full, optim={"name": optimizer}, run={"on_nonfinite": "skip"})
    run.step(next(run.stream))
    batches = in_model_weights(run, math.nan)
    before = memory(run)
    assert run.step(batches)["skipped"]
    assert all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, memory(run), strict=True)
    )


def poisoned_from(run, first, last):
    original = run.objective.loss

    def loss(model, batch):
        result = original(model, batch)
        bad = first <= run.state.step + 1 <= last
        return type(result)({"loss": result.sums["loss"] * math.nan}) if bad else result

    run.objective.loss = loss


def test_run_stops_after_nonfinite_limit_skipped_steps(tiny_directory, tmp_path):
    keys = {"steps": 20, "on_nonfinite": "skip", "nonfinite_limit": 3}
    run = trainer(tiny_directory, tmp_path, run=keys)
    poisoned_from(run, 5, 20)
    with pytest.raises(
        RunError, match=r"step 7: .* 3 consecutive non-finite steps reach run.nonfinite_limit \(3\)"
    ):
        run.fit()
    assert len(list(tmp_path.glob("nonfinite-step-*.json"))) == 3
    assert all(p.isfinite().all() for p in run.trained)


def test_finite_step_resets_the_count(tiny_directory):
    keys = {"steps": 9, "on_nonfinite": "skip", "nonfinite_limit": 3}
    run = trainer(tiny_directory, run=keys)
    poisoned_from(run, 2, 3)
    rows = run.fit().history
    poisoned_from(again := trainer(tiny_directory, run=keys), 6, 7)
    assert sum(row.get("skipped", False) for row in rows + again.fit().history) == 4


def test_count_continues_after_a_resume(tiny_directory, tmp_path):
    from whet.training.callbacks import StopRun

    class StopAt(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("test", unfinished=True) if step == 3 else None

    keys = {"steps": 20, "on_nonfinite": "skip", "nonfinite_limit": 3}
    run = trainer(tiny_directory, tmp_path, callbacks=[StopAt()], run=keys)
    poisoned_from(run, 2, 20)
    assert run.fit().steps == 3
    again = trainer(tiny_directory, tmp_path, run=keys)
    poisoned_from(again, 2, 20)
    again.restore(tmp_path / "checkpoints" / "step-000003")
    with pytest.raises(RunError, match="step 4: .* 3 consecutive non-finite steps"):
        again.fit()
