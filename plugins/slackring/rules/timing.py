"""How long an Anytime Minibatch window computes, and how many rounds that leaves in flight."""

from __future__ import annotations

import math

from slackring.errors import RuleError

__all__ = ["compute_time_for", "next_deadline", "staleness_for"]

# Of a compute time: how much more a round may take before it counts as one more. 3 * 0.1 is above 0.3 in floats.
_TOLERANCE = 1e-9


def compute_time_for(
    target_batch: float, ranks: int, micro_batch: float, mean_seconds: float, *, overshoot: bool = False
) -> float:
    """Choose the compute time T in which all ranks together process at least a given batch, on average.

    ``T = (1 + n m / b) mu`` if windows end before their deadline, ``T = mu`` if they end at the first micro-batch past it:
    a rank processes ``b / n * T / T_i`` samples in T, rounded to micro-batches, and ``E[1 / T_i] >= 1 / mu``.

    From "Anytime Minibatch" (ICLR 2019, arXiv 2006.05752), whose lemma is the first case with m = 1.

    Parameters
    ----------
    target_batch
        b, samples of all ranks in a window; above 0.
    ranks
        n, at least 1.
    micro_batch
        m, samples in a local step; above 0.
    mean_seconds
        mu, the mean over ranks and windows of the seconds a rank takes for ``b / n`` samples; above 0.
    overshoot
        Whether windows end past their deadline instead of before it.

    Returns
    -------
    float
        T, in seconds.

    Raises
    ------
    RuleError
        For values out of range.

    Examples
    --------
    >>> round(compute_time_for(target_batch=600, ranks=10, micro_batch=1, mean_seconds=2.5), 3)
    2.542
    >>> compute_time_for(target_batch=600, ranks=10, micro_batch=1, mean_seconds=2.5, overshoot=True)
    2.5
    """
    if not (_positive(target_batch) and ranks >= 1 and _positive(micro_batch) and _positive(mean_seconds)):
        raise RuleError(
            f"a compute time needs a target batch, ranks, samples a step and mean seconds above 0, not {target_batch}, "
            f"{ranks}, {micro_batch} and {mean_seconds}."
        )
    return mean_seconds if overshoot else (1 + ranks * micro_batch / target_batch) * mean_seconds


def staleness_for(communication_time: float, compute_time: float) -> int:
    """Count the windows that a rank computes while a round is under way: ``tau = ceil(T_c / T)``.

    From "Anytime Minibatch with Delayed Gradients" (arXiv 2012.08616).

    Parameters
    ----------
    communication_time
        T_c, from a round's launch to its landing, in seconds; at least 0.
    compute_time
        T, in seconds; above 0.

    Raises
    ------
    RuleError
        For values out of range.

    Examples
    --------
    >>> [staleness_for(communication_time, compute_time=2.5) for communication_time in (10, 2.6, 2.5, 0)]
    [4, 2, 1, 0]
    """
    if not (_positive(compute_time) and 0 <= communication_time < math.inf):
        raise RuleError(
            f"staleness needs a communication time of at least 0 s and a compute time above 0 s, not {communication_time} "
            f"and {compute_time}."
        )
    return max(math.ceil(communication_time / compute_time - _TOLERANCE), 0)


def next_deadline(previous: float, now: float, compute_time: float) -> float:
    """Continue the grid of deadlines: one compute time after the last, or after now if that is later by more than one.

    A rank that is a little late keeps the grid, and so the common clock, at the price of a shorter window. One that has lost a
    whole window starts a grid of its own.

    Parameters
    ----------
    previous, now
        The last deadline and the present, on the same clock, in seconds.
    compute_time
        In seconds.

    Examples
    --------
    >>> [next_deadline(previous=10.0, now=now, compute_time=2.0) for now in (10.0, 11.5, 12.0, 12.5)]
    [12.0, 12.0, 12.0, 14.5]
    """
    return (previous if now - previous <= compute_time else now) + compute_time


def _positive(value: float) -> bool:
    return 0 < value < math.inf
