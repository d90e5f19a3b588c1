"""Learning rates: the promised values at the promised steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config.sections import Optim
from whet.training.schedules import create_schedule


def lr_at(steps=20, **keys):
    return create_schedule(Optim(**{"lr": 1.0, "warmup": 4, "min_lr_ratio": 0.1, **keys}), steps)


def test_cosine_with_warmup_gives_the_documented_values():
    rate = lr_at()
    assert [rate(step) for step in range(5)] == [0, 0.25, 0.5, 0.75, 1.0]
    assert rate(12) == pytest.approx(0.55)
    assert rate(19) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 15 / 16)) / 2)  # 0.10865
    assert [rate(step) for step in (20, 21, 500)] == pytest.approx([0.1, 0.1, 0.1])


def test_linear_falls_in_equal_pieces():
    rate = lr_at(schedule="linear")
    assert rate(12) == pytest.approx(0.55)
    assert rate(8) - rate(9) == pytest.approx(rate(15) - rate(16)) == pytest.approx(0.9 / 16)
    assert rate(20) == pytest.approx(0.1)


def test_constant_stays():
    rate = lr_at(schedule="constant")
    assert [rate(step) for step in (2, 4, 12, 100)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("steps", [3, 4])
def test_a_run_no_longer_than_its_warmup_holds_at_lr(steps):
    rate = lr_at(steps=steps)
    assert rate(3) == 0.75
    assert [rate(step) for step in (4, 5, 50)] == [1.0, 1.0, 1.0]


def test_without_warmup_the_cosine_starts_at_once():
    rate = lr_at(warmup=0)
    assert rate(0) == 1.0
    assert rate(10) == pytest.approx(0.55)
    assert rate(1) < 1.0


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    steps=st.integers(1, 200),
    warmup=st.integers(0, 250),
    ratio=st.floats(0, 1),
    step=st.integers(0, 500),
)
def test_rates_stay_between_zero_and_the_peak_and_never_rise_after_the_warmup(
    schedule, steps, warmup, ratio, step
):
    rate = lr_at(steps=steps, schedule=schedule, warmup=warmup, min_lr_ratio=ratio)
    assert 0 <= rate(step) <= 1 + 1e-12
    if step >= warmup:
        assert rate(step + 1) <= rate(step) + 1e-12
        assert rate(step) >= min(ratio, 1) - 1e-12
