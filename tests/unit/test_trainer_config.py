"""Learning rate of each optimizer step, and settings that raise an error."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.trainer_config import LrSchedule, OptimConfig

FALLING = [schedule for schedule in LrSchedule if schedule != LrSchedule.linear_to_tenth]

many = settings(max_examples=60)


@st.composite
def schedules(draw) -> OptimConfig:
    lr = draw(st.floats(1e-8, 1.0))
    warmup = draw(st.integers(0, 30))
    return OptimConfig(
        lr=lr,
        warmup_steps=warmup,
        lr_schedule=draw(st.sampled_from(FALLING)),
        lr_decay_steps=warmup + draw(st.integers(1, 60)),
        lr_min=lr * draw(st.sampled_from([0.0, 0.1, 1.0])),
    )


@many
@given(schedules())
def test_the_warm_up_is_linear_and_reaches_lr(adamw):
    for step in range(adamw.warmup_steps):
        assert adamw.lr_at(step) == pytest.approx(adamw.lr * (step + 1) / adamw.warmup_steps)
        assert adamw.lr_at(step) > 0, "no step is wasted"
    assert adamw.lr_at(adamw.warmup_steps) == pytest.approx(adamw.lr)


@many
@given(schedules())
def test_after_the_warm_up_the_rate_decreases_from_lr_to_lr_min(adamw):
    rates = [adamw.lr_at(step) for step in range(adamw.warmup_steps, adamw.lr_decay_steps + 5)]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(rates))
    last = adamw.lr if adamw.lr_schedule == "constant" else adamw.lr_min
    assert rates[-5:] == pytest.approx([last] * 5, abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [10, 10, 10, 10, 10, 10, 10]),
        ("linear", [10, 8, 6, 4, 2, 0, 0]),
        ("cosine", [10 * (1 + math.cos(math.pi * k / 5)) / 2 for k in range(6)] + [0]),
        ("wsd", [10, 10, 10, 10, 10, 0, 0]),
    ],
)
def test_schedules_without_warm_up(schedule, expected):
    adamw = OptimConfig(lr=10, lr_schedule=schedule, lr_decay_steps=5)
    assert [adamw.lr_at(step) for step in range(7)] == pytest.approx(expected)


def test_the_last_fifth_of_wsd_decays_as_one_minus_a_square_root():
    adamw = OptimConfig(lr=1.0, lr_schedule="wsd", warmup_steps=10, lr_decay_steps=110, lr_min=0.2)
    assert adamw.lr_at(89) == adamw.lr_at(90) == 1.0
    assert adamw.lr_at(95) == pytest.approx(0.2 + 0.8 * (1 - math.sqrt(1 / 4)))
    assert adamw.lr_at(110) == adamw.lr_at(500) == pytest.approx(0.2)


def test_linear_to_tenth_falls_from_the_first_step_also_during_the_warm_up():
    optim = OptimConfig(lr=2.0, lr_schedule="linear_to_tenth", warmup_steps=2, lr_decay_steps=10)
    assert [optim.lr_at(step) for step in (0, 1, 5, 10, 30)] == pytest.approx([1.0, 1.82, 1.1, 0.2, 0.2])


def test_linear_and_cosine_are_halfway_between_lr_and_lr_min_at_half_time():
    for schedule in ("linear", "cosine"):
        adamw = OptimConfig(lr=3.0, lr_min=1.0, warmup_steps=4, lr_schedule=schedule, lr_decay_steps=24)
        assert adamw.lr_at(14) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(lr=0.0), r"optim\.lr=0\.0"),
        (dict(lr=float("nan")), r"optim\.lr=nan"),
        (dict(betas=(0.9, 1.0)), r"optim\.betas=\(0\.9, 1\.0\).*\[0, 1\)"),
        (dict(lr_schedule="step"), r"lr_schedule='step'; expected one of constant, linear, cosine, wsd"),
        (dict(lr_schedule="linear"), r"lr_decay_steps=0: lr_schedule=linear needs more steps than warmup_steps=0"),
        (dict(lr_schedule="wsd", warmup_steps=7, lr_decay_steps=7), r"lr_decay_steps=7: .*warmup_steps=7"),
        (dict(lr=1e-3, lr_min=1e-2), r"lr_min=0\.01 is above lr=0\.001"),
    ],
)
def test_invalid_settings_raise_an_error(wrong, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**wrong)
