"""ZipLine's plans, held against an exhaustive search, the published methods and what theory says of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from benchmarks.published_zipline import (
    Choice,
    brute_force,
    full_grid_scan,
    grid_scan,
    heap,
    zipline,
    zipline_opt,
    zipline_opt_bs,
    zipline_scored_at_every_point,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import slackring as sr
from slackring.errors import PlanError

THOUSANDS = settings(max_examples=2000, deadline=None)

Rows = list[list[float]]


@st.composite
def tied(draw: st.DrawFn, workers: int = 5, ends: int = 20, latest: int = 20) -> Rows:
    """Rows of unequal lengths, `ends` in all at most; from bytes, which are drawn quickly."""
    count = draw(st.integers(1, workers))
    drawn = draw(st.binary(min_size=count, max_size=ends))
    return [sorted(byte % (latest + 1) for byte in drawn[worker::count]) for worker in range(count)]


few_times = st.integers(0, 20)
tied_rows = tied()
many_rows = tied(workers=12, ends=300, latest=255)
float_rows = st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4).map(sorted), min_size=1, max_size=4)
# No method of the papers can tell apart two ends of one worker at one time.
strictly_rising_rows = tied(ends=25).map(lambda rows: [sorted(set(row)) for row in rows])


def ours(rows: Rows) -> Choice:
    found = sr.zipline.plan(rows)
    return Choice(found.gap, found.barrier, tuple(found.targets.tolist()))


# -- the oracles -----------------------------------------------------------------------------------------------------------


@THOUSANDS
@given(tied_rows)
def test_oracle_1_no_combination_has_a_smaller_gap(rows: Rows) -> None:
    assert ours(rows) == brute_force(rows)
    assert heap(rows).gap == ours(rows).gap


@given(float_rows)
def test_oracle_1_nor_where_differences_are_rounded(rows: Rows) -> None:
    assert ours(rows) == brute_force(rows)


@given(many_rows)
def test_oracle_1_the_heap_agrees_where_there_are_too_many_combinations(rows: Rows) -> None:
    assert ours(rows)[:2] == heap(rows)[:2]


@THOUSANDS
@given(strictly_rising_rows)
def test_oracle_2_the_published_variants_agree(rows: Rows) -> None:
    assert zipline_scored_at_every_point(rows) == zipline_opt(rows) == zipline_opt_bs(rows)
    found = ours(rows)
    for variant in (zipline, zipline_opt_bs):
        published = variant(rows)
        assert published[:2] == found[:2]
        # Where several ends fall on the barrier, the published scans may not have come to the last of them.
        for worker, (theirs, mine) in enumerate(zip(published.targets, found.targets, strict=True)):
            assert theirs == mine or (theirs == mine - 1 and rows[worker][mine] == found.barrier)


@given(st.integers(1, 5), st.permutations(range(30)))
def test_oracle_2_without_equal_times_all_choose_the_same_ends(workers: int, times: list[int]) -> None:
    rows = [sorted(times[worker::workers]) for worker in range(workers)]
    assert ours(rows) == zipline(rows) == zipline_opt(rows) == zipline_opt_bs(rows)


@THOUSANDS
@given(tied_rows)
def test_oracle_3_grid_scans_are_within_twice_the_optimum(rows: Rows) -> None:
    gap = ours(rows).gap
    assert gap <= full_grid_scan(rows).gap <= grid_scan(rows).gap <= 2 * gap


@given(tied_rows, st.data())
def test_oracle_4_invariances(rows: Rows, data: st.DataObject) -> None:
    gap, barrier, targets = ours(rows)
    order = data.draw(st.permutations(range(len(rows))))
    assert ours([rows[worker] for worker in order]) == (gap, barrier, tuple(targets[worker] for worker in order))
    shift, scale = data.draw(st.integers(-100, 100)), data.draw(st.integers(1, 9))
    assert ours([[time + shift for time in row] for row in rows]) == (gap, barrier + shift, targets)
    assert ours([[time * scale for time in row] for row in rows]) == (gap * scale, barrier * scale, targets)


@given(tied_rows)
def test_oracle_4_more_lookahead_never_widens_the_gap(rows: Rows) -> None:
    gaps = [ours([row[:lookahead] for row in rows]).gap for lookahead in range(1, 7)]
    assert gaps == sorted(gaps, reverse=True)


@given(st.lists(few_times, min_size=1, max_size=8))
def test_oracle_4_one_worker_waits_for_nobody_and_one_iteration_is_bsp(times: list[int]) -> None:
    assert ours([sorted(times)]) == (0, min(times), (times.count(min(times)) - 1,))
    assert ours([[time] for time in times]) == (max(times) - min(times), max(times), (0,) * len(times))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=2, max_size=6))
def test_oracle_5_constant_intervals_keep_the_gap_below_the_second_longest(workers: list[tuple[int, int]]) -> None:
    intervals = sorted(interval for interval, _ in workers)
    # Long enough for all to be under way at once.
    rows = [list(range(start + interval, start + 600, interval)) for interval, start in workers]
    assert ours(rows).gap < intervals[-2]


@given(many_rows)
def test_oracle_6_of_equal_gaps_the_earliest_barrier_is_taken(rows: Rows) -> None:
    gap, barrier, _ = ours(rows)
    ends = sorted({end for row in rows for end in row if end < barrier})
    for earlier in ends:
        latest = [max((end for end in row if end <= earlier), default=None) for row in rows]
        assert None in latest or earlier - min(latest) > gap  # type: ignore[type-var, operator]


# -- small cases, by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "gap", "barrier", "targets", "full_grid", "grid"),
    [
        ([[2, 4], [7, 12], [3, 6]], 3, 7, (1, 0, 1), 3, 4),
        ([[6, 7], [10, 18], [7, 11], [6, 10]], 3, 10, (1, 0, 0, 1), 4, 4),
        ([[4, 10, 15, 24, 26], [0, 9, 12, 20], [5, 18, 22, 30]], 4, 24, (3, 3, 2), 4, 5),
    ],
)
def test_tiny_cases(
    rows: Rows, gap: float, barrier: float, targets: tuple[int, ...], full_grid: float, grid: float
) -> None:
    assert ours(rows) == brute_force(rows) == (gap, barrier, targets)
    assert (full_grid_scan(rows).gap, grid_scan(rows).gap) == (full_grid, grid)


@pytest.mark.parametrize(
    ("intervals", "lookahead", "iterations"),
    [
        ((100, 100, 100, 100), 15, (3, 3, 3, 3)),
        ((100, 100, 200, 200), 15, (6, 6, 3, 3)),
        ((100, 103, 107, 310), 15, (15, 15, 14, 5)),
        ((100, 103, 107, 310), 60, (31, 30, 29, 10)),
        ((100, 131, 173, 211), 15, (17, 13, 10, 8)),
        ((100, 104, 109, 115), 15, (3, 3, 3, 3)),
        ((100, 104, 109, 115), 60, (23, 22, 21, 20)),
    ],
)
def test_a_superstep_planned_after_two_iterations_of_the_slowest(
    intervals: tuple[int, ...], lookahead: int, iterations: tuple[int, ...]
) -> None:
    """The published way: watch until every worker has two ends, then plan from each one's latest on."""
    done = np.array([2 * max(intervals) // interval for interval in intervals])
    ends = (done[:, None] + np.arange(1, lookahead + 1)) * np.array(intervals)[:, None]
    assert tuple(done + 1 + sr.zipline.plan(ends).targets) == iterations


# -- what comes back -------------------------------------------------------------------------------------------------------


@given(tied_rows | float_rows)
def test_waits_end_at_the_barrier(rows: Rows) -> None:
    found = sr.zipline.plan(rows)
    ends = [row[target] for row, target in zip(rows, found.targets, strict=True)]
    assert max(ends) == found.barrier
    assert found.waits.tolist() == [found.barrier - end for end in ends]
    assert found.gap == max(ends) - min(ends)


@given(tied_rows, st.integers(0, 10))
def test_a_tolerance_takes_the_first_that_is_hardly_worse(rows: Rows, tolerance: int) -> None:
    best, found = sr.zipline.plan(rows), sr.zipline.plan(rows, tolerance=tolerance)
    assert found.barrier <= best.barrier
    assert found.gap <= best.gap + tolerance
    for earlier in {end for row in rows for end in row if end < found.barrier}:
        latest = [max((end for end in row if end <= earlier), default=None) for row in rows]
        assert None in latest or earlier - min(latest) > best.gap + tolerance  # type: ignore[type-var, operator]


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16, np.float32, np.float64])
def test_whole_times_stay_whole_and_rows_may_be_arrays(kind: type[np.generic]) -> None:
    times = np.array([[2, 4], [7, 12], [3, 6]], dtype=kind)
    several: list[Callable[[], object]] = [lambda: times, lambda: list(times), lambda: times.T.copy().T]
    for make in several:
        found = sr.zipline.plan(make())  # type: ignore[arg-type]
        assert (found.gap, found.barrier, found.targets.tolist()) == (3, 7, [1, 0, 1])
        assert isinstance(found.gap, int if np.issubdtype(kind, np.integer) else float)


def test_times_are_exact_where_floats_are_not() -> None:
    day = 2**60
    assert sr.zipline.plan([[day, day + 3], [day + 1]]).gap == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no workers"),
        (np.empty((0, 3)), "no workers"),
        ([[1.0], []], "worker 1 has no end times"),
        (np.empty((3, 0)), "worker 0 has no end times"),
        ([[1.0, 2.0], [3.0, 2.5]], "worker 1 descend from 3.0 to 2.5, at place 1"),
        ([[1.0], [float("nan")]], "end time 0 of worker 1 is nan"),
        ([[1.0, float("nan"), 2.0]], "end time 1 of worker 0 is nan"),
        ([[1.0, float("inf")], [1.0, 2.0]], "end time 1 of worker 0 is inf"),
        ([[float("-inf"), 1.0]], "end time 0 of worker 0 is -inf"),
        ([["soon", "later"]], "whole numbers or floats"),
        ([[True, True]], "whole numbers or floats"),
        ([1.0, 2.0], "one dimension, not 0"),
        (np.zeros((2, 2, 2)), "one dimension, not 2"),
    ],
)
def test_what_cannot_be_planned_is_refused(rows: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sr.zipline.plan(rows)  # type: ignore[arg-type]
