"""Supersteps: how many local steps each rank takes until all meet, predicted from how long its steps have taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slackring import zipline

__all__ = ["Objective", "next_steps", "predict"]

Objective = Literal["gap", "rate"]

_FINENESS = 50  # of the default resolution


def predict(seconds: Sequence[float], estimates: Sequence[float], smoothing: float) -> tuple[float, ...]:
    """Predict how long each rank's next local steps take.

    Parameters
    ----------
    seconds
        By rank: what a local step has taken; 0 if the rank took none.
    estimates
        The prediction before, or nothing.
    smoothing
        Weight of the prediction before, in [0, 1).

    Returns
    -------
    tuple of float
        Seconds by rank; 0 for a rank that has not taken a step yet.

    Examples
    --------
    >>> predict([0.2, 0.5, 0.0], [0.1, 0.0, 0.3], smoothing=0.5)
    (0.15000000000000002, 0.5, 0.3)
    """
    pairs = zip(seconds, estimates or seconds, strict=True)
    return tuple(smoothing * old + (1 - smoothing) * new if new and old else new or old for new, old in pairs)


def next_steps(
    intervals: Sequence[float],
    training: Sequence[bool],
    round_seconds: float = 0.0,
    *,
    lookahead: int = 15,
    objective: Objective = "gap",
    resolution: float | None = None,
    minimum_gain: float = 0.05,
) -> tuple[int, ...]:
    """Plan the next superstep: after how many local steps each rank meets the others.

    All ranks have just left a round, so rank p's next local steps end at ``i * intervals[p]``, ``i = 1 .. lookahead``. The
    superstep ends at one of these times, at which each rank has taken the local steps that end by then, at least one. If all
    intervals are equal, it is one local step long.

    Parameters
    ----------
    intervals
        By rank: predicted seconds of a local step. Ranks without a prediction (0) are left out of the plan.
    training
        By rank: whether it takes local steps; those that do not are left out.
    round_seconds
        What a round takes; counted by the objective "rate".
    lookahead
        Most local steps of a rank in a superstep.
    objective
        ``"gap"``: the least time between the first and the last rank's end, as :func:`slackring.zipline.plan` has it.
        ``"rate"``: the most local steps per second, ``sum(steps) / (end + round_seconds)``.
    resolution
        Seconds to which intervals are rounded, counted from the longest one, so that ranks that differ from it by less than
        half of this are as slow. None is a fiftieth of the shortest interval: above what equal ranks differ by, and over 15
        steps at most a seventh of one.
    minimum_gain
        A longer superstep must be better than each shorter one by more than this: a share of the longest interval for "gap",
        of the rate for "rate".

    Returns
    -------
    tuple of int
        Local steps by rank; 1 for those that are left out.

    Examples
    --------
    >>> next_steps([0.1, 0.1, 0.13, 0.4], [True] * 4)
    (4, 4, 3, 1)
    >>> next_steps([0.1, 0.1, 0.1001], [True] * 3)
    (1, 1, 1)
    """
    steps = np.ones(len(intervals), dtype=np.intp)
    planned = [rank for rank, interval in enumerate(intervals) if interval > 0 and training[rank]]
    if not planned:
        return tuple(steps.tolist())
    seconds = np.array([intervals[rank] for rank in planned])
    unit = resolution or seconds.min() / _FINENESS
    # Whole numbers, so that ends that should coincide do.
    longest = np.rint(seconds.max() / unit)
    rounded = np.maximum(longest - np.rint((seconds.max() - seconds) / unit), 1).astype(np.int64)
    if (rounded != rounded[0]).any():
        ends = rounded[:, None] * np.arange(1, lookahead + 1)
        if objective == "gap":
            steps[planned] = zipline.plan(ends, tolerance=minimum_gain * rounded.max()).targets + 1
        else:
            steps[planned] = _steps_of_the_best_rate(ends, round_seconds / unit, minimum_gain)
    return tuple(steps.tolist())


def _steps_of_the_best_rate(ends: NDArray[np.int64], round_time: float, minimum_gain: float) -> NDArray[np.intp]:
    """By rank: local steps at the first end whose rate is within the minimum gain of the best."""
    barriers = np.sort(ends, axis=None)
    taken = np.arange(1, len(barriers) + 1)  # local steps of all ranks that have ended by then
    rates = taken / (barriers + round_time)
    rates[barriers < ends[:, 0].max()] = 0.0  # not every rank has taken one
    barrier = barriers[(rates >= (1 - minimum_gain) * rates.max()).argmax()]
    steps: NDArray[np.intp] = np.count_nonzero(ends <= barrier, axis=1)
    return steps
