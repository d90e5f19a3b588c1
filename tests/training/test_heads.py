"""Heads of an objective: trained and checkpointed with the model, but never part of a saved model."""

import torch
from safetensors.torch import load_file
from torch import nn

import whet
from tiny import random_examples, run_config
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream
from whet.data.packing import StepSettings
from whet.objectives.objective import Loss
from whet.objectives.sft import SFT
from whet.training.checkpoint import checkpoint_path
from whet.training.trainer import Trainer

SETTINGS = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=128, pack=True)


class Scored(SFT):
    """Next-token loss, and a head that learns to output 1."""

    def __init__(self):
        torch.manual_seed(1)
        self.heads = nn.ModuleDict({"score": nn.Linear(32, 1)})

    def loss(self, model, batch):
        actual = super().loss(model, batch)
        miss = (self.heads["score"](model.hidden(batch.tokens, batch.positions, batch.layout())) - 1).square()
        return Loss({name: total + miss.sum() for name, total in actual.sums.items()}, actual.metrics)


def trainer(tiny_directory, directory, *, steps=4, attach=False):
    torch.manual_seed(0)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    if attach:
        whet.attach_lora(model, rank=2)
    config = validate_config(run_config(tiny_directory, directory, run={"steps": steps}))
    stream = BatchStream(random_examples(20), SETTINGS, seed=0)
    return Trainer(model, Scored(), stream, config, directory=directory)


def everything(run):
    return [p.detach().clone() for p in run.learner.parameters()]


def test_heads_train_with_full_models_and_adapters(tiny_directory, tmp_path):
    for attach in (False, True):
        run = trainer(tiny_directory, tmp_path / str(attach), attach=attach)
        before = {n: p.detach().clone() for n, p in run.learner.named_parameters() if p.requires_grad}
        run.fit()
        for name, p in run.learner.named_parameters():
            if p.requires_grad:
                assert not torch.equal(p, before[name]), name
        assert "heads.score.weight" in before


def test_checkpoint_contains_heads_and_resume_is_exact(tiny_directory, tmp_path):
    whole = trainer(tiny_directory, tmp_path / "whole")
    whole.fit()
    first = trainer(tiny_directory, tmp_path / "first")
    for _ in range(2):
        first.step(next(first.stream))
    first.save()
    first._wait_for_save()
    path = checkpoint_path(tmp_path / "first", 2)
    assert {"heads.score.weight", "heads.score.bias"} <= load_file(path / "weights.safetensors").keys()
    second = trainer(tiny_directory, tmp_path / "second")
    second.restore(path)
    for _ in range(2):
        second.step(next(second.stream))
    for one, other in zip(everything(whole), everything(second), strict=True):
        assert torch.equal(one, other)


def test_saved_model_has_no_heads(tiny_directory, tmp_path):
    run = trainer(tiny_directory, tmp_path / "run")
    run.fit()
    whet.save(run.model, None, tmp_path / "saved")
    again, _ = whet.load(tmp_path / "saved", dtype=torch.float32, device="cpu")
    for (name, one), (_, other) in zip(run.model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
