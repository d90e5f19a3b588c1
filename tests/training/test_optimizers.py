"""Optimizers compared with float64 formulas, and updates that a flag on the device skips."""

import ast
import importlib
import inspect
import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import whet
from tiny import write_tiny_model
from whet.adapters.attach import make_trainable
from whet.config.method import Method
from whet.config.optim import Optim
from whet.errors import ConfigError
from whet.training.checkpoint import load_checkpoint, save_checkpoint
from whet.training.optim import adafactor, adamw_8bit
from whet.training.optim.adafactor import Adafactor
from whet.training.optim.adamw import AdamW
from whet.training.optim.adamw_8bit import AdamW8bit
from whet.training.optim.lion import Lion
from whet.training.optim.muon import Muon
from whet.training.optim.optimizers import create_optimizer, masked_step
from whet.training.optim.sgd import SGD

NAMES = ["adamw", "adam", "sgd", "lion", "adafactor", "muon", "adamw8bit"]


class Model(nn.Module):
    """Vectors, a wide and a tall matrix, and a stack of matrices; `width` > 64 gives matrices of over 4096 values."""

    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.embed = nn.Embedding(7, 4)
        self.up = nn.Linear(4, width)
        self.linear = nn.Linear(width, 3 * width // 4)
        self.stack = nn.Parameter(torch.randn(2, 3 * width // 4, 3) / width**0.5)
        self.norm = nn.LayerNorm(3)

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 7, (5,), generator=generator)
        inner = self.linear(self.up(self.embed(tokens)).tanh()) @ self.stack.sum(0)
        return (self.norm(inner) * torch.randn(5, 3, generator=generator)).sum()


DECAYED = {"up.weight", "linear.weight", "stack"}


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
            decay = 0.1 if name in DECAYED else 0.0
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            update = (m[name] / (1 - 0.8**t)) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-6)
            w[name] = w[name] * (1 - 0.02 * decay) - 0.02 * update
        masked_step(optimizer, lr=0.02, skip=torch.tensor(0.0))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), w[name], rtol=2e-5, atol=2e-6)


def run_reference(section, rule, *, rtol=2e-5, atol=2e-6):
    """Compare ten steps of the optimizer with a float64 rule(w, g, state, t, decay) -> w for each weight."""
    model = Model()
    optimizer = create_optimizer(section, model)
    w = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    states = {name: {} for name in w}
    for t in range(1, 11):
        for name, g in gradients(model, t).items():
            decay = section.weight_decay if name in DECAYED else 0.0
            w[name] = rule(w[name], g, states[name], t, decay)
        masked_step(optimizer, lr=section.lr, skip=torch.tensor(0.0))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), w[name], rtol=rtol, atol=atol)
    return optimizer


def error_of_ten_steps(section, rule, **shapes):
    """Return the relative L2 error of the updates of each tensor, compared with a float64 rule."""
    torch.manual_seed(0)
    model = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})
    optimizer = create_optimizer(section, model)
    w = {name: p.detach().double().clone() for name, p in model.items()}
    start, states = dict(w), {name: {} for name in w}
    for t in range(1, 11):
        for name, p in model.items():
            p.grad = torch.randn_like(p) + 0.5 * p.detach()
            decay = section.weight_decay if p.dim() > 1 else 0.0
            w[name] = rule(w[name], p.grad.double(), states[name], t, decay)
        masked_step(optimizer, lr=section.lr, skip=torch.tensor(0.0))
    away = {name: (p.detach().double() - w[name]).norm() for name, p in model.items()}
    return {name: float(away[name] / (w[name] - start[name]).norm()) for name in w}, {
        name: {key: value.dtype for key, value in optimizer.state[p].items()} for name, p in model.items()
    }


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.8, True)])
def test_sgd_equals_the_float64_formula_over_ten_steps(momentum, nesterov):
    def rule(w, g, state, t, decay):
        g = g + decay * w
        state["b"] = momentum * state.get("b", 0) + g
        return w - 0.1 * (g + momentum * state["b"] if nesterov else state["b"])

    run_reference(Optim(name="sgd", lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.2), rule)


def test_adam_adds_weight_decay_to_the_gradient():
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


def adafactor_rule(lr):
    def rule(w, g, state, t, decay):
        rho, beta = min(lr, t**-0.5), 1 - t**-0.8
        size = max(1e-3, w.square().mean().sqrt()) * rho
        eps = torch.finfo(torch.float32).eps
        if w.dim() > 1:
            rows, columns = g.square().mean(-1), g.square().mean(-2)
            state["r"] = beta * state.get("r", 0) + (1 - beta) * rows
            state["c"] = beta * state.get("c", 0) + (1 - beta) * columns
            average = state["r"].mean(-1).clamp(min=eps)[..., None, None]
            v = torch.einsum("...i,...j->...ij", state["r"], state["c"]) / average
        else:
            v = state["v"] = beta * state.get("v", 0) + (1 - beta) * g.square()
        u = g / v.sqrt().clamp(min=eps)
        u = u / max(1, u.square().mean().sqrt())
        return w * (1 - lr * decay) - size * u

    return rule


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("lr", [0.05, 0.9])  # with 0.9, 1 / sqrt(step) is the smaller from step 2 on
def test_adafactor_equals_the_float64_formula_over_ten_steps(lr, decay):
    run_reference(
        Optim(name="adafactor", lr=lr, weight_decay=decay), adafactor_rule(lr), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adafactor_matches_torch(decay):
    shapes = [(5,), (4, 6), (7, 1), (2, 3, 4)]
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    first = Adafactor(ours, 0.05, weight_decay=decay)
    second = torch.optim.Adafactor(theirs, lr=0.05, weight_decay=decay)
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        first.step()
        second.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def adamw_rule(w, g, state, t, decay):
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * g * g
    update = (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.95**t)).sqrt() + 1e-8)
    return w * (1 - 0.02 * decay) - 0.02 * update


def newton_schulz(matrix, steps=5):
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_muon_equals_the_float64_formula_with_adamw_for_other_parameters(decay):
    def rule(w, g, state, t, decay):
        if w.dim() != 2:
            return adamw_rule(w, g, state, t, decay)
        state["b"] = 0.95 * state.get("b", 0) + 0.05 * g
        update = newton_schulz(0.05 * g + 0.95 * state["b"])
        return w * (1 - 0.02 * decay) - 0.02 * 0.2 * max(w.shape) ** 0.5 * update

    section = Optim(name="muon", lr=0.02, betas=(0.9, 0.95), weight_decay=decay)
    errors, kinds = error_of_ten_steps(
        section, rule, wide=(8, 24), tall=(24, 8), vector=(9,), stack=(2, 3, 4)
    )
    assert {name for name, keys in kinds.items() if "momentum_buffer" in keys} == {"wide", "tall"}
    # torch orthogonalises in bfloat16
    assert all(error < (0.01 if name in ("wide", "tall") else 1e-5) for name, error in errors.items()), errors


def test_muon_excludes_embeddings_and_head():
    class WithHead(Model):
        def head(self):
            return self.up

    model = WithHead()
    optimizer = create_optimizer(Optim(name="muon"), model)
    assert [p.shape for g in optimizer.param_groups if g["rule"] == "muon" for p in g["params"]] == [(3, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_excludes_a_fully_trained_copy_of_the_head(tmp_path, dtype):
    write_tiny_model(tmp_path, tie_word_embeddings=False)
    model, _ = whet.load(tmp_path, dtype=dtype, device="cpu")
    make_trainable(model, Method(kind="lora", rank=2, modules_to_save=["lm_head"]), dtype=torch.float32)
    optimizer = create_optimizer(Optim(name="muon"), model)
    names = {id(p): name for name, p in model.named_parameters()}
    rules = {names[id(p)]: g["rule"] for g in optimizer.param_groups for p in g["params"]}
    assert rules.pop("lm_head.trained.weight") != "muon"
    assert set(rules.values()) == {"muon"}  # the adapters


def test_muon_works_with_one_kind_of_parameter():
    only_matrices = nn.Sequential(nn.Linear(3, 4, bias=False))
    only_vectors = nn.Sequential(nn.LayerNorm(4))
    for model in (only_matrices, only_vectors):
        assert len(create_optimizer(Optim(name="muon"), model).param_groups) == 1


def test_8_bit_adamw_keeps_float32_moments_of_small_tensors():
    section = Optim(name="adamw8bit", lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = run_reference(section, adamw_rule)
    assert all(v.dtype == torch.float32 for state in optimizer.state.values() for v in state.values())


def test_8_bit_adamw_stays_close_to_the_float64_formula():
    """With quantized moments (4096 values or more), ten steps end within 2% of AdamW's update."""
    section = Optim(name="adamw8bit", lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    errors, kinds = error_of_ten_steps(section, adamw_rule, matrix=(64, 64), odd=(4097,), small=(4095,))
    for name, error in errors.items():
        exact = name == "small"
        assert (
            kinds[name]["exp_avg"] == kinds[name]["exp_avg_sq"] == (torch.float32 if exact else torch.uint8)
        )
        assert error < 1e-5 if exact else 1e-4 < error < 0.02


def test_8_bit_adamw_matches_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes")

    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(80, 70), (5000,), (30,)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    section = Optim(name="adamw8bit", lr=0.05, weight_decay=0.1, groups={"": {"weight_decay": 0.1}})
    first = create_optimizer(section, nn.ParameterList(ours))
    second = bitsandbytes.optim.AdamW8bit(theirs, lr=0.05, weight_decay=0.1)
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        masked_step(first, lr=0.05, skip=torch.tensor(0.0))
        second.step()
    for a, b in zip(ours, theirs, strict=True):
        # a value between two codes may be rounded either way
        assert (a - b).norm() < 2e-3 * b.norm()
        assert (a - b).abs().median() < 1e-6


def test_8_bit_adamw_without_bitsandbytes_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)
    with pytest.raises(ConfigError, match=r"whet\[bitsandbytes\]"):
        create_optimizer(Optim(name="adamw8bit"), Model())


def everything(model, optimizer):
    """Return weights and optimizer state; state that does not exist yet counts as zeros."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        kept |= {f"{name}::{key}": value.clone() for key, value in optimizer.state[p].items()}
    return kept


def assert_same(before, after):
    for key, value in after.items():
        assert torch.equal(value, before.get(key, torch.zeros_like(value))), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad_step", [1, 3])
def test_skipped_update_changes_nothing(name, bad_step):
    """A run with a skipped step ends exactly like the run without that step."""
    with_mask, without = Model(96), Model(96)  # wide enough for 8-bit moments
    section = Optim(name=name, lr=0.1, weight_decay=0.1)
    first, second = create_optimizer(section, with_mask), create_optimizer(section, without)
    for step in range(1, 6):
        if step == bad_step:
            before = everything(with_mask, first)
            gradients(with_mask, step)
            for p, bad in zip(with_mask.parameters(), [math.nan, math.inf, 1e30] * 9, strict=False):
                p.grad.view(-1)[0] = bad
            masked_step(first, lr=0.1, skip=torch.tensor(1.0))
            assert_same(before, everything(with_mask, first))
        gradients(with_mask, step)
        gradients(without, step)
        masked_step(first, lr=0.1, skip=torch.tensor(0.0))
        masked_step(second, lr=0.1, skip=torch.tensor(0.0))
    assert_same(everything(without, second), everything(with_mask, first))
    assert_same(everything(with_mask, first), everything(without, second))


def step_without_values(create):
    """Run two steps on meta tensors: any read back to the host fails."""
    with FakeTensorMode():
        model = Model(96)
        optimizer = create(model)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            masked_step(optimizer, lr=0.1, skip=torch.zeros(()))


@pytest.mark.parametrize("name", NAMES)
def test_closure_computes_gradients(name):
    actual = []
    for closes in (False, True):
        model = Model()
        optimizer = create_optimizer(Optim(name=name, lr=0.1), model, quiet=True)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(1).square().sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure) if closes else closure()
        if not closes:
            optimizer.step()
        actual.append((loss, *model.parameters()))
    for plain, closed in zip(*actual, strict=True):
        assert torch.equal(plain, closed)


@pytest.mark.parametrize("name", NAMES)
def test_step_does_not_sync_with_the_host(name, monkeypatch):
    if name == "adamw8bit":  # made once, on the host, before the first step
        functional = pytest.importorskip("bitsandbytes.functional")
        monkeypatch.setattr(functional, "create_dynamic_map", lambda signed: torch.zeros(256))
    step_without_values(lambda model: create_optimizer(Optim(name=name, weight_decay=0.1), model))


def test_host_sync_is_detected():
    class Reading(Lion):
        def update(self, p, grad, state, group):
            grad.norm().item()

    with pytest.raises(DataDependentOutputException):
        step_without_values(
            lambda model: Reading([{"params": list(model.parameters()), "lr_scale": 1.0}], 0.1)
        )


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_resumes_exactly_from_a_checkpoint(name, tmp_path):
    section = Optim(name=name, lr=0.1, weight_decay=0.1)
    whole, resumed = Model(96), Model(96)
    first = create_optimizer(section, whole)
    for step in range(1, 4):
        gradients(whole, step)
        masked_step(first, lr=0.1, skip=torch.tensor(0.0))
    save_checkpoint(tmp_path / "c", whole, first, 3)
    second = create_optimizer(section, resumed)
    load_checkpoint(tmp_path / "c", resumed, second)
    for step in range(4, 7):
        for model, optimizer in ((whole, first), (resumed, second)):
            gradients(model, step)
            masked_step(optimizer, lr=0.1, skip=torch.tensor(float(step == 5)))
    assert everything(whole, first).keys() == everything(resumed, second).keys()
    assert_same(everything(whole, first), everything(resumed, second))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_gradients_are_unchanged(name):
    model = Model()
    optimizer = create_optimizer(Optim(name=name, lr=0.1, weight_decay=0.1), model)
    before = model.linear.weight.detach().clone()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    masked_step(optimizer, lr=0.1, skip=torch.tensor(0.0))
    assert torch.equal(before, model.linear.weight)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_weights_are_updated(name):
    model = Model(96).bfloat16()
    optimizer = create_optimizer(Optim(name=name, lr=0.1), model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    masked_step(optimizer, lr=0.1, skip=torch.tensor(0.0))
    for a, b in zip(before, model.parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert (b < a).all()


def test_only_matrices_decay():
    optimizer = create_optimizer(Optim(weight_decay=0.3), model := Model())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for name, p in model.named_parameters() if name in DECAYED}


def settings(model, optimizer):
    """Return (lr, weight decay) of each parameter, by name."""
    of = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_first_matching_pattern_wins(name):
    groups = {
        "^up": {"lr_scale": 0.5},
        r"weight$": {"lr_scale": 2, "weight_decay": 0.7},
        "norm.bias": {"weight_decay": 0.2},
    }
    model = Model()
    optimizer = create_optimizer(Optim(name=name, lr=9.0, weight_decay=0.1, groups=groups), model)
    masked_step(optimizer, lr=0.25, skip=torch.tensor(0.0))  # the schedule's rate counts, not the peak
    assert settings(model, optimizer) == {
        "embed.weight": (0.5, 0.7),
        "up.weight": (0.125, 0.1),
        "up.bias": (0.125, 0.0),
        "linear.weight": (0.5, 0.7),
        "linear.bias": (0.25, 0.0),
        "stack": (0.25, 0.1),
        "norm.weight": (0.5, 0.7),
        "norm.bias": (0.25, 0.2),
    }


@pytest.mark.parametrize("name", NAMES)
def test_lr_scale_equals_a_scaled_learning_rate(name):
    scaled, plain = Model(), Model()
    first = create_optimizer(Optim(name=name, groups={".": {"lr_scale": 0.25}}), scaled)
    second = create_optimizer(Optim(name=name), plain)
    for step in range(1, 4):
        gradients(scaled, step)
        gradients(plain, step)
        masked_step(first, lr=0.2, skip=torch.tensor(0.0))
        masked_step(second, lr=0.05, skip=torch.tensor(0.0))
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_plain_step_uses_the_scaled_learning_rate(name):
    scaled, plain = Model(96), Model(96)
    section = Optim(name=name, lr=0.2, weight_decay=0.3, groups={".": {"lr_scale": 0.25}})
    first = create_optimizer(section, scaled)
    second = create_optimizer(section.model_copy(update={"lr": 0.05, "groups": {}}), plain)
    for step in range(1, 4):
        gradients(scaled, step)
        gradients(plain, step)
        first.step()
        masked_step(second, lr=0.05, skip=torch.tensor(0.0))
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", torch.optim.SGD),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_groups_with_a_torch_scheduler_match_torch(name, kind):
    groups = {"^up": {"lr_scale": 0.1}, "stack|norm": {"lr_scale": 3, "weight_decay": 0.4}}
    ours, theirs = Model(), Model()
    section = Optim(name=name, lr=0.02, weight_decay=0.2, groups=groups)
    first = create_optimizer(section, ours)
    expected = {
        "embed.weight": (0.02, 0.0),
        "up.weight": (0.002, 0.2),
        "up.bias": (0.002, 0.0),
        "linear.weight": (0.02, 0.2),
        "linear.bias": (0.02, 0.0),
        "stack": (0.06, 0.4),
        "norm.weight": (0.06, 0.4),
        "norm.bias": (0.06, 0.4),
    }
    lone = [
        {"params": [p], "lr": expected[key][0], "weight_decay": expected[key][1]}
        for key, p in theirs.named_parameters()
    ]
    second = kind(lone, lr=9.0, **({"momentum": 0.9} if name == "sgd" else {}))
    schedulers = [torch.optim.lr_scheduler.LinearLR(each, 0.2, total_iters=5) for each in (first, second)]
    for step in range(1, 9):
        for model, optimizer, scheduler in zip((ours, theirs), (first, second), schedulers, strict=True):
            gradients(model, step)
            optimizer.step()
            scheduler.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_learning_rates_of_groups_survive_a_checkpoint(tmp_path):
    model, section = Model(), Optim(lr=0.5, groups={"^up": {"lr_scale": 0.1}})
    optimizer = create_optimizer(section, model)
    gradients(model, 1)
    masked_step(optimizer, lr=0.25, skip=torch.tensor(0.0))
    save_checkpoint(tmp_path / "saved", model, optimizer)
    again = create_optimizer(section, model)
    load_checkpoint(tmp_path / "saved", model, again)
    rates = {name: rate for name, (rate, _) in settings(model, again).items()}
    assert rates == {name: 0.05 if name.startswith("up") else 0.5 for name in rates}


@pytest.mark.parametrize("groups", [{"router": {}}, {"up": {}, r"up\.bias": {}}, {"frozen": {}}])
def test_pattern_without_parameters_is_an_error_with_names(groups):
    model = Model()
    model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(ConfigError, match=r"(router|up..\.bias|frozen).*trainable") as e:
        create_optimizer(Optim(groups=groups), model)
    assert "embed.weight" in e.value.hint


def test_log_describes_parameter_groups(caplog):
    caplog.set_level(logging.INFO, logger="whet")
    create_optimizer(Optim(weight_decay=0.1, groups={"embed": {"lr_scale": 0.1}}), Model(96))
    assert caplog.messages == [
        "optimizer: adamw; 3 tensors (7.7k), decay 0.1; 4 tensors (174), no decay (norms, biases, embeddings); "
        "pattern 'embed': 1 tensor (28), lr x 0.1, no decay"
    ]
    caplog.clear()
    create_optimizer(Optim(), Model())
    assert caplog.messages == ["optimizer: adamw; 8 tensors (87), no decay"]


def test_frozen_model_is_an_error():
    with pytest.raises(ConfigError, match="nothing to train"):
        create_optimizer(Optim(), Model().requires_grad_(False))


def defaults_in_the_docs():
    """Return the rows of the table in docs/optimizers.md: optimizer, setting, config, class, reference, source."""
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    table = text.partition("| reference implementation |\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[1:]]


def own_default(name, setting, *, by_config):
    """Return the default of a setting, of an optimizer created from a config or of its class."""
    constants = {
        ("adafactor", "beta2_decay"): adafactor.BETA2_DECAY,
        ("adafactor", "eps"): (None, adafactor.MIN_SCALE),
        ("adafactor", "d"): adafactor.MAX_UPDATE_RMS,
        ("adamw8bit", "min_8bit_size"): adamw_8bit.MIN_NUMEL,
    }
    if (name, setting) in constants:
        return constants[name, setting]
    kind, _, rest = name.partition(",")
    if by_config:
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = create_optimizer(Optim(name=kind), model, quiet=True)
        rule = "adamw" if rest else "muon"
        return next(g[setting] for g in optimizer.param_groups if kind != "muon" or g["rule"] == rule)
    classes = {
        "adamw": AdamW, "adam": torch.optim.Adam, "sgd": SGD, "lion": Lion, "adafactor": Adafactor,
        "muon": torch.optim.Muon, "muon, the rest": Muon, "adamw8bit": AdamW8bit,
    }  # fmt: skip
    return inspect.signature(classes[name].__init__).parameters[setting].default


def test_documented_defaults_match_code_and_references():
    pytest.importorskip("bitsandbytes")
    rows = defaults_in_the_docs()
    assert {name.partition(",")[0] for name, *_ in rows} == set(NAMES)
    for name, setting, by_config, by_class, reference, source in rows:
        path = source.partition(",")[0].split(".")
        kind = getattr(importlib.import_module(".".join(path[:-1])), path[-1])
        said = inspect.signature(kind.__init__).parameters[setting].default
        assert ast.literal_eval(reference) == said, (name, setting)
        assert ast.literal_eval(by_class) == own_default(name, setting, by_config=False), (name, setting)
        assert ast.literal_eval(by_config) == own_default(name, setting, by_config=True), (name, setting)
    differing = {(row[0], row[1]) for row in rows if ast.literal_eval(row[2]) != ast.literal_eval(row[4])}
    # what the text above and below the table says of differences
    assert {setting for name, setting in differing if (name, setting) != ("sgd", "momentum")} == {
        "weight_decay"
    }


def test_lion_uses_given_betas():
    assert Optim(name="lion", betas=(0.9, 0.999)).betas == (0.9, 0.999)  # a run of an older version
    assert Optim(name="lion").betas == (0.9, 0.99)
    assert Optim().betas == (0.9, 0.999)
