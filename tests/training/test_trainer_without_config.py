"""A trainer without a config: any torch optimizer, any schedule, plain iterators, exact resume."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F

import whet
from tiny import random_examples
from whet.data.batches import BatchStream, make_batch
from whet.data.packing import StepSettings
from whet.errors import CheckpointError, RunError
from whet.objectives.sft import SFT
from whet.training.callbacks import Callback, ModelCallback, StopRun
from whet.training.checkpoint import newest_valid_checkpoint
from whet.training.optim.optimizers import supports_skip_flag
from whet.training.settings import TrainSettings
from whet.training.trainer import Trainer

SETTINGS = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=64, pack=True)
PLAIN = TrainSettings(precision="fp32", clip=None)


class OwnSGD(torch.optim.Optimizer):
    """A custom optimizer with a momentum tensor and a Python counter per parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["velocity"] = 0.5 * state.get("velocity", torch.zeros_like(p)) + p.grad
                p.sub_(state["velocity"] * group["lr"] / math.sqrt(state["count"]))


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-3),
    "own": lambda params: OwnSGD(params, lr=0.1),
}


def load(tiny_directory):
    torch.manual_seed(0)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    return model.requires_grad_(True)


def steps_of(count=6):
    return [[make_batch([[example]]) for example in random_examples(3, seed=n)] for n in range(count)]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_matches_a_plain_torch_loop(tiny_directory, name):
    """The reference uses full logits, one mean over the tokens of a step, and torch's optimizer and schedule."""
    model = load(tiny_directory)
    optimizer = OPTIMIZERS[name](model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    result = Trainer(
        model, SFT(), steps_of(), optimizer=optimizer, schedule=lambda step: rate / step, settings=PLAIN
    ).fit()
    assert result.steps == 6
    assert not result.unfinished
    assert result.stopped_because == "finished"

    reference = load(tiny_directory)
    optimizer = OPTIMIZERS[name](reference.parameters())
    for number, step in enumerate(steps_of(), start=1):
        total = sum(batch.supervised for batch in step)
        losses = []
        for batch in step:
            logits = reference(batch.tokens).flatten(0, 1)
            losses.append(F.cross_entropy(logits, batch.targets.flatten(), reduction="sum") / total)
        optimizer.zero_grad()
        sum(losses).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate / number
        optimizer.step()
        assert result.history[number - 1]["loss"] == pytest.approx(sum(losses).item(), rel=1e-5)
    for ours, theirs in zip(weights(model), weights(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_parameter_groups_keep_their_learning_rate_ratio(tiny_directory):
    model = load(tiny_directory)
    first, *rest = model.parameters()
    groups = [{"params": rest, "lr": 0.2}, {"params": [first], "lr": 0.05}]
    optimizer = torch.optim.SGD(groups)
    trainer = Trainer(model, SFT(), steps_of(2), optimizer=optimizer, schedule=lambda _: 0.4, settings=PLAIN)
    trainer.fit()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.1])
    # without a schedule the rates are those that the optimizer has
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.2}, {"params": [first], "lr": 0.05}])
    Trainer(model, SFT(), steps_of(2), optimizer=optimizer, settings=PLAIN).fit()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.05])


def test_torch_scheduler_sets_the_learning_rates(tiny_directory):
    """Includes a scheduler that starts at 0, and one that treats groups differently."""
    model = load(tiny_directory)
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.2}, {"params": [first], "lr": 0.1}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: step / 2, lambda _: 1.0])
    seen = []

    class Schedule(Callback):
        def on_step_end(self, step, metrics):
            seen.append((metrics["lr"], *(group["lr"] for group in optimizer.param_groups)))
            scheduler.step()

    before = weights(model)
    Trainer(model, SFT(), steps_of(3), callbacks=[Schedule()], optimizer=optimizer, settings=PLAIN).fit()
    assert seen == [(0.0, 0.0, 0.1), (0.1, 0.1, 0.1), (0.2, 0.2, 0.1)]
    assert not equal(before, weights(model))


def test_gradient_norm_covers_only_optimized_parameters(tiny_directory):
    """Only some parameters are in the optimizer, and none is frozen."""
    model = load(tiny_directory)
    chosen = list(model.parameters())[1:3]
    trainer = Trainer(model, SFT(), [], optimizer=torch.optim.SGD(chosen, lr=0.0), settings=PLAIN)
    norms = [trainer.step(steps_of()[0])["grad_norm"] for _ in range(3)]
    assert norms[0] == norms[1] == norms[2]
    model.zero_grad()
    total = sum(batch.supervised for batch in steps_of()[0])
    for batch in steps_of()[0]:
        logits = model(batch.tokens).flatten(0, 1)
        (F.cross_entropy(logits, batch.targets.flatten(), reduction="sum") / total).backward()
    assert norms[0] == pytest.approx(torch.stack([p.grad.norm() for p in chosen]).norm().item(), rel=1e-5)
    other = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(RunError, match="parameters that are not in the model"):
        Trainer(model, SFT(), [], optimizer=torch.optim.SGD([*chosen, other], lr=0.1))


def test_optimizer_may_have_frozen_parameters(tiny_directory):
    """`AdamW(model.parameters())` of a model with adapters does not change the base model."""
    model = load(tiny_directory)
    whet.attach_lora(model, rank=2)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    trainer = Trainer(model, SFT(), steps_of(2), optimizer=optimizer, settings=PLAIN)
    start = [p.detach().clone() for p in trainer.trained]
    trainer.fit()
    assert equal(before, frozen)
    assert not equal(start, trainer.trained)


def test_trainer_is_freed_with_its_last_reference(tiny_directory):
    gc.collect()
    gc.disable()
    try:
        model = load(tiny_directory)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        trainer = Trainer(model, SFT(), steps_of(1), optimizer=optimizer, settings=PLAIN)
        trainer.fit()
        watched = weakref.ref(trainer), weakref.ref(optimizer)
        del trainer, optimizer
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nonfinite_step_changes_neither_weights_nor_state(tiny_directory, name):
    model = load(tiny_directory)
    optimizer = OPTIMIZERS[name](model.parameters())
    assert supports_skip_flag(optimizer) == (name == "adamw-fused")
    settings = TrainSettings(precision="fp32", on_nonfinite="skip")
    trainer = Trainer(model, SFT(), steps_of(3), optimizer=optimizer, settings=settings)
    trainer.step(steps_of()[0])

    def state():
        moments = [v for each in optimizer.state.values() for v in each.values()]
        return [v.clone() if torch.is_tensor(v) else torch.tensor(v) for v in moments]

    before, moments = weights(model), state()
    hook = trainer.trained[-1].register_hook(lambda gradient: gradient * math.nan)
    assert trainer.step(steps_of()[1])["skipped"]
    assert equal(before, weights(model))
    assert equal(moments, state())
    hook.remove()
    assert "skipped" not in trainer.step(steps_of()[2])
    assert not equal(before, weights(model))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("data", ["iterator", "stream"])
def test_resumed_run_equals_an_uninterrupted_one(tiny_directory, tmp_path, name, data):
    class StopAt(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("enough", unfinished=True) if step == 2 else None

    def trainer(directory, callbacks=()):
        model = load(tiny_directory)
        steps = steps_of() if data == "iterator" else BatchStream(random_examples(20), SETTINGS, seed=0)
        total = None if data == "iterator" else 6
        optimizer = OPTIMIZERS[name](model.parameters())
        return Trainer(
            model,
            SFT(),
            steps,
            callbacks=callbacks,
            optimizer=optimizer,
            total_steps=total,
            directory=directory,
            settings=PLAIN,
        )

    whole = trainer(tmp_path / "whole")
    whole.fit()
    assert trainer(tmp_path / "cut", [StopAt()]).fit().unfinished
    again = trainer(tmp_path / "cut")
    again.restore(newest_valid_checkpoint(tmp_path / "cut"))
    result = again.fit()
    assert (result.steps, result.unfinished) == (6, False)
    assert equal(weights(whole.model), weights(again.model))


@pytest.mark.parametrize("prefetches", [False, True])
def test_run_stopped_by_a_step_resumes_before_that_step(tiny_directory, tmp_path, prefetches):
    """Also with a plain iterator whose next step was already consumed."""

    def trainer(directory):
        model = load(tiny_directory)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        made = Trainer(model, SFT(), steps_of(), optimizer=optimizer, directory=directory, settings=PLAIN)
        made.prefetches = prefetches
        return made

    whole = trainer(tmp_path / "whole")
    whole.fit()
    broken, count = trainer(tmp_path / "broken"), 0

    def spoiled(gradient):
        nonlocal count
        count += 1
        return gradient * math.nan if count in (7, 8, 9) else gradient  # the micro-batches of step 3

    broken.trained[-1].register_hook(spoiled)
    with pytest.raises(RunError, match="step 3: loss"):
        broken.fit()
    again = trainer(tmp_path / "broken")
    again.restore(newest_valid_checkpoint(tmp_path / "broken"))
    assert again.state.step == 2
    again.fit()
    assert equal(weights(whole.model), weights(again.model))


def test_impossible_resume_is_an_error(tiny_directory, tmp_path):
    model = load(tiny_directory)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    Trainer(model, SFT(), steps_of(3), optimizer=optimizer, directory=tmp_path, settings=PLAIN).fit()
    short = Trainer(model, SFT(), steps_of(2), optimizer=optimizer, settings=PLAIN)
    with pytest.raises(CheckpointError, match="the data ends after 2 steps, but the checkpoint is at 3"):
        short.restore(newest_valid_checkpoint(tmp_path))

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["past"] = [p.detach()]

    model = load(tiny_directory)
    odd = Trainer(model, SFT(), steps_of(1), optimizer=Odd(model.parameters()), directory=tmp_path / "odd")
    with pytest.raises(CheckpointError, match=r"Odd stores .* as list, which cannot be saved"):
        odd.fit()


def test_invalid_arguments_are_errors(tiny_directory):
    model = load(tiny_directory)
    with pytest.raises(RunError, match="needs an optimizer"):
        Trainer(model, SFT(), [])
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    class Duck:
        def loss(self, model, batch): ...

    with pytest.raises(RunError, match=r"Duck is not an objective\n.*whet.Objective"):
        Trainer(model, Duck(), [], optimizer=optimizer)
    ended = Trainer(model, SFT(), steps_of(1), optimizer=optimizer, total_steps=2, settings=PLAIN)
    with pytest.raises(RunError, match="the batches ran out after step 1 of 2"):
        ended.fit()


def test_only_model_callbacks_get_the_trainer(tiny_directory):
    seen = {}

    class Plain(Callback):
        def on_train_begin(self, run):
            seen["plain"] = (run.step, run.total_steps, run.directory, run.is_main)
            with pytest.raises(
                AttributeError,
                match=r"RunView has no attribute .model.\. .* inherit from whet.ModelCallback and use self.trainer",
            ):
                _ = run.model

    class Model(ModelCallback):
        def on_step_end(self, step, metrics):
            seen["model"] = self.trainer.model

    model = load(tiny_directory)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    trainer = Trainer(
        model, SFT(), steps_of(1), callbacks=[Plain(), Model()], optimizer=optimizer, settings=PLAIN
    )
    trainer.fit()
    assert seen == {"plain": (0, None, None, True), "model": model}
    # on a GPU the next step is prefetched, unless somebody uses the model in between
    trainer.prefetches = True
    trainer.queue.stream = trainer.stream = BatchStream(random_examples(20), SETTINGS, seed=0)
    assert not trainer._may_prefetch(1)
    trainer.callbacks.callbacks = [Plain()]
    assert trainer._may_prefetch(1)
