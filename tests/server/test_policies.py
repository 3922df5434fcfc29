"""Policies as pure decisions: hand-computed traces, the papers' cases, and bounds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackring.errors import RuleError
from slackring.server import ASP, BSP, DSSP, SSP, ElasticBSP, Policy, parse_policy
from slackring.server.policies import extra_steps

POLICIES = [
    BSP(),
    ASP(),
    SSP(staleness=0),
    SSP(),
    DSSP(),
    DSSP(lower=1, upper=1),
    DSSP(bounded=False),
    ElasticBSP(lookahead=3),
]


@dataclass
class Played:
    """What workers did that push after each of their intervals, with free communication."""

    answered_at_lead: list[int] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    barriers: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """When all workers were answered together, and how often each had pushed since the time before."""
    pushes: list[int] = field(default_factory=list)
    left: int = 0


def play(policy: Policy, intervals: Sequence[Sequence[float]]) -> Played:
    """Let each worker take its steps, one an interval, and then leave."""
    size = len(intervals)
    gate, played = policy.gate(size), Played(wait=[0.0] * size, pushes=[0] * size)
    due = [(intervals[worker][0], worker) for worker in range(size)]
    heapq.heapify(due)
    pushed: dict[int, float] = {}
    before = (0,) * size
    while due:
        now = due[0][0]
        workers = []
        while due and due[0][0] == now:
            workers.append(heapq.heappop(due)[1])
        for worker in workers:
            pushed[worker] = now
            played.pushes[worker] += 1
        answered, pooled = gate.pushed(workers, now)
        if pooled and answered:
            played.barriers.append((now, tuple(a - b for a, b in zip(gate.pushes, before, strict=True))))
            before = tuple(gate.pushes)
        queue = list(answered)
        while queue:
            worker = queue.pop(0)
            played.answered_at_lead.append(gate.lead(worker))
            played.wait[worker] += now - pushed.pop(worker)
            step = played.pushes[worker]
            if step < len(intervals[worker]):
                heapq.heappush(due, (now + intervals[worker][step], worker))
            else:
                played.left += 1
                queue += gate.left(worker, now).answered
    return played


def constant(*intervals: float, until: int) -> list[list[float]]:
    return [[interval] * math.ceil(until / interval) for interval in intervals]


# -- text ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_text_round_trips(policy):
    assert parse_policy(str(policy)) == policy
    assert parse_policy(policy) is policy
    assert parse_policy(str(policy).removeprefix("server/")) == policy


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sssp", "there is no policy named 'server/sssp'; did you mean 'server/ssp'?"),
        ("ssp:stale=3", "policy 'server/ssp' has no option 'stale'; did you mean 'staleness'?"),
        ("ssp:staleness=-1", "policy 'server/ssp': staleness is 0 or more, not -1."),
        ("dssp:lower=4,upper=3", "lower <= upper must hold, not lower=4 and upper=3."),
        ("dssp:lower=-1", "policy 'server/dssp': lower is 0 or more, not -1."),
        ("elastic_bsp:lookahead=0", "policy 'server/elastic_bsp': lookahead is 1 or more, not 0."),
    ],
)
def test_what_there_is_not_is_refused(text, sentence):
    with pytest.raises(RuleError) as caught:
        parse_policy(text)
    assert sentence in str(caught.value)


# -- traces by hand --------------------------------------------------------------------------------------------------------


def test_ssp_holds_the_fastest_when_it_is_ahead_by_more_than_s():
    gate = SSP(staleness=2).gate(2)
    assert [gate.pushed([0], at).answered for at in (1, 2, 3)] == [(0,), (0,), ()]
    assert gate.lead(0) == 3
    assert gate.pushed([1], 4).answered == (0, 1)
    assert gate.pushed([0], 5).answered == ()
    assert gate.pushed([1], 8).answered == (0, 1)


def test_pushes_at_the_same_time_count_together_whatever_their_order():
    for order in ([0, 1], [1, 0]):
        gate = SSP(staleness=0).gate(2)
        assert gate.pushed(order, 1).answered == (0, 1)


def test_dssp_of_the_notes_hand_case_takes_three_steps_and_waits_for_nothing():
    """p pushed at 90 and 100, the slowest at 60 and 95, r_max = 4: both push at 130."""
    assert extra_steps((90, 100), (60, 95), most=4) == 3
    gate = DSSP(lower=0, upper=4).gate(2)
    assert gate.pushed([0], 50).answered == ()
    assert gate.pushed([1], 60).answered == (0, 1)
    assert gate.pushed([0], 90).answered == ()  # nothing is known of worker 1's interval yet
    assert gate.pushed([1], 95).answered == (0, 1)
    assert [gate.pushed([0], at).answered for at in (100, 110, 120)] == [(0,)] * 3
    assert gate.pushed([0, 1], 130).answered == (0, 1)


def test_dssp_lets_one_granted_step_be_one_step():
    """The printed listing sends the OK right after the controller without counting it, and so makes it two."""
    gate = DSSP(lower=0, upper=1).gate(2)
    gate.pushed([0, 1], 10)
    gate.pushed([0, 1], 20)
    assert gate.pushed([0], 25).answered == (0,)
    assert gate.pushed([0], 30).answered == ()
    assert gate.pushed([1], 31).answered == (1,)
    assert gate.pushed([1], 41).answered == (0, 1)


def test_dssp_waits_at_once_where_the_slowest_is_about_to_push():
    assert extra_steps((0, 30), (10, 20), most=4) == 0  # 30 beside 30; 60 beside 60 is no better, and later
    assert extra_steps((0, 30), (21, 28), most=1) == 0  # 30 beside 35; 60 is farther from 42


def test_dssp_does_not_ask_for_a_worker_that_is_not_the_fastest():
    gate = DSSP(lower=0, upper=9).gate(3)
    gate.pushed([0, 1, 2], 10)
    gate.pushed([0, 1, 2], 20)
    gate.pushed([0], 21)
    assert gate.held == set()  # granted: it will meet the others at 30
    assert gate.pushed([0], 22).answered == (0,)
    assert gate.pushed([1], 23).answered == ()
    assert gate.pushed([2], 30).answered == (1, 2)


def test_bsp_answers_all_at_once_and_pools_every_gradient():
    gate = BSP().gate(3)
    assert gate.pushed([1], 1) == ((), (1,))
    assert gate.pushed([0, 2], 5) == ((0, 1, 2), (0, 2))


def test_elastic_bsp_watches_until_every_worker_has_pushed_twice_in_the_superstep():
    gate = ElasticBSP(lookahead=2).gate(2)
    for at in range(1, 8):
        assert gate.pushed([0], at) == ((0,), ())
    assert gate.pushed([0, 1], 8) == ((0, 1), ())
    # Predicted: 9 and 10 for worker 0; worker 1 has pushed once, and pushes again at 16.
    for at in range(9, 16):
        assert gate.pushed([0], at) == ((0,), ())
    assert gate.pushed([0, 1], 16) == ((0, 1), ())
    # Now 17 and 18 beside 24 and 32: worker 0 waits at 18, for six.
    assert gate.pushed([0], 17) == ((0,), ())
    assert gate.pushed([0], 18) == ((), (0,))
    assert gate.pushed([1], 24) == ((0, 1), (1,))
    assert gate.held == set()


@pytest.mark.parametrize(
    ("intervals", "lookahead", "steps", "ratio", "wait", "bsp_wait"),
    [
        ((100, 100, 100, 100), 15, (3, 3, 3, 3), 1.00, 0.0, 0.0),
        ((100, 100, 200, 200), 15, (6, 6, 3, 3), 1.50, 0.0, 25.0),
        ((100, 103, 107, 310), 15, (15, 15, 14, 5), 2.45, 1.7, 50.0),
        ((100, 103, 107, 310), 60, (31, 30, 29, 10), 2.50, 0.15, 50.0),
        ((100, 131, 173, 211), 15, (17, 13, 10, 8), 1.46, 1.4, 27.0),
        ((100, 104, 109, 115), 15, (3, 3, 3, 3), 1.00, None, None),
        ((100, 104, 109, 115), 60, (23, 22, 21, 20), 1.07, None, None),
    ],
)
def test_elastic_bsp_times_the_toy_clusters_of_section_4(intervals, lookahead, steps, ratio, wait, bsp_wait):
    """Constant intervals, aligned start, plan made at twice the longest interval, free communication."""
    superstep = play(ElasticBSP(lookahead), constant(*intervals, until=100 * max(intervals)))
    at, taken = superstep.barriers[0]
    assert taken == steps
    assert round(sum(steps) / at / (len(intervals) / max(intervals)), 2) == ratio
    # All workers start aligned again, so supersteps repeat.
    assert [count for _, count in superstep.barriers[:3]] == [steps] * 3
    if wait is not None:
        idle = 1 - sum(count * interval for count, interval in zip(steps, intervals, strict=True)) / (4 * at)
        assert 100 * idle == pytest.approx(wait, abs=0.06 if wait > 1 else 0.006)
        every_step = 1 - sum(intervals) / (4 * max(intervals))
        assert 100 * every_step == pytest.approx(bsp_wait, abs=0.6)
        bsp = play(BSP(), constant(*intervals, until=5 * max(intervals)))
        assert bsp.barriers[0] == (max(intervals), (1, 1, 1, 1))


def test_dssp_is_as_fast_as_asp_only_without_its_bound():
    """In its paper, seconds to 0.67 on two workers of unlike speed: ASP 2993, DSSP(3, 15) 3016, SSP(15) 5565."""
    intervals = constant(10, 20, until=20_000)
    asp, ssp = play(ASP(), intervals), play(SSP(15), intervals)
    bounded, printed = play(DSSP(3, 15), intervals), play(DSSP(3, 15, bounded=False), intervals)
    assert asp.wait[0] == 0
    assert printed.wait[0] < 0.02 * 10_000
    assert max(printed.answered_at_lead) > 500
    for slow in (ssp, bounded):
        assert slow.wait[0] == pytest.approx(10_000, rel=0.02)  # half of the time that worker 1 takes
    assert max(bounded.answered_at_lead) == 15


# -- for all ---------------------------------------------------------------------------------------------------------------

steps = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=25), min_size=1, max_size=5)


@given(steps, st.integers(0, 4))
def test_ssp_never_lets_a_worker_compute_more_than_s_ahead(intervals, staleness):
    played = play(SSP(staleness), intervals)
    assert max(played.answered_at_lead) <= staleness


@given(steps, st.integers(0, 3), st.integers(0, 6))
def test_dssp_never_lets_a_worker_compute_more_than_upper_ahead(intervals, lower, extra):
    played = play(DSSP(lower, lower + extra), intervals)
    assert max(played.answered_at_lead) <= lower + extra


@given(steps, st.integers(0, 4))
def test_dssp_without_a_range_is_ssp(intervals, staleness):
    assert play(DSSP(staleness, staleness), intervals) == play(SSP(staleness), intervals)


@given(steps)
def test_asp_never_waits(intervals):
    assert play(ASP(), intervals).wait == [0.0] * len(intervals)


@given(st.sampled_from(POLICIES), steps)
def test_a_worker_that_leaves_holds_nobody_up(policy, intervals):
    played = play(policy, intervals)
    assert played.left == len(intervals)
    assert played.pushes == [len(each) for each in intervals]


# Of several slowest workers, DSSP takes the first.
@given(st.sampled_from([policy for policy in POLICIES if not isinstance(policy, DSSP)]), steps, st.randoms())
def test_the_numbers_of_the_workers_decide_nothing(policy, intervals, random):
    order = list(range(len(intervals)))
    random.shuffle(order)
    played, shuffled = play(policy, intervals), play(policy, [intervals[worker] for worker in order])
    assert shuffled.wait == [played.wait[worker] for worker in order]
