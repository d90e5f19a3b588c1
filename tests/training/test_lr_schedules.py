"""Learning-rate schedules: documented values at documented steps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from whet.config.optim import Optim
from whet.errors import ConfigError
from whet.training.optim.lr_schedules import create_schedule

KINDS = ["constant", "linear", "cosine", "exponential", "step", "wsd"]


def lr_at(steps=20, **keys):
    return create_schedule(Optim(**{"lr": 1.0, "warmup": 4, "min_lr_ratio": 0.1, **keys}), steps)


def test_cosine_with_warmup_has_the_documented_values():
    rate = lr_at()
    assert [rate(step) for step in range(5)] == [0, 0.25, 0.5, 0.75, 1.0]
    assert rate(12) == pytest.approx(0.55)
    assert rate(19) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 15 / 16)) / 2)  # 0.10865
    assert [rate(step) for step in (20, 21, 500)] == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine"])
def test_transformers_schedules_lag_one_step(kind):
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=4, num_training_steps=20)
    ours = lr_at(schedule=kind.partition("_")[0], min_lr_ratio=0.0)
    for update in range(1, 21):
        assert theirs.get_last_lr() == pytest.approx([ours(update - 1)])
        optimizer.step()
        theirs.step()


def test_linear_decays_linearly():
    rate = lr_at(schedule="linear")
    assert rate(12) == pytest.approx(0.55)
    assert rate(8) - rate(9) == pytest.approx(rate(15) - rate(16)) == pytest.approx(0.9 / 16)
    assert rate(20) == pytest.approx(0.1)


def test_constant_is_constant():
    rate = lr_at(schedule="constant")
    assert [rate(step) for step in (2, 4, 12, 100)] == [0.5, 1.0, 1.0, 1.0]


def test_open_ended_schedule_needs_no_number_of_steps():
    constant = create_schedule(Optim(lr=1.0, warmup=4, schedule="constant"))
    assert [constant(step) for step in (0, 2, 4, 10**9)] == [0, 0.5, 1.0, 1.0]
    falling = {"schedule": "step", "decay_every": 5, "decay_factor": 0.3}
    parts = [{"kind": "cosine", "steps": 6}, {"kind": "linear", "steps": 3, "min_lr_ratio": 0.05}]
    for keys in (falling, {**falling, "schedule": [*parts, {"kind": "step"}]}):
        section = Optim(**{"lr": 1.0, "warmup": 4, "min_lr_ratio": 0.02, **keys})
        endless, long = create_schedule(section), create_schedule(section, 500)
        assert [endless(step) for step in range(500)] == [long(step) for step in range(500)]
        assert endless(10**9) == 0.02


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        *((kind, kind) for kind in ("linear", "cosine", "exponential", "wsd")),
        ([{"kind": "constant", "steps": 3}, {"kind": "cosine"}], "cosine"),
        ([{"kind": "wsd", "steps": 3}, {"kind": "constant"}], "wsd"),
    ],
)
def test_bounded_schedule_needs_the_number_of_steps(schedule, named):
    with pytest.raises(ConfigError, match=f"optim.schedule: {named} needs the number of steps"):
        create_schedule(Optim(schedule=schedule))


def test_exponential_decays_by_a_constant_factor():
    rate = lr_at(schedule="exponential", lr=0.3, min_lr_ratio=0.01)
    assert [rate(step) for step in range(4, 21)] == pytest.approx([0.3 * 0.01 ** (k / 16) for k in range(17)])
    assert rate(20) == 0.3 * 0.01


def test_step_schedule_decays_every_decay_every_steps_down_to_the_minimum():
    rate = lr_at(schedule="step", decay_every=5, decay_factor=0.3, steps=24)
    assert [rate(step) for step in range(4, 25)] == pytest.approx([1.0] * 6 + [0.3] * 5 + [0.1] * 10)
    without_warmup = lr_at(
        schedule="step", decay_every=2, decay_factor=0.5, min_lr_ratio=0, warmup=0, steps=6
    )
    assert [without_warmup(step) for step in range(1, 7)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_wsd_is_constant_until_its_decay():
    rate = lr_at(schedule="wsd", decay_fraction=0.25, min_lr_ratio=0, steps=40)
    assert [rate(step) for step in (4, 5, 29, 30)] == [1.0] * 4
    assert [rate(step) for step in range(30, 42)] == pytest.approx([1 - k / 10 for k in range(11)] + [0])
    assert rate(40) == 0


def test_wsd_with_a_long_decay_decays_right_after_the_warmup():
    rate = lr_at(schedule="wsd", decay_fraction=1.0, min_lr_ratio=0)
    assert [rate(step) for step in (4, 12, 20)] == [1.0, 0.5, 0.0]


def test_parts_follow_the_warmup_without_jumps():
    parts = [
        {"kind": "constant", "steps": 6},
        {"kind": "linear", "steps": 10, "min_lr_ratio": 0.5},
        {"kind": "constant", "steps": 5},
        {"kind": "cosine"},
    ]
    rate = lr_at(schedule=parts, steps=35)
    assert [rate(step) for step in range(4)] == [0, 0.25, 0.5, 0.75]
    assert [rate(step) for step in range(4, 11)] == [1.0] * 7
    assert [rate(step) for step in range(11, 21)] == pytest.approx([1 - 0.05 * k for k in range(1, 11)])
    assert [rate(step) for step in range(21, 26)] == [rate(20)] * 5
    cosine = [0.1 + 0.4 * (1 + math.cos(math.pi * k / 10)) / 2 for k in range(1, 11)]
    assert [rate(step) for step in range(26, 36)] == pytest.approx(cosine)
    assert rate(35) == rate(99) == 0.1


def test_part_may_increase_the_learning_rate():
    parts = [
        {"kind": "linear", "steps": 4, "min_lr_ratio": 0},
        {"kind": "linear", "steps": 4, "min_lr_ratio": 0.8},
        {"kind": "exponential"},
    ]
    rate = lr_at(schedule=parts, steps=14)
    assert [rate(step) for step in (4, 8, 10, 12, 13, 14)] == pytest.approx([1, 0, 0.4, 0.8, 0.08**0.5, 0.1])


def test_single_part_equals_its_kind():
    for kind in KINDS:
        keys = {"decay_every": 3, "steps": 30}
        one, name = lr_at(schedule=[{"kind": kind}], **keys), lr_at(schedule=kind, **keys)
        assert [one(step) for step in range(40)] == [name(step) for step in range(40)]


def test_parts_must_leave_steps_for_the_last_one():
    with pytest.raises(ConfigError, match="warm-up and phases take 20 of the run's 20 steps"):
        lr_at(schedule=[{"kind": "constant", "steps": 16}, {"kind": "cosine"}])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule": "step"}, "step needs decay_every"),
        (
            {"schedule": "exponential", "min_lr_ratio": 0},
            "exponential cannot start or end at a learning rate of 0",
        ),
        (
            {
                "schedule": [
                    {"kind": "linear", "steps": 2, "min_lr_ratio": 0},
                    {"kind": "constant", "steps": 2},
                    {"kind": "exponential"},
                ]
            },
            "exponential cannot start or end at a learning rate of 0",
        ),
        ({"schedule": []}, "every phase of the schedule except the last needs steps"),
        ({"schedule": [{"kind": "linear"}, {"kind": "cosine"}]}, "except the last needs steps"),
        ({"schedule": [{"kind": "linear", "steps": 3}]}, "the last must not have steps"),
        ({"schedule": [{"kind": "constant", "min_lr_ratio": 0.5}]}, "a constant phase does not decay"),
        ({"schedule": "cosin"}, "'cosine'"),
    ],
)
def test_invalid_schedules_are_errors(keys, message):
    with pytest.raises(ConfigError, match=message):
        Optim(**keys)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [3, 4])
def test_run_shorter_than_its_warmup_ends_within_it(steps, kind):
    rate = lr_at(steps=steps, schedule=kind, decay_every=1)
    assert rate(3) == 0.75
    assert rate(steps) == steps / 4  # what docs/optimizers.md says its last step has
    assert [rate(step) for step in (4, 5, 50)] == [1.0, 1.0, 1.0]


def test_cosine_without_warmup():
    rate = lr_at(warmup=0)
    assert rate(0) == 1.0
    assert rate(10) == pytest.approx(0.55)
    assert rate(1) < 1.0


@given(
    schedule=st.sampled_from(KINDS),
    steps=st.integers(1, 200),
    warmup=st.integers(0, 250),
    ratio=st.floats(1e-3, 1),
    fraction=st.floats(0.01, 1),
    every=st.integers(1, 300),
    step=st.integers(0, 500),
    peak=st.floats(1e-6, 10),
)
def test_learning_rate_is_bounded_and_does_not_rise_after_the_warmup(
    schedule, steps, warmup, ratio, fraction, every, step, peak
):
    rate = lr_at(
        lr=peak,
        steps=steps,
        schedule=schedule,
        warmup=warmup,
        min_lr_ratio=ratio,
        decay_fraction=fraction,
        decay_every=every,
    )
    slack = peak * 1e-12
    assert 0 <= rate(step) <= peak + slack
    if step < warmup:
        assert rate(step) == pytest.approx(peak * step / warmup)
    else:
        assert rate(step + 1) <= rate(step) + slack
        assert rate(step) >= ratio * peak - slack
    if schedule not in ("constant", "step") and steps > warmup:
        assert rate(steps) == rate(steps + step) == peak * ratio


PART = st.fixed_dictionaries({"kind": st.sampled_from(KINDS), "steps": st.integers(1, 20)}).flatmap(
    lambda part: (
        st.just(part)
        if part["kind"] == "constant"
        else st.floats(1e-3, 1).map(lambda r: {**part, "min_lr_ratio": r})
    )
)


@given(
    parts=st.lists(PART, max_size=4),
    last=st.sampled_from(["linear", "cosine", "exponential", "wsd"]),
    rest=st.integers(1, 20),
)
def test_consecutive_parts_stay_within_bounds_and_end_at_the_minimum(parts, last, rest):
    steps = 4 + sum(part["steps"] for part in parts) + rest
    rate = lr_at(schedule=[*parts, {"kind": last}], steps=steps, decay_every=3)
    values = [rate(step) for step in range(4, steps + 1)]
    assert values[0] == 1.0
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    assert values[-1] == 0.1


@pytest.mark.parametrize("warmup", [0, 4])
def test_negative_step_is_an_error(warmup):
    rate = lr_at(warmup=warmup)
    assert rate(0) == (0 if warmup else 1)
    with pytest.raises(ConfigError, match="counted from 1"):
        rate(-1)


@pytest.mark.parametrize("steps", [7, 20, 1000])
@pytest.mark.parametrize("fraction", [0.0, 0.03, 0.1, 0.5])
def test_warmup_as_a_fraction_is_rounded_up_to_steps_as_in_transformers(fraction, steps):
    expected = TrainingArguments(warmup_steps=fraction).get_warmup_steps(steps)
    by_fraction = lr_at(warmup=fraction, steps=steps)
    by_steps = lr_at(warmup=int(expected), steps=steps)
    assert [by_fraction(step) for step in range(1, steps + 1)] == [
        by_steps(step) for step in range(1, steps + 1)
    ]


def test_warmup_as_a_fraction_needs_the_number_of_steps():
    with pytest.raises(ConfigError, match=r"optim.warmup: 0.1 is a fraction of the run"):
        create_schedule(Optim(warmup=0.1, schedule="constant"))
