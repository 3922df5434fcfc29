"""ElasticBSP as a value: its plans from what ranks said, its text, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slackring as sr
from slackring.errors import RuleError
from slackring.rules import Plan, Rule, Seen


def seen(last: list[float], mean: list[float] | None = None, joined: tuple[int, ...] = (), cost: float = 0.0) -> Seen:
    ranks = range(len(last))
    training = tuple(rank not in joined for rank in ranks)
    return Seen((1,) * len(last), (1.0,) * len(last), tuple(mean or last), tuple(last), training, cost)


def plans(rule: Rule, rounds: list[Seen]) -> list[tuple[int, ...]]:
    """Steps of the supersteps after each round."""
    found, plan = [], rule.first_plan
    for one in rounds:
        plan = rule.plan(one, plan)
        found.append(plan.steps)
    return found


SLOW_THIRD = seen([0.1, 0.1, 0.2])


def test_nothing_is_planned_from_the_first_step() -> None:
    warm_up = seen([3.0, 2.0, 9.0])
    assert sr.ElasticBSP().first_plan.steps == ()  # one each
    assert plans(sr.ElasticBSP(), [warm_up, SLOW_THIRD]) == [(), (2, 2, 1)]
    assert plans(sr.ElasticBSP(smoothing=0.9), [warm_up, SLOW_THIRD]) == [(), (2, 2, 1)]


def test_only_the_last_interval_counts_without_smoothing() -> None:
    rounds = [SLOW_THIRD, SLOW_THIRD, seen([0.1, 0.1, 0.1], mean=[0.3, 0.2, 0.1]), SLOW_THIRD]
    assert plans(sr.ElasticBSP(), rounds)[1:] == [(2, 2, 1), (1, 1, 1), (2, 2, 1)]


def test_smoothing_counts_the_means_of_earlier_supersteps() -> None:
    rule = sr.ElasticBSP(smoothing=0.5)
    first = rule.plan(SLOW_THIRD, rule.plan(SLOW_THIRD, rule.first_plan))
    second = rule.plan(seen([9.0, 9.0, 9.0], mean=[0.1, 0.1, 0.4]), first)
    assert first.memory == (0.1, 0.1, 0.2)
    assert second.memory == pytest.approx((0.1, 0.1, 0.3))
    assert second.steps == (3, 3, 1)


def test_ranks_that_joined_leave_the_plan() -> None:
    rounds = [SLOW_THIRD, SLOW_THIRD, seen([0.1, 0.1, 0.0], joined=(2,))]
    assert plans(sr.ElasticBSP(), rounds)[-1] == (1, 1, 1)


def test_a_rank_that_sat_a_round_out_is_planned_with_what_it_took_before() -> None:
    rounds = [SLOW_THIRD, SLOW_THIRD, seen([0.1, 0.0, 0.2])]
    assert plans(sr.ElasticBSP(), rounds)[-1] == (2, 2, 1)


def test_the_rate_counts_what_rounds_cost() -> None:
    free, dear = (plans(sr.ElasticBSP(objective="rate"), [seen([0.1, 0.13], cost=cost)] * 2)[-1] for cost in (0.0, 1.0))
    assert dear[0] > free[0]
    assert (
        plans(sr.ElasticBSP(), [seen([0.1, 0.13], cost=1.0)] * 2)[-1]
        == plans(sr.ElasticBSP(), [seen([0.1, 0.13])] * 2)[-1]
    )


@given(
    st.lists(st.lists(st.floats(0.01, 2), min_size=3, max_size=3), min_size=2, max_size=6),
    st.integers(1, 20),
    st.sampled_from(["gap", "rate"]),
    st.sampled_from([0.0, 0.5]),
)
def test_supersteps_are_bounded_by_the_lookahead(
    rounds: list[list[float]], lookahead: int, objective: str, smoothing: float
) -> None:
    rule = sr.ElasticBSP(lookahead=lookahead, objective=objective, smoothing=smoothing)  # type: ignore[arg-type]
    for steps in plans(rule, [seen(last) for last in rounds])[1:]:
        assert all(1 <= taken <= lookahead for taken in steps)


def test_a_plan_is_plain_numbers() -> None:
    """It goes into checkpoints."""
    plan = sr.ElasticBSP().plan(SLOW_THIRD, Plan(memory=(0.1, 0.1, 0.1)))
    assert {type(value) for value in plan.steps} == {int}
    assert {type(value) for value in plan.memory} == {float}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("elastic_bsp:lookahead=0", "lookahead is 1 or more"),
        ("elastic_bsp:objective=speed", "'gap' or 'rate'"),
        ("elastic_bsp:smoothing=1", "smoothing is a share"),
        ("elastic_bsp:minimum_gain=-0.1", "minimum_gain is a share"),
        ("elastic_bsp:minimum_gain=nan", "minimum_gain is a share"),
        ("elastic_bsp:resolution=0", "resolution is in seconds, above 0"),
        ("elastic_bsp:resolution=inf", "resolution is in seconds, above 0"),
        ("elastic_bsp:payload=gradient,weighting=sum", "weighting= is for deltas"),
        ("elastic_bsp:staleness=1", "no option 'staleness'"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(RuleError, match=words):
        sr.parse_rule(text)
    with pytest.raises(RuleError, match="'gap' or 'rate'"):
        sr.ElasticBSP(objective="speed")  # type: ignore[arg-type]
