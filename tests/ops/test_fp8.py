"""fp8 matmuls are exact for representable values and close otherwise, and so are their gradients."""

import pytest
import torch

from whet.ops.fp8 import _scale, fp8_linear, quantize_both_layouts, quantize_transposed


def random_tensor(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def relative_error(output, expected):
    output, expected = output.detach().double().cpu(), expected.detach().double().cpu()
    return float((output - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [1e-20, 3e-4, 1.0, 447.0, 1e20])
def test_scale_is_a_power_of_two_that_uses_the_range(dtype, size):
    values = random_tensor(64) * size
    scale = _scale(values, dtype)
    rounded = quantize_both_layouts(values[:, None], scale, dtype)[0][:, 0]
    maximum = torch.finfo(dtype).max
    assert float(scale.log2()) == round(float(scale.log2()))
    assert maximum / 2 <= float((values / scale).abs().max()) <= maximum
    assert relative_error(rounded.float() * scale, values) < (0.04 if dtype == torch.float8_e4m3fn else 0.08)


def test_small_integers_are_multiplied_exactly():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((2, 8, 32), (48, 32)))
    x.requires_grad_(), w.requires_grad_()
    upstream = torch.randint(-2, 3, (2, 8, 48), generator=generator).float()
    y = fp8_linear(x, w)
    y.backward(upstream.to(y.dtype))
    expected = x @ w.T
    assert torch.equal(y.float(), expected)
    assert torch.equal(w.grad, upstream.flatten(0, 1).T @ x.detach().flatten(0, 1))
    assert torch.equal(x.grad, upstream @ w.detach())


@pytest.mark.parametrize(
    ("device", "compiled"),
    [("cpu", False), *([("cuda", False), ("cuda", True)] if torch.cuda.is_available() else [])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 15, 16, 40, 400])
def test_outputs_and_gradients_are_close_to_exact(rows, dtype, device, compiled):
    x, w, b = random_tensor(rows, 64), random_tensor(32, 64, seed=1) * 0.02, random_tensor(32, seed=2)
    upstream = random_tensor(rows, 32, seed=3) * 1e-6
    ours = [t.clone().to(device, dtype).requires_grad_() for t in (x, w, b)]
    theirs = [t.clone().double().requires_grad_() for t in (x, w, b)]
    y = (torch.compile(fp8_linear) if compiled else fp8_linear)(*ours)
    y.backward(upstream.to(y))
    expected = torch.nn.functional.linear(*theirs)
    expected.backward(upstream.double())
    assert y.dtype == dtype
    assert relative_error(y, expected) < 0.05
    for a, b, limit in zip(ours, theirs, (0.08, 0.08, 0.01), strict=True):
        assert a.grad.dtype == dtype
        assert relative_error(a.grad, b.grad) < limit


def test_non_finite_inputs_give_non_finite_outputs():
    x = random_tensor(16, 32)
    x[3, 5] = torch.inf
    assert not fp8_linear(x, random_tensor(16, 32)).isfinite().all()
    x[3, 5] = torch.nan
    assert not fp8_linear(x, random_tensor(16, 32)).isfinite().all()


def test_all_zero_input_gives_zeros():
    assert torch.equal(fp8_linear(torch.zeros(16, 32), random_tensor(16, 32)), torch.zeros(16, 16))


def test_autocast_determines_the_output_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fp8_linear(random_tensor(16, 32), random_tensor(16, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (1, 48), (300, 208)])
def test_quantization_matches_torch_rounding_in_both_layouts(rows, width, input_dtype, dtype, device):
    matrix = random_tensor(rows, width).to(device, input_dtype)
    scale = _scale(matrix, dtype)
    quantized, transposed = quantize_both_layouts(matrix, scale, dtype)
    expected = (matrix.float() / scale).to(dtype).float()
    assert quantized.shape == (rows + -rows % 16, width)
    assert torch.equal(quantized[:rows].float(), expected)
    assert not quantized[rows:].float().any()
    assert torch.equal(transposed.float(), quantized.float().T)
    assert quantized.is_contiguous()
    assert transposed.is_contiguous()
    if rows % 16 == 0:
        assert torch.equal(quantize_transposed(matrix, scale, dtype).float(), expected.T)
    for operation in (torch.ops.whet.quantize_both_layouts, torch.ops.whet.quantize_transposed)[
        : 1 + (rows % 16 == 0)
    ]:
        torch.library.opcheck(
            operation.default, (matrix, scale, dtype), test_utils=("test_schema", "test_faketensor")
        )
