"""Gradient norms and clipping, compared with their formulas."""

import pytest
import torch

from tiny import run_config
from whet.config.load_config import validate_config
from whet.config.optim import Optim
from whet.hardware import Precision
from whet.runs.assemble import open_assembly
from whet.training.grad_clip import clip, clip_divisor, total_norm
from whet.training.optim.optimizers import create_optimizer, masked_step, supports_grad_divisor
from whet.training.trainer import Trainer


def gradients(dtype, *, size=1.0):
    torch.manual_seed(0)
    return [size * torch.randn(shape).to(dtype) for shape in ((300, 40), (7,), (20, 20, 3))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_exact_for_every_dtype(dtype):
    actual = total_norm(gradients(dtype))
    assert actual.dtype == torch.promote_types(dtype, torch.float32)
    exact = torch.cat([g.double().flatten() for g in gradients(dtype)]).norm()
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=0)


def test_norm_of_mixed_dtypes():
    mixed = [*gradients(torch.float32), *gradients(torch.bfloat16)]
    exact = torch.cat([g.double().flatten() for g in mixed]).norm()
    torch.testing.assert_close(total_norm(mixed).double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_clipping_matches_torch(size):
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
def test_division_in_the_optimizer_equals_clipping_before_it(name, size):
    models = [torch.nn.Linear(40, 300), torch.nn.Linear(40, 300)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (create_optimizer(Optim(name=name, lr=0.1), model) for model in models)
    assert supports_grad_divisor(first)
    for step in range(3):
        torch.manual_seed(step)
        actual = [size * torch.randn_like(p) for p in models[0].parameters()]
        norm = total_norm(actual)
        for model in models:
            for p, g in zip(model.parameters(), actual, strict=True):
                p.grad = g.clone()
        clip([p.grad for p in models[1].parameters()], 0.5, norm)
        masked_step(first, lr=0.1, skip=torch.tensor(0.0), divisor=clip_divisor(norm, 0.5))
        masked_step(second, lr=0.1, skip=torch.tensor(0.0))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_step_clips_gradients(tiny_directory, tmp_path, name):
    """With SGD the weights move by at most lr * limit; Adam's first moment shows the clipped gradient."""
    config = validate_config(
        run_config(
            tiny_directory, tmp_path, method={"kind": "full"}, optim={"name": name, "lr": 1.0, "clip": 1e-3}
        )
    )
    with open_assembly(config) as work:
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


def test_float64_model_is_clipped_in_float64(tiny_directory, tmp_path):
    config = validate_config(
        run_config(tiny_directory, tmp_path, method={"kind": "full"}, optim={"clip": 1e-3})
    )
    with open_assembly(config) as work:
        work.model.double()
        precision = Precision(torch.float64, torch.float64, torch.float64, "exact")
        run = Trainer(work.model, work.objective, work.stream, config, total_steps=1, precision=precision)
        run.step(next(run.stream))
        firsts = [run.optimizer.state[p]["exp_avg"] for p in run.trained]
        # 1e-6 is added to the norm before it divides
        assert total_norm(firsts).item() == pytest.approx(0.1 * 1e-3, rel=1e-5)


def test_divisor_needs_kernel_support():
    assert not supports_grad_divisor(torch.optim.Adam([torch.nn.Parameter(torch.empty(2, device="meta"))]))
    assert not supports_grad_divisor(create_optimizer(Optim(name="sgd"), torch.nn.Linear(2, 2)))


def test_divisor_applies_to_one_step():
    model = torch.nn.Linear(2, 2)
    optimizer = create_optimizer(Optim(), model)
    model(torch.ones(2)).sum().backward()
    masked_step(optimizer, lr=0.1, skip=torch.tensor(0.0), divisor=torch.tensor(5.0))
    assert optimizer.grad_scale is None


def test_closure_computes_the_gradients_of_the_step():
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
