"""ZipLine and its baselines as their papers describe them, point by point, and two exact searches to check them against.

From "Elastic Bulk Synchronous Parallel Model for Distributed Deep Learning" (ICDM 2019) and the extended abstract of its journal
form (DSAA 2021). All take rows of ascending end times, one a worker, and choose one end of each so that they lie closely
together. :func:`slackring.zipline.plan` is held against them by tests/test_zipline.py and benchmarks/zipline.py.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "VARIANTS",
    "Choice",
    "brute_force",
    "full_grid_scan",
    "grid_scan",
    "heap",
    "zipline",
    "zipline_opt",
    "zipline_opt_bs",
    "zipline_scored_at_every_point",
]

Rows = Sequence[Sequence[float]]


class Point(NamedTuple):
    """The end of one iteration; sorts by time, equal times by worker."""

    time: float
    worker: int
    index: int


class Choice(NamedTuple):
    """One end of every worker."""

    gap: float
    barrier: float
    targets: tuple[int, ...]


def _points(rows: Rows) -> list[Point]:
    return sorted(Point(time, worker, index) for worker, row in enumerate(rows) for index, time in enumerate(row))


def _choice(window: Sequence[Point]) -> Choice:
    """Make a choice of a window of one point a worker, in order of time."""
    targets = tuple(point.index for point in sorted(window, key=lambda point: point.worker))
    return Choice(window[-1].time - window[0].time, window[-1].time, targets)


def _replace(window: list[Point], point: Point) -> None:
    """Append a point, and remove the earlier one of its worker, which is looked for from the front."""
    for place, other in enumerate(window):
        if other.worker == point.worker:
            del window[place]
            break
    window.append(point)


def zipline(rows: Rows) -> Choice:
    """ZipLine, algorithm 2 of the ICDM paper: O(R n^2).

    The window is filled until it has a point of every worker; then its earliest point goes, and it is filled again. The printed
    listing also scores the last window, which the timeline may leave without a worker; here it is not scored.
    """
    window: list[Point] = []
    best: Choice | None = None
    for point in _points(rows):
        _replace(window, point)
        if len(window) == len(rows):
            found = _choice(window)
            if best is None or found.gap < best.gap:
                best = found
            del window[0]
    assert best is not None
    return best


def zipline_scored_at_every_point(rows: Rows) -> Choice:
    """ZipLine as the slides draw it: every point replaces its worker's earlier one, and every full window is scored."""
    return _scored_at_every_point(rows, _replace)


def zipline_opt(rows: Rows) -> Choice:
    """ZipLineOpt: the earlier point of a worker is looked for only if it is not the first of the window."""

    def replace(window: list[Point], point: Point) -> None:
        if window and window[0].worker == point.worker:
            del window[0]
            window.append(point)
        else:
            _replace(window, point)

    return _scored_at_every_point(rows, replace)


def zipline_opt_bs(rows: Rows) -> Choice:
    """ZipLineOptBS: the earlier point of a worker is found by its time, in a binary search."""

    def replace(window: list[Point], point: Point) -> None:
        if point.index > 0:
            earlier = Point(rows[point.worker][point.index - 1], point.worker, point.index - 1)
            del window[0 if window[0] == earlier else bisect_left(window, earlier)]
        window.append(point)

    return _scored_at_every_point(rows, replace)


def _scored_at_every_point(rows: Rows, replace: Callable[[list[Point], Point], None]) -> Choice:
    window: list[Point] = []
    best, gap = window, float("inf")
    for point in _points(rows):
        replace(window, point)
        if len(window) == len(rows) and window[-1].time - window[0].time < gap:
            best, gap = list(window), window[-1].time - window[0].time
    return _choice(best)


def grid_scan(rows: Rows) -> Choice:
    """GridScan, a heuristic: for each end of the worker with the earliest first end, every other worker's nearest: O(R^2 n)."""
    return min(_nearest_to_each(rows, min(rows, key=lambda row: row[0])), key=lambda choice: choice.gap)


def full_grid_scan(rows: Rows) -> Choice:
    """FullGridScan, a heuristic still: GridScan from every worker in turn: O(R^2 n^2)."""
    return min(itertools.chain(*(_nearest_to_each(rows, base) for base in rows)), key=lambda choice: choice.gap)


def _nearest_to_each(rows: Rows, base: Sequence[float]) -> Iterator[Choice]:
    for end in base:
        targets = tuple(min(range(len(row)), key=lambda index, row=row: abs(row[index] - end)) for row in rows)
        yield _score(rows, targets)


def _score(rows: Rows, targets: tuple[int, ...]) -> Choice:
    times = [row[index] for row, index in zip(rows, targets, strict=True)]
    return Choice(max(times) - min(times), max(times), targets)


def brute_force(rows: Rows) -> Choice:
    """Try all combinations: the least gap, of these the earliest barrier, of these the latest ends before it: O(R^n)."""
    every = (_score(rows, targets) for targets in itertools.product(*(range(len(row)) for row in rows)))
    return min(every, key=lambda choice: (choice.gap, choice.barrier, [-index for index in choice.targets]))


def heap(rows: Rows) -> Choice:
    """Search by the textbook's merge of n rows, until the row that owns the earliest point ends: O(R n log n)."""
    earliest = [Point(row[0], worker, 0) for worker, row in enumerate(rows)]
    heapq.heapify(earliest)
    barrier = max(point.time for point in earliest)
    best, gap = list(earliest), float("inf")
    while True:
        time, worker, index = earliest[0]
        if barrier - time < gap:
            best, gap = list(earliest), barrier - time
        if index + 1 == len(rows[worker]):
            return _choice(sorted(best))
        following = Point(rows[worker][index + 1], worker, index + 1)
        barrier = max(barrier, following.time)
        heapq.heapreplace(earliest, following)


VARIANTS: dict[str, Callable[[Rows], Choice]] = {
    "ZipLine": zipline,
    "ZipLineOpt": zipline_opt,
    "ZipLineOptBS": zipline_opt_bs,
    "FullGridScan": full_grid_scan,
    "GridScan": grid_scan,
}
