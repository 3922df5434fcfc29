"""Supersteps: what is predicted, and which superstep is chosen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slackring as sr
from slackring.rules.planner import Objective, next_steps, predict

intervals_of_ranks = st.lists(st.integers(1, 50), min_size=1, max_size=6)
objectives = st.sampled_from(["gap", "rate"])
lookaheads = st.integers(1, 12)


# Milliseconds of each rank's local steps, lookahead, local steps of a superstep: if all ranks start at once.
SUPERSTEPS = [
    ([100, 100, 100, 100], 15, (1, 1, 1, 1)),
    ([100, 100, 200, 200], 15, (2, 2, 1, 1)),
    ([100, 103, 107, 310], 15, (3, 3, 3, 1)),
    ([100, 103, 107, 310], 60, (31, 30, 29, 10)),
    ([100, 131, 173, 211], 15, (10, 8, 6, 5)),
    ([100, 104, 109, 115], 15, (1, 1, 1, 1)),
    ([100, 104, 109, 115], 60, (23, 22, 21, 20)),
]


def plan(intervals: list[int], **options: object) -> tuple[int, ...]:
    """Plan for ranks that all train, with whole numbers of seconds."""
    return next_steps(intervals, [True] * len(intervals), **{"resolution": 1.0, "minimum_gain": 0.0, **options})  # type: ignore[arg-type]


def meetings(intervals: list[int], lookahead: int) -> list[tuple[int, list[int]]]:
    """Every time at which a superstep may end, and the steps that ranks have taken then."""
    ends = sorted({i * interval for interval in intervals for i in range(1, lookahead + 1)})
    return [(end, [min(end // i, lookahead) for i in intervals]) for end in ends if end >= max(intervals)]


# -- the superstep ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("intervals", "lookahead", "steps"), SUPERSTEPS)
def test_steps_of_a_superstep_that_begins_with_all_ranks_at_once(
    intervals: list[int], lookahead: int, steps: tuple[int, ...]
) -> None:
    assert plan(intervals, lookahead=lookahead) == steps
    gaps = [
        end - min(i * s for i, s in zip(intervals, taken, strict=True)) for end, taken in meetings(intervals, lookahead)
    ]
    ends = [i * s for i, s in zip(intervals, steps, strict=True)]
    assert max(ends) - min(ends) == min(gaps)


@given(intervals_of_ranks, lookaheads)
def test_the_gap_is_the_least(intervals: list[int], lookahead: int) -> None:
    steps = plan(intervals, lookahead=lookahead)
    if len(set(intervals)) == 1:
        assert set(steps) == {1}
    else:
        ends = np.outer(intervals, range(1, lookahead + 1))
        assert steps == tuple(sr.zipline.plan(ends).targets + 1)


@given(intervals_of_ranks, lookaheads, st.floats(0, 100))
def test_the_rate_is_the_highest(intervals: list[int], lookahead: int, round_seconds: float) -> None:
    steps = plan(intervals, lookahead=lookahead, objective="rate", round_seconds=round_seconds)
    if len(set(intervals)) == 1:
        assert set(steps) == {1}
        return
    rates = {tuple(taken): sum(taken) / (end + round_seconds) for end, taken in meetings(intervals, lookahead)}
    assert rates[steps] == max(rates.values())
    shorter = itertools.takewhile(lambda taken: taken != steps, rates)
    assert all(rates[taken] < rates[steps] for taken in shorter)


@given(intervals_of_ranks, lookaheads, objectives, st.floats(0, 0.5), st.floats(0, 10))
def test_every_rank_takes_at_least_one_step_and_at_most_the_lookahead(
    intervals: list[int], lookahead: int, objective: Objective, minimum_gain: float, round_seconds: float
) -> None:
    steps = plan(
        intervals,
        lookahead=lookahead,
        objective=objective,
        minimum_gain=minimum_gain,
        round_seconds=round_seconds,
        resolution=None,
    )
    assert all(1 <= taken <= lookahead for taken in steps)
    assert len(steps) == len(intervals)


# -- what keeps it short ---------------------------------------------------------------------------------------------------


@given(
    st.floats(1e-3, 100), st.lists(st.floats(-0.0045, 0.0045), min_size=1, max_size=8), objectives, st.integers(1, 500)
)
def test_equal_speeds_are_bsp_however_they_jitter(
    seconds: float, jitter: list[float], objective: Objective, lookahead: int
) -> None:
    intervals = [seconds * (1 + part) for part in jitter]
    steps = next_steps(intervals, [True] * len(jitter), seconds, lookahead=lookahead, objective=objective)
    assert set(steps) == {1}


@pytest.mark.parametrize("objective", ["gap", "rate"])
def test_no_superstep_is_stretched_thirtyfold_for_a_trifle(objective: Objective) -> None:
    intervals = [0.0983, 0.1, 0.2]  # all end at 5.8 s within 0.3 ms
    options = {"lookahead": 150, "objective": objective, "resolution": 1e-4}
    assert next_steps(intervals, [True] * 3, minimum_gain=0.0, **options) == (59, 58, 29)  # type: ignore[arg-type]
    assert next_steps(intervals, [True] * 3, **options) == (2, 2, 1)  # type: ignore[arg-type]


def test_a_round_that_is_dear_makes_supersteps_longer() -> None:
    intervals = [0.1, 0.1, 0.13, 0.4]
    free, dear = (next_steps(intervals, [True] * 4, cost, objective="rate", lookahead=60) for cost in (0.0, 0.4))
    assert free == (4, 4, 3, 1)
    assert all(more > fewer for more, fewer in zip(dear, free, strict=True))


@given(intervals_of_ranks, st.lists(st.booleans(), min_size=6, max_size=6), objectives)
def test_ranks_that_do_not_train_leave_the_plan(intervals: list[int], flags: list[bool], objective: Objective) -> None:
    training = flags[: len(intervals)]
    steps = next_steps(intervals, training, objective=objective)
    active = [rank for rank, trains in enumerate(training) if trains]
    alone = next_steps([intervals[rank] for rank in active], [True] * len(active), objective=objective)
    assert tuple(steps[rank] for rank in active) == alone
    assert all(steps[rank] == 1 for rank in range(len(intervals)) if not training[rank])


@given(intervals_of_ranks)
def test_ranks_that_have_taken_no_step_yet_leave_the_plan(intervals: list[int]) -> None:
    assert next_steps([*intervals, 0], [True] * (len(intervals) + 1)) == (*plan_of_default(intervals), 1)


def plan_of_default(intervals: list[int]) -> tuple[int, ...]:
    return next_steps(intervals, [True] * len(intervals))


def test_nobody_to_plan_for() -> None:
    assert next_steps([0.1, 0.2], [False, False]) == (1, 1)
    assert next_steps([0.0, 0.0], [True, True]) == (1, 1)


# -- prediction ------------------------------------------------------------------------------------------------------------


def test_without_smoothing_the_last_interval_is_the_prediction() -> None:
    assert predict([0.1, 0.2], [], 0.0) == (0.1, 0.2)
    assert predict([0.1, 0.2], [0.3, 0.3], 0.0) == (0.1, 0.2)
    assert predict([0.0, 0.2], [0.3, 0.3], 0.0) == (0.3, 0.2), "no step, no news"


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0, 0.95))
def test_smoothing_approaches_what_is_measured_geometrically(first: float, later: float, smoothing: float) -> None:
    estimate = predict([first], [], smoothing)
    for _ in range(10):
        estimate = predict([later], estimate, smoothing)
    assert estimate[0] == pytest.approx(later + (first - later) * smoothing**10)
