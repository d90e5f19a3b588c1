"""Norms of gradients and clipping, against plain formulas."""

import pytest
import torch

from tiny import run_config
from whet.config.load_config import make_config
from whet.config.optim import Optim
from whet.hardware import Precision
from whet.runs.assemble import assembled
from whet.training.grad_clip import clip, excess, total_norm
from whet.training.optim.optimizers import create_optimizer, divides_itself, masked_step
from whet.training.trainer import Trainer


def gradients(dtype, *, size=1.0):
    torch.manual_seed(0)
    return [size * torch.randn(shape).to(dtype) for shape in ((300, 40), (7,), (20, 20, 3))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_exact_whatever_the_gradients_are_held_in(dtype):
    found = total_norm(gradients(dtype))
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    exact = torch.cat([g.double().flatten() for g in gradients(dtype)]).norm()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_gradients_of_several_precisions_have_one_norm():
    mixed = [*gradients(torch.float32), *gradients(torch.bfloat16)]
    exact = torch.cat([g.double().flatten() for g in mixed]).norm()
    torch.testing.assert_close(total_norm(mixed).double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_clipping_is_that_of_torch(size):
    ours, theirs = gradients(torch.float32, size=size), gradients(torch.float32, size=size)
    clip(ours, 0.5, total_norm(ours))
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in theirs]
    for p, g in zip(parameters, theirs, strict=True):
        p.grad = g
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    for mine, p in zip(ours, parameters, strict=True):
        torch.testing.assert_close(mine, p.grad)


@pytest.mark.parametrize("name", ["adamw", "adam"])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_an_optimizer_that_divides_by_itself_does_what_clipping_before_it_does(name, size):
    models = [torch.nn.Linear(40, 300), torch.nn.Linear(40, 300)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (create_optimizer(Optim(name=name, lr=0.1), model) for model in models)
    assert divides_itself(first)
    for step in range(3):
        torch.manual_seed(step)
        found = [size * torch.randn_like(p) for p in models[0].parameters()]
        norm = total_norm(found)
        for model in models:
            for p, g in zip(model.parameters(), found, strict=True):
                p.grad = g.clone()
        clip([p.grad for p in models[1].parameters()], 0.5, norm)
        masked_step(first, lr=0.1, skip=torch.tensor(0.0), divisor=excess(norm, 0.5))
        masked_step(second, lr=0.1, skip=torch.tensor(0.0))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_clips(tiny_directory, tmp_path, name):
    """With plain descent the weights move by at most rate * limit; Adam's first moment is what went in."""
    config = make_config(
        run_config(
            tiny_directory, tmp_path, method={"kind": "full"}, optim={"name": name, "lr": 1.0, "clip": 1e-3}
        )
    )
    with assembled(config) as work:
        run = Trainer(work.model, work.objective, work.stream, config, total_steps=1)
        before = [p.detach().clone() for p in run.trained]
        metrics = run.step(next(run.stream))
        assert metrics["grad_norm"] > 0.01
        if name == "sgd":
            went = [a - b for a, b in zip(before, run.trained, strict=True)]
            assert total_norm(went).item() == pytest.approx(metrics["lr"] * 1e-3, rel=1e-3)
        else:
            firsts = [run.optimizer.state[p]["exp_avg"] for p in run.trained]
            assert total_norm(firsts).item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_a_model_in_float64_is_clipped_in_float64(tiny_directory, tmp_path):
    config = make_config(run_config(tiny_directory, tmp_path, method={"kind": "full"}, optim={"clip": 1e-3}))
    with assembled(config) as work:
        work.model.double()
        precision = Precision(torch.float64, torch.float64, torch.float64, "exact")
        run = Trainer(work.model, work.objective, work.stream, config, total_steps=1, precision=precision)
        run.step(next(run.stream))
        firsts = [run.optimizer.state[p]["exp_avg"] for p in run.trained]
        # 1e-6 is added to the norm before it divides
        assert total_norm(firsts).item() == pytest.approx(0.1 * 1e-3, rel=1e-5)


def test_only_kernels_that_read_a_divisor_are_given_one():
    assert not divides_itself(torch.optim.Adam([torch.nn.Parameter(torch.empty(2, device="meta"))]))
    assert not divides_itself(create_optimizer(Optim(name="sgd"), torch.nn.Linear(2, 2)))


def test_a_divisor_is_for_one_step():
    model = torch.nn.Linear(2, 2)
    optimizer = create_optimizer(Optim(), model)
    model(torch.ones(2)).sum().backward()
    masked_step(optimizer, lr=0.1, skip=torch.tensor(0.0), divisor=torch.tensor(5.0))
    assert optimizer.grad_scale is None


def test_a_closure_computes_what_the_step_uses():
    model = torch.nn.Linear(2, 2)
    optimizer = create_optimizer(Optim(lr=0.1), model)
    before = model.weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert (model.weight < before).all()
