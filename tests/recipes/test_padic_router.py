"""The sheaf-padic router: ties, robustness to noise, gates and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.recipes.quality.padic_router import EXPERTS, TOP_K, Padic, PadicRouter, top_by_digits, top_by_value

PADIC = Padic()
LOGITS = st.lists(
    st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-9, 9, width=32),
    min_size=EXPERTS,
    max_size=EXPERTS,
)
SHAPES = st.sampled_from([(2, 10, 3), (3, 8, 8), (5, 6, 4), (5, 8, 1), (2, 20, 7), (7, 4, 2), (97, 3, 2)])


def digits_of(number, base, count):
    """Return the digits of a number, leading digit first."""
    return [number // base**power % base for power in reversed(range(count))]


def choose_digit_by_digit(numbers, padic):
    """Apply the rule literally: compare the leading digits of the distance to the best expert."""
    left, chosen = list(range(len(numbers))), []
    for _ in range(TOP_K):
        best = max(numbers[e] for e in left)
        tied = [
            e
            for e in left
            if not any(digits_of(best - numbers[e], padic.base, padic.digits)[: padic.tie_digits])
        ]
        chosen.append(min(tied))
        left.remove(chosen[-1])
    return chosen


@settings(deadline=None)
@given(LOGITS, SHAPES, st.sampled_from([0.5, 1.0, 8.0, 1000.0]))
def test_experts_are_selected_digit_by_digit(logits, shape, clamp):
    padic = Padic(*shape, clamp=clamp)
    numbers = padic.encode(torch.tensor([logits]))
    assert int(numbers.min()) >= 0
    assert int(numbers.max()) <= padic.largest
    actual = top_by_digits(numbers, tie=padic.tie)
    assert actual[0].tolist() == choose_digit_by_digit(numbers[0].tolist(), padic)


@settings(max_examples=400, deadline=None)
@given(LOGITS, SHAPES)
def test_decoding_is_close_and_encoding_is_idempotent(logits, shape):
    padic = Padic(*shape)
    given_ = torch.tensor(logits)
    numbers = padic.encode(given_)
    decoded = padic.decode(numbers)
    step = 2 * padic.clamp / padic.largest
    assert (decoded - given_.clamp(-padic.clamp, padic.clamp)).abs().max() <= step / 2 + 4e-6
    assert padic.encode(decoded).tolist() == numbers.tolist()


def test_logits_at_and_beyond_the_range():
    numbers = PADIC.encode(torch.tensor([-8.0, 8.0, -9.0, 1e38, float("inf"), float("-inf"), 0.0]))
    assert numbers.tolist() == [0, PADIC.largest, 0, PADIC.largest, PADIC.largest, 0, PADIC.largest // 2]


@settings(max_examples=300, deadline=None)
@given(
    middle=st.floats(-7, 7),
    gaps=st.lists(st.floats(-1e-3, 1e-3), min_size=EXPERTS, max_size=EXPERTS),
    noise=st.lists(st.floats(-4e-3, 4e-3), min_size=EXPERTS, max_size=EXPERTS),
)
def test_noise_never_swaps_nearly_equal_experts(middle, gaps, noise):
    """This holds everywhere, also near the edge of a grid."""
    logits = middle + torch.tensor([gaps])
    for noisy in (logits, logits + torch.tensor([noise])):
        assert top_by_digits(PADIC.encode(noisy), tie=PADIC.tie).tolist() == [[0, 1]]


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.floats(-6, 6), min_size=EXPERTS, max_size=EXPERTS),
    noise=st.lists(st.floats(-2e-3, 2e-3), min_size=EXPERTS, max_size=EXPERTS),
)
def test_noise_only_changes_choices_at_distances_near_the_tie_width(logits, noise):
    clean = torch.tensor([logits])
    width, step = PADIC.tie * 16 / PADIC.largest, 16 / PADIC.largest
    apart = (clean[..., None] - clean[..., None, :]).abs()
    if (apart - width).abs().min() < 2 * 2e-3 + 2 * step:
        return  # the one place where the answer may change
    noisy = clean + torch.tensor([noise])
    one, other = (top_by_digits(PADIC.encode(each), tie=PADIC.tie).sort().values for each in (clean, noisy))
    assert one.tolist() == other.tolist()


def test_rounding_to_a_grid_lets_noise_swap_experts():
    """Comparing all digits or the leading ones lets the least noise swap two experts next to a grid edge."""
    step = 16 / PADIC.largest
    edge = -8 + (312 * PADIC.tie - 0.5) * step  # where the number, and its leading digits, change
    swapped = {"digits": 0, "all digits": 0, "leading digits": 0, "softmax": 0}
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        logits = torch.full((1, EXPERTS), -5.0)
        logits[0, 1], logits[0, 2], logits[0, 3] = edge, edge, 5.0
        answers = {name: set() for name in swapped}
        for _ in range(2):
            noisy = logits + 1e-4 * torch.randn(1, EXPERTS, generator=generator)
            numbers = PADIC.encode(noisy)
            answers["digits"].add(tuple(top_by_digits(numbers, tie=PADIC.tie)[0].tolist()))
            answers["all digits"].add(tuple(top_by_value(numbers)[0].tolist()))
            answers["leading digits"].add(tuple(top_by_value(numbers // PADIC.tie)[0].tolist()))
            answers["softmax"].add(tuple(top_by_value(noisy)[0].tolist()))
        for name, actual in answers.items():
            swapped[name] += len(actual) > 1
    assert swapped["digits"] == 0
    assert min(swapped["all digits"], swapped["leading digits"]) > 20
    assert swapped["softmax"] > 50


def test_equal_logits_select_the_lowest_index_in_both_routers():
    equal = torch.zeros(3, EXPERTS)
    assert top_by_value(equal).tolist() == [[0, 1]] * 3
    assert top_by_digits(PADIC.encode(equal), tie=PADIC.tie).tolist() == [[0, 1]] * 3


def test_gates_are_decoded_and_gradients_are_straight_through():
    torch.manual_seed(0)
    router = PadicRouter(PADIC)
    rows = torch.randn(16, 96)
    routing = router.route(rows)
    decoded = PADIC.decode(PADIC.encode(router(rows).detach()))
    expected = decoded.softmax(-1).gather(-1, routing.chosen)
    assert torch.equal(routing.weights.detach(), expected)
    # as if the decoded logits were the logits
    leaf = decoded.requires_grad_()
    upstream = torch.randn_like(expected)
    (slope,) = torch.autograd.grad(leaf.softmax(-1).gather(-1, routing.chosen), leaf, upstream)
    routing.weights.backward(upstream)
    torch.testing.assert_close(router.weight.grad, slope.T @ rows)


def test_logit_beyond_the_clamp_still_has_a_gradient():
    router = PadicRouter(PADIC)
    with torch.no_grad():
        router.bias.copy_(torch.tensor([20.0, 0.0, 0.0, 0.0]))
    router.route(torch.zeros(1, 96)).weights.sum().backward()
    assert router.bias.grad[0] != 0


def test_nan_is_not_hidden():
    router = PadicRouter(PADIC)
    with torch.no_grad():
        router.bias[0] = float("nan")
    assert router.route(torch.zeros(1, 96)).weights.isnan().all()


@pytest.mark.parametrize("padic", [None, PADIC])
def test_routing_entropy_and_leaders(padic):
    """Entropy uses weights that are not renormalized; the leader is the first expert with the largest weight."""
    torch.manual_seed(1)
    router = PadicRouter(padic)
    routing = router.route(torch.zeros(2, 96))
    with torch.no_grad():
        router.bias.zero_()
    routing = router.route(torch.zeros(2, 96))
    torch.testing.assert_close(routing.entropy(), torch.full((2,), 2.0).log())  # -2 * 0.25 * ln 0.25 = ln 2
    assert routing.leaders().tolist() == [[1.0, 0, 0, 0]] * 2
