"""Grouped products against the loop, and sorted dispatch against a plain sum over tokens, in float64 and gradients."""

import pytest
import torch
import torch.nn.functional as F

from whet.ops.grouped_experts import (
    combine,
    describe_grouped,
    dispatch,
    grouped_linear,
    grouped_problem,
    loop_linear,
    sort_by_expert,
)

ENDS = {"uneven": [5, 5, 13, 20], "one": [0, 0, 20, 20], "even": [5, 10, 15, 20]}


def operands(dtype, inputs=32, outputs=48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, inputs, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(4, outputs, inputs, generator=generator).to(dtype).requires_grad_()


def gradients(product, x, weight, ends, upstream):
    y = product(x, weight, torch.tensor(ends, dtype=torch.int32))
    return y, *torch.autograd.grad(y, (x, weight), upstream)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
)
def test_the_grouped_product_is_the_loops_in_float64(dtype, within, ends):
    x, weight = operands(dtype)
    assert grouped_problem("cpu", dtype, (48, 32)) is None, "the kernel itself must be what is tested"
    upstream = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = gradients(grouped_linear, x, weight, ENDS[ends], upstream)
    wide = (each.detach().double().requires_grad_() for each in (x, weight))
    expected = gradients(loop_linear, *wide, ENDS[ends], upstream.double())
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= within * b.norm()


def test_gradients_that_are_expanded_are_taken():
    """What the kernel alone refuses: the gradient of a sum has no strides."""
    x, weight = operands(torch.float32)
    ends = torch.tensor(ENDS["uneven"], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="strides"):
        F.grouped_mm(x, weight.transpose(1, 2), offs=ends).sum().backward()
    grouped_linear(x, weight, ends).sum().backward()
    assert torch.allclose(weight.grad[3], x[13:].sum(0).expand(48, -1), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "sizes", "reason"),
    [(torch.float64, (48, 32), "Double"), (torch.float32, (48, 30), "multiple of 16 bytes, not 30 x torch.float32"),
     (torch.bfloat16, (12, 32), "not 12 x torch.bfloat16")],
)  # fmt: skip
def test_where_the_kernel_does_not_run_the_loop_does_and_says_why(dtype, sizes, reason):
    assert reason in describe_grouped(torch.device("cpu"), dtype, sizes)
    x, weight = operands(dtype, sizes[1], sizes[0])
    ends = torch.tensor(ENDS["uneven"], dtype=torch.int32)
    assert torch.equal(grouped_linear(x, weight, ends), loop_linear(x, weight, ends))


def test_products_under_autocast_are_in_its_dtype():
    x, weight = operands(torch.float32)
    ends = torch.tensor(ENDS["uneven"], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_linear(x, weight, ends)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_sorted_tokens_come_back_to_their_places(top_k):
    torch.manual_seed(0)
    x = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(30, 4).topk(top_k).indices
    weights = torch.rand(30, top_k, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(4, 7, 6, dtype=torch.float64, requires_grad=True)
    groups = sort_by_expert(chosen, 4)
    assert groups.ends.tolist() == chosen.flatten().bincount(minlength=4).cumsum(0).tolist()
    assert groups.ends.dtype == torch.int32
    found = combine(grouped_linear(dispatch(x, groups), matrices, groups.ends), weights, groups)
    expected = torch.stack(
        [
            sum(w * (matrices[e] @ row) for e, w in zip(experts, ws, strict=True))
            for row, experts, ws in zip(x, chosen, weights, strict=True)
        ]
    )
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    wanted = (x, weights, matrices)
    for a, b in zip(
        torch.autograd.grad(found, wanted, upstream),
        torch.autograd.grad(expected, wanted, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_sorting_is_stable_and_runs_on_no_tokens_of_some_experts():
    groups = sort_by_expert(torch.tensor([[3], [1], [3], [1]]), 5)
    assert groups.order.tolist() == [1, 3, 0, 2]
    assert groups.places.tolist() == [2, 0, 3, 1]
    assert groups.ends.tolist() == [0, 2, 2, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "d_model", "width"), [(4096, 256, 256), (4096, 512, 256), (8192, 256, 128), (8192, 256, 256)]
)
def test_time_grows_with_the_experts_a_token_meets_and_not_with_all(tokens, d_model, width):
    from benchmarks.experts import compare

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for one another measure what else the machine does
    try:
        found = compare(tokens, d_model, width, device=torch.device("cpu"), dtype=torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert found["32_over_4"] <= 1.5, found


def test_the_first_call_may_come_from_a_layer_that_is_recomputed():
    """The kernel is tried once per process: what the trial saves is not the layer's."""
    from torch.utils.checkpoint import checkpoint

    from whet.ops import grouped_experts

    grouped_experts._kernel_problem.cache_clear()
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 16, requires_grad=True)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    checkpoint(grouped_experts.grouped_linear, x, weight, ends, use_reentrant=False).sum().backward()
    assert torch.allclose(weight.grad[0], x[:3].detach().sum(0).expand(16, 16), atol=1e-5)
