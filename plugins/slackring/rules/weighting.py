"""How contributions of unequal size become one average: a factor before the sum, a divisor after it."""

from __future__ import annotations

from dataclasses import dataclass

from slackring.rules.base import Weighting

__all__ = ["Totals", "delta_divisor", "delta_factor"]


@dataclass(frozen=True)
class Totals:
    """What a round's control block says about all contributions.

    Attributes
    ----------
    steps, samples
        Sums over ranks.
    contributors
        Ranks whose window was not empty.
    training
        Ranks that have not joined.
    """

    steps: float
    samples: float
    contributors: int
    training: int


def delta_factor(weighting: Weighting, steps: int, samples: float) -> float:
    """Factor of a rank's delta before it is summed over ranks.

    Parameters
    ----------
    weighting
        What counts alike.
    steps, samples
        Local steps and samples in the rank's window.

    Examples
    --------
    >>> delta_factor("ranks", steps=4, samples=128)
    0.25
    """
    if weighting in ("steps", "sum") or steps == 0:
        return 1.0
    return 1.0 / steps if weighting == "ranks" else samples / steps


def delta_divisor(weighting: Weighting, totals: Totals) -> float:
    """Divisor of the summed deltas; a training rank that sent nothing counts, a joined one does not.

    Examples
    --------
    >>> delta_divisor("ranks", Totals(steps=10, samples=320, contributors=2, training=4))
    0.8
    """
    if weighting == "sum" or totals.contributors == 0 or (weighting == "samples" and totals.samples == 0):
        return 1.0  # the last two: the sum is zero
    if weighting == "steps":
        return float(max(totals.training, 1))
    if weighting == "ranks":
        return totals.training / (totals.steps / totals.contributors)
    return totals.training * totals.samples / totals.steps
