"""Optimizers against float64 formulas, and updates that a device-side flag turns off."""

import math

import pytest
import torch
from torch import nn

from whet.config.sections import Optim
from whet.errors import ConfigError
from whet.training.optimizers import create_optimizer, masked_step


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 7, (5,), generator=generator)
        return (self.norm(self.linear(self.embed(tokens))) * torch.randn(5, 3, generator=generator)).sum()


def gradients(model, step):
    model.zero_grad()
    model(step).backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters()}


def test_adamw_equals_the_float64_formula_over_ten_steps():
    model, section = Model(), Optim(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer = create_optimizer(section, model)
    w = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    v = {name: torch.zeros_like(value) for name, value in w.items()}
    for t in range(1, 11):
        for name, g in gradients(model, t).items():
            decay = 0.1 if name == "linear.weight" else 0.0
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            update = (m[name] / (1 - 0.8**t)) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-6)
            w[name] = w[name] * (1 - 0.02 * decay) - 0.02 * update
        masked_step(optimizer, lr=0.02, skip=torch.tensor(0.0))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), w[name], rtol=2e-5, atol=2e-6)


def run_reference(section, rule, steps=10):
    """Ten steps of the optimizer beside a float64 rule(w, g, state, t, decay) -> w for each weight."""
    model = Model()
    optimizer = create_optimizer(section, model)
    w = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    states = {name: {} for name in w}
    for t in range(1, steps + 1):
        for name, g in gradients(model, t).items():
            decay = section.weight_decay if name == "linear.weight" else 0.0
            w[name] = rule(w[name], g, states[name], t, decay)
        masked_step(optimizer, lr=section.lr, skip=torch.tensor(0.0))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), w[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.8, True)])
def test_sgd_equals_the_float64_formula_over_ten_steps(momentum, nesterov):
    def rule(w, g, state, t, decay):
        g = g + decay * w
        state["b"] = momentum * state.get("b", 0) + g
        return w - 0.1 * (g + momentum * state["b"] if nesterov else state["b"])

    run_reference(Optim(name="sgd", lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.2), rule)


def test_adam_adds_its_decay_to_the_gradient():
    def rule(w, g, state, t, decay):
        g = g + decay * w
        state["m"] = 0.8 * state.get("m", 0) + 0.2 * g
        state["v"] = 0.9 * state.get("v", 0) + 0.1 * g * g
        return w - 0.03 * (state["m"] / (1 - 0.8**t)) / ((state["v"] / (1 - 0.9**t)).sqrt() + 1e-7)

    run_reference(Optim(name="adam", lr=0.03, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.3), rule)


def test_lion_equals_the_float64_formula_over_ten_steps():
    def rule(w, g, state, t, decay):
        m = state.get("m", torch.zeros_like(w))
        state["m"] = 0.95 * m + 0.05 * g
        return w - 0.02 * ((0.8 * m + 0.2 * g).sign() + decay * w)

    run_reference(Optim(name="lion", lr=0.02, betas=(0.8, 0.95), weight_decay=0.3), rule)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
@pytest.mark.parametrize("bad_step", [1, 3])
def test_a_masked_update_changes_nothing_and_leaves_no_trace(name, bad_step):
    """The run with a masked step in it ends exactly where the run without that step ends."""
    with_mask, without = Model(), Model()
    section = Optim(name=name, lr=0.1, weight_decay=0.1)
    first, second = create_optimizer(section, with_mask), create_optimizer(section, without)
    for step in range(1, 6):
        if step == bad_step:
            before = [p.detach().clone() for p in with_mask.parameters()]
            gradients(with_mask, step)
            with_mask.linear.weight.grad[0, 0] = math.nan
            masked_step(first, lr=0.1, skip=torch.tensor(1.0))
            assert all(torch.equal(a, b) for a, b in zip(before, with_mask.parameters(), strict=True))
        gradients(with_mask, step)
        gradients(without, step)
        masked_step(first, lr=0.1, skip=torch.tensor(0.0))
        masked_step(second, lr=0.1, skip=torch.tensor(0.0))
    for a, b in zip(with_mask.parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_matrices_decay():
    optimizer = create_optimizer(Optim(weight_decay=0.3), model := Model())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(model.linear.weight)}


def test_a_frozen_model_has_nothing_to_train():
    with pytest.raises(ConfigError, match="nothing to train"):
        create_optimizer(Optim(), Model().requires_grad_(False))
