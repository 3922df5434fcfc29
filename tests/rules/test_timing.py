"""The numbered oracles are those of the notes on the Anytime Minibatch papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackring.errors import RuleError
from slackring.rules.timing import compute_time_for, next_deadline, staleness_for
from slackring.stragglers import ShiftedExponential

seconds = st.floats(1e-3, 1e3)


def processed(times: np.ndarray, compute_time: float, share: float, micro_batch: float, overshoot: bool) -> np.ndarray:
    """Samples that ranks process in a compute time if they take `times` for `share` samples, in whole micro-batches."""
    steps = share * compute_time / (times * micro_batch)
    return micro_batch * (np.ceil(steps) if overshoot else np.floor(steps))


@given(
    st.lists(seconds, min_size=1, max_size=20),
    st.integers(1, 50),
    st.integers(1, 64),
    st.integers(1, 5000),
    st.booleans(),
)
def test_oracle_14_no_times_give_less_than_the_target_batch(
    times: list[float], ranks: int, micro_batch: int, target: int, overshoot: bool
) -> None:
    # The times are all there is of the distribution, so that its mean is exact.
    compute_time = compute_time_for(target, ranks, micro_batch, float(np.mean(times)), overshoot=overshoot)
    batches = ranks * processed(np.array(times), compute_time, target / ranks, micro_batch, overshoot)
    assert np.mean(batches) >= target * (1 - 1e-9)


@pytest.mark.parametrize(
    ("ranks", "target", "compute_time", "slowest", "batch", "gain"),
    [(10, 600, 2.5417, 5.393, 784, 2.122), (20, 12000, 2.5042, 6.397, 15540, 2.554)],
)
def test_oracle_14_shifted_exponential(
    ranks: int, target: int, compute_time: float, slowest: float, batch: float, gain: float
) -> None:
    shift, mean, epochs = 1.0, 1.5, 3000
    model = ShiftedExponential(mean=mean, shift=shift, unit="seconds", seed=0)
    times = np.array([[model.step_seconds(rank, epoch, 1.0) for rank in range(ranks)] for epoch in range(epochs)])
    chosen = compute_time_for(target, ranks, micro_batch=1, mean_seconds=shift + mean)
    assert chosen == pytest.approx(compute_time, abs=1e-4)
    batches = processed(times, chosen, target / ranks, 1, overshoot=False).sum(axis=1)
    assert batches.mean() == pytest.approx(batch, rel=0.01)
    # A fixed minibatch waits for the slowest rank.
    harmonic = sum(1 / rank for rank in range(1, ranks + 1))
    assert shift + mean * harmonic == pytest.approx(slowest, abs=1e-3)
    assert times.max(axis=1).mean() == pytest.approx(slowest, rel=0.01)
    assert times.max(axis=1).mean() <= shift + mean + mean * math.sqrt(ranks - 1)
    assert slowest / chosen == pytest.approx(gain, abs=1e-3)


@given(st.lists(st.lists(seconds, min_size=4, max_size=4), min_size=1, max_size=20))
def test_oracle_14_the_slowest_of_n_is_at_most_sqrt_n_minus_1_deviations_above_the_mean(
    rows: list[list[float]],
) -> None:
    times = np.array(rows)
    assert np.mean(times.max(axis=1)) <= times.mean() + times.std() * math.sqrt(times.shape[1] - 1) + 1e-9


def test_oracle_15_staleness_from_times() -> None:
    assert staleness_for(10, 2.5) == 4
    assert staleness_for(2.5, 2.5) == 1
    assert staleness_for(1e-12, 2.5) == staleness_for(0, 2.5) == 0


@given(st.integers(0, 100), st.floats(1e-3, 1e3))
def test_staleness_of_whole_windows_is_exact(windows: int, compute_time: float) -> None:
    assert staleness_for(windows * compute_time, compute_time) == windows
    assert staleness_for((windows + 0.001) * compute_time, compute_time) == windows + 1


@given(st.floats(0, 1e3), st.floats(0, 1e2), st.floats(1e-3, 10))
def test_deadlines_keep_their_grid_until_a_whole_window_is_lost(
    previous: float, late: float, compute_time: float
) -> None:
    now = previous + late
    deadline = next_deadline(previous, now, compute_time)
    assert now <= deadline <= now + compute_time
    assert deadline in (previous + compute_time, now + compute_time)


def test_impossible_values_are_refused() -> None:
    for target, ranks, micro_batch, mean in [(0, 1, 1, 1.0), (1, 0, 1, 1.0), (1, 1, 0, 1.0), (1, 1, 1, math.nan)]:
        with pytest.raises(RuleError, match="a compute time needs"):
            compute_time_for(target, ranks, micro_batch, mean)
    for communication, compute in [(-1.0, 1.0), (1.0, 0.0), (math.inf, 1.0)]:
        with pytest.raises(RuleError, match="staleness needs"):
            staleness_for(communication, compute)
