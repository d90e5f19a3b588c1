"""Products in 8 bits: exact where the format is, close elsewhere, with gradients of the same quality."""

import pytest
import torch

from whet.ops.fp8 import _scale, both_ways, fp8_linear, turned_only


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def apart(found, wanted):
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [1e-20, 3e-4, 1.0, 447.0, 1e20])
def test_a_scale_is_a_power_of_two_that_uses_the_range(dtype, size):
    values = numbers(64) * size
    scale = _scale(values, dtype)
    rounded = both_ways(values[:, None], scale, dtype)[0][:, 0]
    most = torch.finfo(dtype).max
    assert float(scale.log2()) == round(float(scale.log2()))
    assert most / 2 <= float((values / scale).abs().max()) <= most
    assert apart(rounded.float() * scale, values) < (0.04 if dtype == torch.float8_e4m3fn else 0.08)


def test_small_whole_numbers_are_multiplied_exactly():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((2, 8, 32), (48, 32)))
    x.requires_grad_(), w.requires_grad_()
    upstream = torch.randint(-2, 3, (2, 8, 48), generator=generator).float()
    y = fp8_linear(x, w)
    y.backward(upstream.to(y.dtype))
    wanted = x @ w.T
    assert torch.equal(y.float(), wanted)
    assert torch.equal(w.grad, upstream.flatten(0, 1).T @ x.detach().flatten(0, 1))
    assert torch.equal(x.grad, upstream @ w.detach())


@pytest.mark.parametrize(
    ("device", "compiled"),
    [("cpu", False), *([("cuda", False), ("cuda", True)] if torch.cuda.is_available() else [])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 15, 16, 40, 400])
def test_products_and_gradients_are_near_the_exact_ones(rows, dtype, device, compiled):
    x, w, b = numbers(rows, 64), numbers(32, 64, seed=1) * 0.02, numbers(32, seed=2)
    upstream = numbers(rows, 32, seed=3) * 1e-6
    ours = [t.clone().to(device, dtype).requires_grad_() for t in (x, w, b)]
    theirs = [t.clone().double().requires_grad_() for t in (x, w, b)]
    y = (torch.compile(fp8_linear) if compiled else fp8_linear)(*ours)
    y.backward(upstream.to(y))
    wanted = torch.nn.functional.linear(*theirs)
    wanted.backward(upstream.double())
    assert y.dtype == dtype
    assert apart(y, wanted) < 0.05
    for mine, other, limit in zip(ours, theirs, (0.08, 0.08, 0.01), strict=True):
        assert mine.grad.dtype == dtype
        assert apart(mine.grad, other.grad) < limit


def test_what_is_not_finite_stays_so():
    x = numbers(16, 32)
    x[3, 5] = torch.inf
    assert not fp8_linear(x, numbers(16, 32)).isfinite().all()
    x[3, 5] = torch.nan
    assert not fp8_linear(x, numbers(16, 32)).isfinite().all()


def test_nothing_but_zeros_gives_zeros():
    assert torch.equal(fp8_linear(torch.zeros(16, 32), numbers(16, 32)), torch.zeros(16, 16))


def test_under_autocast_the_result_is_what_a_linear_layer_gives():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fp8_linear(numbers(16, 32), numbers(16, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (1, 48), (300, 208)])
def test_a_matrix_is_rounded_as_torch_rounds_it_and_turned(rows, width, given, dtype, device):
    matrix = numbers(rows, width).to(device, given)
    scale = _scale(matrix, dtype)
    same, turned = both_ways(matrix, scale, dtype)
    wanted = (matrix.float() / scale).to(dtype).float()
    assert same.shape == (rows + -rows % 16, width)
    assert torch.equal(same[:rows].float(), wanted)
    assert not same[rows:].float().any()
    assert torch.equal(turned.float(), same.float().T)
    assert same.is_contiguous()
    assert turned.is_contiguous()
    if rows % 16 == 0:
        assert torch.equal(turned_only(matrix, scale, dtype).float(), wanted.T)
    for operation in (torch.ops.whet.both_ways, torch.ops.whet.turned_only)[: 1 + (rows % 16 == 0)]:
        torch.library.opcheck(
            operation.default, (matrix, scale, dtype), test_utils=("test_schema", "test_faketensor")
        )
