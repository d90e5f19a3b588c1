"""Grouped matmuls match a loop over experts, and sorted dispatch matches a sum per token, with gradients."""

import pytest
import torch
import torch.nn.functional as F

from whet.ops.grouped_experts import (
    combine,
    describe_expert_matmuls,
    dispatch,
    expert_loop_linear,
    grouped_linear,
    grouped_mm_problem,
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
def test_grouped_matmul_matches_the_float64_loop(dtype, within, ends):
    x, weight = operands(dtype)
    assert grouped_mm_problem("cpu", dtype, (48, 32)) is None, "this test must run the kernel"
    upstream = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    outputs = gradients(grouped_linear, x, weight, ENDS[ends], upstream)
    wide = (each.detach().double().requires_grad_() for each in (x, weight))
    expected = gradients(expert_loop_linear, *wide, ENDS[ends], upstream.double())
    for a, b in zip(outputs, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= within * b.norm()


def test_expanded_gradients_are_accepted():
    """The kernel alone rejects the gradient of a sum, which has zero strides."""
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
def test_unsupported_shapes_and_dtypes_fall_back_to_the_loop_with_a_reason(dtype, sizes, reason):
    assert reason in describe_expert_matmuls(torch.device("cpu"), dtype, sizes)
    x, weight = operands(dtype, sizes[1], sizes[0])
    ends = torch.tensor(ENDS["uneven"], dtype=torch.int32)
    assert torch.equal(grouped_linear(x, weight, ends), expert_loop_linear(x, weight, ends))


def test_autocast_determines_the_dtype():
    x, weight = operands(torch.float32)
    ends = torch.tensor(ENDS["uneven"], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_linear(x, weight, ends)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_dispatch_and_combine_restore_the_token_order(top_k):
    torch.manual_seed(0)
    x = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(30, 4).topk(top_k).indices
    weights = torch.rand(30, top_k, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(4, 7, 6, dtype=torch.float64, requires_grad=True)
    groups = sort_by_expert(chosen, 4)
    assert groups.ends.tolist() == chosen.flatten().bincount(minlength=4).cumsum(0).tolist()
    assert groups.ends.dtype == torch.int32
    outputs = combine(grouped_linear(dispatch(x, groups), matrices, groups.ends), weights, groups)
    expected = torch.stack(
        [
            sum(w * (matrices[e] @ row) for e, w in zip(experts, ws, strict=True))
            for row, experts, ws in zip(x, chosen, weights, strict=True)
        ]
    )
    torch.testing.assert_close(outputs, expected)
    upstream = torch.randn_like(outputs)
    inputs = (x, weights, matrices)
    for a, b in zip(
        torch.autograd.grad(outputs, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_sorting_is_stable_and_supports_experts_without_tokens():
    groups = sort_by_expert(torch.tensor([[3], [1], [3], [1]]), 5)
    assert groups.order.tolist() == [1, 3, 0, 2]
    assert groups.sorted_slots.tolist() == [2, 0, 3, 1]
    assert groups.ends.tolist() == [0, 2, 2, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "d_model", "width"), [(4096, 256, 256), (4096, 512, 256), (8192, 256, 128), (8192, 256, 256)]
)
def test_time_depends_on_active_experts_not_on_all(tokens, d_model, width):
    from benchmarks.experts import compare

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with two threads, other load on the machine would dominate
    try:
        timing = compare(tokens, d_model, width, device=torch.device("cpu"), dtype=torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert timing["32_over_4"] <= 1.5, timing


def test_first_call_may_be_inside_a_checkpointed_layer():
    """The kernel is tried once per process. Tensors saved by the trial must not count for the layer."""
    from torch.utils.checkpoint import checkpoint

    from whet.ops import grouped_experts

    grouped_experts._kernel_problem.cache_clear()
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 16, requires_grad=True)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    checkpoint(grouped_experts.grouped_linear, x, weight, ends, use_reentrant=False).sum().backward()
    assert torch.allclose(weight.grad[0], x[:3].detach().sum(0).expand(16, 16), atol=1e-5)
