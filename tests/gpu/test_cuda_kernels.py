"""Kernels of whet's own against plain torch; skipped where there is no CUDA device."""

import pytest
import torch

from whet.training import adamw
from whet.training.adamw import AdamW

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.1}


def weights(dtype, *shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_update_of_large_tensors_is_as_exact_as_that_of_torch(dtype, divisor, monkeypatch):
    monkeypatch.setattr(adamw, "_LARGE", 1000)
    ours, theirs = (weights(dtype, (1000, 1001), (7,)) for _ in range(2))
    exact = [p.detach().double().requires_grad_() for p in ours]
    optimizer, other = (
        kind(p, fused=True, **SETTINGS) for kind, p in ((AdamW, ours), (torch.optim.AdamW, theirs))
    )
    formula = torch.optim.AdamW(exact, **SETTINGS)
    for step in range(4):
        torch.manual_seed(step)
        for a, b, c in zip(ours, theirs, exact, strict=True):
            a.grad = torch.randn_like(a)
            b.grad, c.grad = a.grad.clone(), a.grad.double() / (divisor or 1.0)
        for each in (optimizer, other):
            each.grad_scale = None if divisor is None else torch.tensor(divisor, device="cuda")
            each.found_inf = torch.tensor(float(step == 2), device="cuda")  # a step that changes nothing
            each.step()
        if step != 2:
            formula.step()
        assert all(p.grad is not None for p in ours)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert optimizer.state[a]["step"].item() == other.state[b]["step"].item() == 3
        for key in (None, "exp_avg", "exp_avg_sq"):
            mine, torchs, true = (
                p if key is None else found.state[p][key]
                for found, p in ((optimizer, a), (other, b), (formula, c))
            )
            assert (mine - true).norm() <= 1.05 * (torchs - true).norm() + 1e-7 * true.norm()
    optimizer.load_state_dict(other.state_dict())
