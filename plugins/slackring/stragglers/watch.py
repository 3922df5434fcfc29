"""Finds the rank that holds the others up, and does not mistake chance for one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from slackring.errors import StragglerError

if TYPE_CHECKING:
    from slackring.optim.progress import LandedRound

__all__ = ["StragglerWatch", "Straggling"]

log = logging.getLogger("slackring")

_ODDS = 10**9  # against chance, in one test of one rank
_SPANS = (1, 2, 4, 8, 16)  # how many times `rounds` a test looks back
_TESTS = 6  # of a span, while it passes once
_CLEARLY = 1.1  # times the time of half of the others is slower than they are
_SECONDS = 1.0  # of steps in a span, below which it is a moment
_WORSE = 2.0  # times the factor that was told makes it worth telling again


@dataclass(frozen=True)
class Straggling:
    """That a rank straggles, and by how much; ``str()`` of it is a sentence.

    Attributes
    ----------
    rank, seconds
        Which rank, and the seconds a local step takes it: the median over the last `rounds` rounds.
    rounds
        The fewest that prove it.
    best, factor
        The fastest rank, and how many times its seconds those are.
    past
        How many times this rank's own seconds before those rounds; None if there are too few rounds before.

    Examples
    --------
    >>> print(Straggling(rank=3, seconds=0.41, rounds=30, best=0, factor=4.1, past=1.0))
    rank 3 takes 0.41 s a local step, over the last 30 rounds: 4.1 times the best rank (rank 0), 1.0 times its own past.
    """

    rank: int
    seconds: float
    rounds: int
    best: int
    factor: float
    past: float | None

    def __str__(self) -> str:
        own = "as ever since the start" if self.past is None else f"{self.past:.1f} times its own past"
        return (
            f"rank {self.rank} takes {self.seconds:.3g} s a local step, over the last {self.rounds} rounds: {self.factor:.1f} "
            f"times the best rank (rank {self.best}), {own}."
        )


class StragglerWatch:
    """Warns of a rank that straggles; give it to ``optimizer.on_landed`` on one rank, since all hear the same.

    A rank straggles if, over the last `rounds` rounds or 2, 4, 8 or 16 times as many, three things hold:

    - its median step takes at least `threshold` times the median step of the best rank,
    - it was slower than half of the others, by a tenth, in so many of these rounds as chance makes it once in a billion times,
      and
    - its steps in these rounds took a second or more together: a machine that is busy with something else for a moment makes
      many short steps slow.

    Equal ranks, however noisy, are slower than half of the others in at most every second round. In 10,000 rounds 32 of them
    are tested 124,000 times, each span six times in its own length: one is named wrongly with a probability of about 0.0001.
    A quiet rank must have been slower in all of 30 rounds; where noise hides who is slower, more rounds decide: 93 of 120 or
    306 of 480, say; a factor 2 under exponential step times is seen within about 500 rounds (1,200 of two ranks). Pauses of a few
    rounds are no proof, since a rank is like the others between them. Stragglers are found as long as no more than half of the
    ranks are.

    A rank is named once, and again if it gets twice as slow, or recovers and relapses.

    Parameters
    ----------
    rounds
        After how many rounds a rank is named at the earliest; at least 30.
    threshold
        How many times the best rank's time makes a straggler; above 1.
    say
        Takes each sentence; if None, they are warnings of the logger ``"slackring"``.

    Raises
    ------
    StragglerError
        For values that cannot be.

    Examples
    --------
    >>> watch = StragglerWatch(say=print)
    >>> for _ in range(100):
    ...     found = watch.take([0.1, 0.1, 0.1, 0.41])
    rank 3 takes 0.41 s a local step, over the last 30 rounds: 4.1 times the best rank (rank 0), as ever since the start.
    """

    def __init__(self, rounds: int = 30, threshold: float = 1.5, say: Callable[[str], object] | None = None) -> None:
        if _slower_at_least(rounds) > rounds:
            raise StragglerError(f"rounds={rounds} cannot tell a straggler from chance; give at least 30.")
        if not 1 < threshold < math.inf:
            raise StragglerError(f"threshold={threshold} must be above 1, the best rank's own time.")
        self._threshold = threshold
        self._say: Callable[[str], object] = log.warning if say is None else say
        self._spans = [times * rounds for times in _SPANS]
        self._kept = 2 * self._spans[-1]  # the longest span, and a past before it
        self._forget(size=0)

    def _forget(self, size: int) -> None:
        """Start anew, with other ranks."""
        self._size, self._heard, self._end = size, 0, 0
        # With room, so that what is kept is moved to the front rarely.
        self._seconds = np.empty((2 * self._kept, size))
        self._slower = np.empty((2 * self._kept, size), dtype=bool)
        self._told: dict[int, Straggling] = {}

    def __call__(self, landed: LandedRound) -> None:
        """Take a landed round; ranks without a local step, and those that only help the others, do not count in it."""
        rows = zip(landed.step_seconds, landed.steps, landed.helping, strict=True)
        self.take([seconds if steps and not helping else math.nan for seconds, steps, helping in rows])

    def take(self, step_seconds: Sequence[float]) -> list[Straggling]:
        """Take a round, and tell what was said.

        Parameters
        ----------
        step_seconds
            Seconds of a local step by rank; NaN of a rank that does not count.

        Returns
        -------
        list of Straggling
            The ranks that were named now.
        """
        if len(step_seconds) != self._size:
            self._forget(len(step_seconds))
        if self._end == len(self._seconds):
            for rows in (self._seconds, self._slower):
                rows[: self._kept] = rows[-self._kept :]
            self._end = self._kept
        row = self._seconds[self._end]
        row[:] = step_seconds
        counted = np.sort(row)  # NaN last
        number = np.count_nonzero(row == row)  # not NaN
        # Of an even number of others, the slower one of the two in the middle; who is as slow as that is not slower.
        half = counted[(number - 1) // 2] if number > 1 else math.inf
        np.greater(row, _CLEARLY * half, out=self._slower[self._end])
        self._end += 1
        self._heard += 1
        said: list[Straggling] = []
        for span in self._spans:
            if span <= self._heard and self._heard % (span // _TESTS) == 0:
                said += self._test(span)
        return said

    def _test(self, span: int) -> list[Straggling]:
        seconds, slower = (rows[self._end - span : self._end] for rows in (self._seconds, self._slower))
        counted = span - np.isnan(seconds).sum(axis=0)
        enough = slower.sum(axis=0) >= [_slower_at_least(count) for count in counted.tolist()]
        # Pauses are neither: to recover takes twice the span that proved the straggling, and to get worse not the shortest.
        recovering = [rank for rank, told in self._told.items() if span == min(2 * told.rounds, self._spans[-1])]
        proved = [rank for rank in np.flatnonzero(enough).tolist() if rank not in self._told or span > self._spans[0]]
        if not proved and not recovering:
            return []
        known = counted >= span // 2
        ordered = np.sort(seconds.T, axis=1)  # NaN last
        ranks = np.arange(self._size)
        medians = np.where(known, (ordered[ranks, (counted - 1) // 2] + ordered[ranks, counted // 2]) / 2, math.inf)
        best = int(medians.argmin())
        if not 0 < medians[best] < math.inf:
            return []
        factors = medians / medians[best]
        for rank in recovering:
            if factors[rank] < (1 + self._threshold) / 2:
                del self._told[rank]
                self._slower[: self._end, rank] = False  # so that longer spans do not name it for what is over
        said = []
        for rank in proved:
            told = self._told.get(rank)
            long = known[rank] and np.nansum(seconds[:, rank]) >= _SECONDS
            if long and factors[rank] >= (self._threshold if told is None else _WORSE * told.factor):
                median = float(medians[rank])
                found = Straggling(rank, median, span, best, float(factors[rank]), self._past(rank, span, median))
                self._told[rank] = found
                self._say(str(found))
                said.append(found)
        return said

    def _past(self, rank: int, span: int, median: float) -> float | None:
        """How many times its own past `median` is."""
        before = self._seconds[: self._end - span, rank]
        before = before[~np.isnan(before)]
        return median / float(np.median(before)) if len(before) >= span // _TESTS else None


@cache
def _slower_at_least(rounds: int) -> int:
    """In how many of some rounds a rank has to be slower, for the odds against chance to be high enough.

    Examples
    --------
    >>> [_slower_at_least(rounds) for rounds in (29, 30, 60, 480)]
    [30, 30, 53, 306]
    """
    slower, ways, all_ways = rounds + 1, 0, 2**rounds
    more = 1  # ways to be slower in one round less
    while _ODDS * (ways + more) <= all_ways:
        slower, ways = slower - 1, ways + more
        more = more * slower // (rounds - slower + 1)
    return slower
