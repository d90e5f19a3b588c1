"""Prefetching the next step changes the timing only."""

import json
import math

import pytest
import torch

import whet
from tiny import random_examples, run_config
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream, make_batch
from whet.data.packing import StepSettings
from whet.errors import RunError
from whet.objectives.sft import SFT
from whet.training.callbacks import Callback, ModelCallback, StopRun
from whet.training.checkpoint import newest_valid_checkpoint, read_checkpoint_state
from whet.training.prefetch import HostCopy
from whet.training.trainer import Trainer

SETTINGS = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=64, pack=True)


class StopAt(Callback):
    """Stops the run after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("enough", unfinished=True) if step == self.step else None


def trainer(tiny_directory, directory, *, ahead, callbacks=(), steps=7, evaluates=True, **sections):
    """Return a trainer with dropout, so that the random state matters, too."""
    torch.manual_seed(0)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=4, dropout=0.3)
    sections = {"checkpoint": {"every": 4}, "eval": {"every": 3}, **sections}
    sections["run"] = {"steps": steps, "batch_size": 4, **sections.get("run", {})}
    config = validate_config(run_config(tiny_directory, directory, **sections))
    held = [make_batch([[example]]) for example in random_examples(2, seed=1)] if evaluates else ()
    stream = BatchStream(random_examples(20), SETTINGS, seed=0)
    run = Trainer(model, SFT(), stream, config, callbacks, eval_batches=held, directory=directory)
    run.prefetches = ahead
    return run


def event_order(run, monkeypatch):
    """Record when gradients are computed and when metrics are read."""
    seen, compute, read = [], run.train_step.gradients, HostCopy.values
    monkeypatch.setattr(
        run.train_step, "gradients", lambda batches: seen.append("compute") or compute(batches)
    )
    monkeypatch.setattr(HostCopy, "values", lambda copy: seen.append("read") or read(copy))
    return seen


def outcome(run):
    weights = [p.detach().clone() for p in run.trained]
    keys = ("step", "loss", "grad_norm", "eval_loss", "tokens_total")
    return weights, [{key: row[key] for key in keys if key in row} for row in run.history]


def same(one, other):
    assert one[1] == other[1]
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_prefetching_does_not_change_metrics_or_weights(tiny_directory, tmp_path):
    actual = []
    for ahead in (False, True):
        run = trainer(tiny_directory, tmp_path / str(ahead), ahead=ahead)
        run.fit()
        actual.append(outcome(run))
    same(*actual)
    states = [
        read_checkpoint_state(tmp_path / str(ahead) / "checkpoints/step-000004") for ahead in (False, True)
    ]
    for state in states:
        for measured in ("elapsed_s", "peak_gib"):
            state["run"].pop(measured)
        state["run"]["latest"] = None
        state["config"] = None
    assert states[0] == states[1]


def test_next_step_is_prefetched_unless_the_model_is_needed(tiny_directory, tmp_path, monkeypatch):
    """There are evaluations after steps 3 and 6, and a checkpoint after step 4."""
    run = trainer(tiny_directory, tmp_path, ahead=True)
    seen = event_order(run, monkeypatch)
    run.fit()
    ahead, turn = ["compute", "read"], ["read", "compute"]
    assert seen == ["compute", *ahead, *ahead, *turn, *turn, *ahead, *turn, "read"]


@pytest.mark.parametrize("step", [1, 2, 5])
def test_stopped_run_resumes_as_without_prefetching(tiny_directory, tmp_path, step):
    whole = trainer(tiny_directory, tmp_path / "whole", ahead=False)
    whole.fit()
    first = trainer(tiny_directory, tmp_path / "cut", ahead=True, callbacks=[StopAt(step)])
    assert first.fit().unfinished
    assert first.queue.prefetched is None
    assert all(p.grad is None for p in first.trained)
    again = trainer(tiny_directory, tmp_path / "cut", ahead=True)
    again.restore(newest_valid_checkpoint(tmp_path / "cut"))
    again.fit()
    weights, rows = outcome(whole)
    same((weights, [row for row in rows if row["step"] > step]), outcome(again))


def spoil(run, step):
    """Makes the loss of one step NaN."""
    original, count = run.objective.loss, 0

    def loss(model, batch):
        nonlocal count
        count += torch.is_grad_enabled()
        result = original(model, batch)
        bad = torch.is_grad_enabled() and count == step
        return type(result)({"loss": result.sums["loss"] * (math.nan if bad else 1)})

    run.objective.loss = loss


@pytest.mark.parametrize("ahead", [False, True])
def test_nonfinite_step_stops_the_run_before_that_step(tiny_directory, tmp_path, ahead):
    one_each = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=512, pack=True)
    run = trainer(tiny_directory, tmp_path, ahead=ahead, evaluates=False, checkpoint={"every": 100})
    run.stream.settings = one_each
    spoil(run, step=2)
    with pytest.raises(RunError, match="step 2: loss nan"):
        run.fit()
    state = read_checkpoint_state(newest_valid_checkpoint(tmp_path))
    assert (state["step"], state["data"]["index"]) == (1, 1)
    saved = json.loads((tmp_path / "nonfinite-step-000002.json").read_text())
    assert len(saved["micro_batches"]) == 1


def test_skipped_step_does_not_change_the_prefetched_one(tiny_directory, tmp_path):
    actual = []
    for ahead in (False, True):
        run = trainer(
            tiny_directory, tmp_path / str(ahead), ahead=ahead, evaluates=False, run={"on_nonfinite": "skip"}
        )
        run.stream.settings = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=512, pack=True)
        spoil(run, step=2)
        run.fit()
        assert run.history[1]["skipped"]
        for row in run.history:
            row["loss"] = str(row["loss"])
            row["grad_norm"] = str(row["grad_norm"])
        actual.append(outcome(run))
    same(*actual)


def test_model_callback_prevents_prefetching(tiny_directory, tmp_path, monkeypatch):
    gradients = []

    class Theirs(ModelCallback):
        def on_step_end(self, step, metrics):
            gradients.append([p.grad for p in run.trained if p.grad is not None])

    run = trainer(tiny_directory, tmp_path, ahead=True, callbacks=[Theirs()], steps=3)
    seen = event_order(run, monkeypatch)
    run.fit()
    assert seen == 3 * ["compute", "read"]
    assert gradients == 3 * [[]]


def test_cpu_and_fp16_do_not_prefetch(tiny_directory, tmp_path):
    torch.manual_seed(0)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=4)
    config = validate_config(run_config(tiny_directory, tmp_path))
    assert not Trainer(model, SFT(), [], config).prefetches


class Machine:
    """A simulated host and device with separate clocks: the host queues work, the device executes it in order."""

    def __init__(self, monkeypatch, run, *, host_s, device_s):
        self.now = self.done = 0.0
        self.host_s, self.device_s = host_s, device_s
        machine, compute = self, run.train_step.gradients

        class FakeEvent:
            def __init__(self, device):
                self.at = machine.done = max(machine.now, machine.done)

            def wait(self):
                machine.now = max(machine.now, self.at)

            def seconds_until(self, later):
                assert max(self.at, later.at) <= machine.now, "not reached yet"
                return later.at - self.at

        monkeypatch.setattr(run.train_step, "gradients", lambda batches: machine.queue() or compute(batches))
        monkeypatch.setattr("whet.training.prefetch.DeviceEvent", FakeEvent)
        monkeypatch.setattr("whet.training.prefetch.time.perf_counter", lambda: machine.now)
        run.clock.run_start = run.clock.step_end = 0.0

    def queue(self):
        """The device starts with the first kernel, and cannot end before the last one is queued."""
        started = max(self.now, self.done)
        self.now += self.host_s
        self.done = max(started + self.device_s, self.now)


@pytest.mark.parametrize(("host_s", "device_s"), [(2.0, 0.1), (0.1, 2.0), (1.0, 1.0)])
@pytest.mark.parametrize("ahead", [False, True])
def test_step_durations_are_not_underestimated(
    tiny_directory, tmp_path, monkeypatch, ahead, host_s, device_s
):
    """A slow host notices late that a step has ended, because it was queueing the next one."""
    monitor = whet.ThroughputMonitor(3, flops_per_token=1e9, peak_tflops=1.0)
    run = trainer(tiny_directory, tmp_path, ahead=ahead, callbacks=[monitor], evaluates=False)
    machine = Machine(monkeypatch, run, host_s=host_s, device_s=device_s)
    run.fit()
    longest = max(host_s, device_s)
    assert [row["step_s"] for row in run.history] == pytest.approx([longest] * 7)
    assert run.history[-1]["elapsed_s"] == pytest.approx(machine.now) == pytest.approx(7 * longest)
    for row in run.history:
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / longest)
        assert row["steps_per_s"] == pytest.approx(1 / longest)
        assert row["mfu"] == pytest.approx(1e9 * row["mean_tokens_per_s"] / 1e12)


class PrefetchOnCPU(ModelCallback):
    """Prefetches also on a CPU, unless a callback uses the model."""

    def on_train_begin(self, run):
        self.trainer.prefetches = True

    def touches_model(self, step):
        return False


EXPERTS = {"preset": "nano-moe", "d_model": 32, "heads": 2, "width": 16, "layers": 2, "experts": 4}
GRPO = {
    "kind": "grpo",
    "group_size": 3,
    "max_new_tokens": 6,
    "reward_workers": 1,
    "rewards": [{"function": "length", "arguments": {"longest": 2, "margin": 20}}],
}
SUMS = {"train": "synth:sums:10", "valid": None}
ROUTED = {"model": {**EXPERTS, "balance_bias": True}, "experts": {"bias_rate": 0.1}}


@pytest.mark.parametrize(
    "sections",
    [
        ROUTED,
        {"objective": GRPO, "data": SUMS},
        {**ROUTED, "objective": GRPO, "data": SUMS},
    ],
    ids=["routers", "rollouts", "both"],
)
def test_router_balancing_and_rollout_metrics_precede_the_next_step(sections, tiny_directory, tmp_path):
    """Values that depend on a step's weights must be read before the next step is computed."""
    rows, weights = [], []
    for name, callbacks in (("plain", []), ("ahead", [PrefetchOnCPU()])):
        plain = {key: value for key, value in sections.items() if key != "model"}
        config = run_config(tiny_directory, tmp_path, **plain, method={"kind": "full"})
        if "model" in sections:
            config["model"] = {**sections["model"], "tokenizer": str(tiny_directory), "vocab_size": 260}
        config["run"] |= {"name": name, "batch_size": 2}
        result = whet.train(config, callbacks)
        rows.append(
            [{k: v for k, v in row.items() if not k.endswith(("_s", "gib"))} for row in result.history]
        )
        weights.append(whet.load(result.directory)[0].state_dict())
    assert rows[0] == rows[1]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
