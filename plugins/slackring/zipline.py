"""ZipLine: where workers of unequal speed should meet, so that nobody waits long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slackring.errors import PlanError

__all__ = ["Plan", "plan"]

_ENDS_A_CELL = 16  # of the grid, on average


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each worker stops, and what that costs.

    Attributes
    ----------
    targets
        By worker: index into its row of the last iteration before the barrier, shape (n,).
    barrier
        When the last worker reaches its target; in the unit of the end times, and whole if they are.
    waits
        By worker: from reaching its target to the barrier, shape (n,).
    """

    targets: NDArray[np.intp]
    barrier: float
    waits: NDArray[Any]

    @property
    def gap(self) -> float:
        """The longest wait; the others' waits lie within it."""
        return self.waits.max().item()  # type: ignore[no-any-return]


def plan(end_times: ArrayLike | Sequence[ArrayLike], *, tolerance: float = 0.0) -> Plan:
    """Choose one future iteration end of every worker so that the ends lie as close together as possible.

    Minimises ``gap = max(Z) - min(Z)`` over all sets Z of one end time a worker, exactly. The problem and the scan are those
    of "Elastic Bulk Synchronous Parallel Model for Distributed Deep Learning" (ICDM 2019, arXiv 2001.01347), algorithm 2. Of
    several sets with the least gap the chronologically first is taken, so its barrier is the earliest.

    Parameters
    ----------
    end_times
        A row a worker: when its next iterations end, ascending, whole numbers or floats of any unit; shape (n, R), or n rows
        of unequal lengths.
    tolerance
        Take the first set whose gap exceeds the least by at most this much, so that a barrier is not put off for a trifle.

    Returns
    -------
    Plan
        Targets are the latest ends at or before the barrier. (The published scan may leave a worker one iteration short of it
        where two ends fall on the barrier, depending on how it sorts them; gap and barrier are the same.)

    Raises
    ------
    PlanError
        For no workers, a worker without end times, and end times that descend or are no finite numbers.

    Notes
    -----
    For a window that begins at `left`, the earliest right end is ``max_p (first end of p at or after left)``. When `left`
    passes an end, that worker's first end becomes its next one; so the right end is the running maximum of "next end of the
    same worker" over the ends in ascending order. One sort, one running maximum: O(R n log(R n)) without a loop. Most ends
    are left out before the sort, since a slower worker's interval covers theirs.

    Examples
    --------
    >>> found = plan([[2, 4], [7, 12], [3, 6]])
    >>> found.targets.tolist(), found.barrier, found.gap, found.waits.tolist()
    ([1, 0, 1], 7, 3, [3, 0, 1])
    """
    ends, starts = _flat(end_times)
    first, last = ends[starts], ends[np.append(starts[1:], len(ends)) - 1]
    reached = first.max()  # by every worker, once: no barrier is earlier
    exhausted = last.min()  # the first worker without a next end: no window begins later
    begins = ends[:-1] < exhausted  # never at the last end of a row, whose neighbour is no next end
    lefts, nexts = _movers(ends[:-1][begins], ends[1:][begins], reached)
    order = np.argsort(lefts)
    left = np.append(lefts[order], exhausted)
    right = np.maximum.accumulate(np.append(reached, nexts[order]))
    gaps = right - left
    best = gaps.argmin() if tolerance == 0 else (gaps <= gaps.min() + tolerance).argmax()
    barrier = right[best]
    targets = np.add.reduceat(ends <= barrier, starts, dtype=np.intp) - 1
    return Plan(targets, barrier.item(), barrier - ends[starts + targets])


def _movers(lefts: NDArray[Any], nexts: NDArray[Any], reached: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Leave out most of the ends that move no right end, since the next end of an earlier one is as late.

    Of the windows with one right end the best begins last: at the end that moves it. So the others are not needed as left ends
    either. What is earlier is told by a grid of time, which needs no sort and spares the ends of one cell from each other.
    """
    if len(lefts) == 0:
        return lefts, nexts
    start = lefts.min()
    cells = max(len(lefts) // _ENDS_A_CELL, 1)
    cell = ((lefts - start) * (cells / max(lefts.max() - start, 1e-300))).astype(np.intp)
    latest = np.full(cells + 2, reached)
    np.maximum.at(latest, cell + 1, nexts)
    moves = nexts > np.maximum.accumulate(latest)[cell]
    return lefts[moves], nexts[moves]


def _flat(end_times: ArrayLike | Sequence[ArrayLike]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """All end times, row by row, and where each row starts; checked."""
    if isinstance(end_times, np.ndarray) and end_times.ndim == 2:
        count, length = end_times.shape
        lengths = np.full(count, length)
        ends = end_times.ravel()
    else:
        rows = [np.asarray(row) for row in end_times]  # type: ignore[union-attr]
        wrong = [row.ndim for row in rows if row.ndim != 1]
        if wrong:
            raise PlanError(f"end times are a row of numbers a worker; a row has one dimension, not {wrong[0]}.")
        lengths = np.array([len(row) for row in rows], dtype=np.intp)
        ends = np.concatenate(rows) if rows else np.empty(0)
    if len(lengths) == 0:
        raise PlanError("there is nothing to plan for no workers; give a row of end times for each.")
    if lengths.min() == 0:
        raise PlanError(f"worker {lengths.argmin()} has no end times; give at least one, or leave the worker out.")
    if ends.dtype.kind not in "iuf":
        raise PlanError(f"end times are whole numbers or floats, not {ends.dtype}.")
    ends = ends.astype(np.float64 if ends.dtype.kind == "f" else np.int64, copy=False)
    starts = np.cumsum(lengths) - lengths
    ascends = np.empty(len(ends), dtype=bool)
    np.less_equal(ends[:-1], ends[1:], out=ascends[1:])
    ascends[starts] = np.isfinite(ends[starts])
    if not ascends.all() or not np.isfinite(ends[starts + lengths - 1]).all():
        _complain(ends, starts, lengths)
    return ends, starts


def _complain(ends: NDArray[Any], starts: NDArray[np.intp], lengths: NDArray[np.intp]) -> None:
    for worker, row in enumerate(np.split(ends, starts[1:])):
        bad = np.flatnonzero(~np.isfinite(row))
        if len(bad):
            raise PlanError(f"end time {bad[0]} of worker {worker} is {row[bad[0]]}; all must be finite.")
        down = np.flatnonzero(np.diff(row) < 0)
        if len(down):
            at = down[0]
            raise PlanError(
                f"end times of worker {worker} descend from {row[at]} to {row[at + 1]}, at place {at + 1}; sort them."
            )
