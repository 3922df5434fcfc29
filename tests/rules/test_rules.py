"""Rules as values: what closes a window, what counts alike, what combinations there are, and their text."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slackring as sr
from slackring.errors import RuleError, SlackringError
from slackring.rules import Every, Moment, Rule, Trigger, WhenFree, parse_rules, rules
from slackring.rules.weighting import Totals, delta_divisor, delta_factor

counts = st.integers(1, 1000)
compensations = st.just("auto") | st.floats(-2, 2).map(float)
weightings = st.sampled_from(["steps", "ranks", "samples", "sum"])


@st.composite
def windows_of(draw: st.DrawFn) -> tuple[int, int]:
    return tuple(sorted((draw(counts), draw(counts))))  # type: ignore[return-value]


@st.composite
def any_rule(draw: st.DrawFn) -> Rule:
    k_min, k_max = draw(windows_of())
    name = draw(
        st.sampled_from(
            ["bsp", "local_sgd", "osp", "losp", "cocod", "elastic_bsp", "relaxed delta", "relaxed gradient"]
        )
    )
    if name == "bsp":
        return sr.BSP(draw(counts))
    if name == "local_sgd":
        return sr.LocalSGD(draw(counts), draw(weightings))
    if name == "osp":
        return sr.OSP(k_min, k_max, draw(weightings))
    if name == "losp":
        weighting = draw(weightings)
        return sr.LOSP(k_min, k_max, weighting, draw(compensations.filter(lambda c: (weighting, c) != ("sum", "auto"))))
    if name == "cocod":
        return sr.CoCoD(draw(counts), draw(weightings))
    if name == "elastic_bsp":
        return draw(
            st.builds(
                sr.ElasticBSP,
                lookahead=counts,
                objective=st.sampled_from(["gap", "rate"]),
                smoothing=st.floats(0, 0.9),
                resolution=st.none() | st.floats(1e-6, 10),
                minimum_gain=st.floats(0, 0.9),
                weighting=weightings,
            )
        )
    staleness = draw(st.integers(0, 5))
    fixed = staleness == 0 or draw(st.booleans())
    bounds = {"steps": draw(counts)} if fixed else {"k_min": k_min, "k_max": k_max}
    if name == "relaxed gradient":
        return sr.Relaxed(payload="gradient", staleness=staleness, **bounds)
    compensation = draw(compensations) if staleness else 0.0
    weighting = "ranks" if compensation == "auto" else draw(weightings)
    return sr.Relaxed(staleness=staleness, compensation=compensation, weighting=weighting, **bounds)


# -- text ------------------------------------------------------------------------------------------------------------------


@given(any_rule())
def test_text_round_trips(rule: Rule) -> None:
    assert sr.parse_rule(str(rule)) == rule
    assert sr.parse_rule(rule) is rule
    assert type(sr.parse_rule(str(rule))) is type(rule)


@given(st.lists(any_rule(), min_size=1, max_size=4))
def test_lists_of_rules_round_trip(several: list[Rule]) -> None:
    assert parse_rules(",".join(map(str, several))) == several


def test_short_texts() -> None:
    assert str(sr.BSP()) == "bsp"
    assert str(sr.LOSP(k_max=16, compensation="auto")) == "losp:k_max=16,compensation=auto"
    assert sr.parse_rule(" losp : k_max = 16 ") == sr.LOSP(k_max=16)
    with pytest.raises(RuleError, match="at least one"):
        parse_rules(" , ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lsop", "there is no rule named 'lsop'; did you mean 'losp'?"),
        ("local-sgd", "did you mean 'local_sgd'?"),
        ("BSP:accumulate=2", "did you mean 'bsp'?"),
        ("bsp:acumulate=2", "rule 'bsp' has no option 'acumulate'; did you mean 'accumulate'?"),
        ("losp:kmax=3", "did you mean 'k_max'?"),
        ("losp:k_max=many", "k_max='many' is not a whole number"),
        ("losp:compensation=lots", "compensation='lots' is not a number or 'auto'"),
        ("osp:weighting=size", "weighting='size' is not 'steps' or 'ranks' or 'samples' or 'sum'"),
        ("osp:compensation=1", "rule 'osp' has no option 'compensation'"),
    ],
)
def test_a_wrong_text_is_told_with_the_nearest_name(text: str, words: str) -> None:
    with pytest.raises(RuleError) as caught:
        sr.parse_rule(text)
    assert words in str(caught.value)
    assert isinstance(caught.value, SlackringError)


# -- combinations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bsp:accumulate=0", "at least one local step, not 0"),
        ("local_sgd:steps=-3", "at least one local step, not -3"),
        ("osp:k_min=5,k_max=4", "1 <= k_min <= k_max"),
        ("osp:k_min=0", "1 <= k_min <= k_max"),
        ("losp:compensation=nan", "a finite number or 'auto'"),
        ("losp:compensation=inf", "a finite number or 'auto'"),
        ("relaxed:steps=1,payload=gradient,staleness=1,compensation=0.5", "gradients have no compensation"),
        ("relaxed:steps=1,payload=gradient,weighting=ranks", "gradients are weighted by samples"),
        ("losp:compensation=auto,weighting=sum", "no share of it to measure"),
        ("relaxed:steps=1,compensation=1", "nothing to compensate"),
        ("relaxed", "the ring is always free"),
        ("relaxed:steps=1,staleness=-1", "staleness is 0 or more"),
        ("relaxed:steps=-1", "steps is 0"),
        ("relaxed:steps=2,k_max=3", "leave them out"),
        ("relaxed:steps=2,k_min=2,staleness=1", "leave them out"),
    ],
)
def test_impossible_combinations_are_refused_when_they_are_made(text: str, words: str) -> None:
    with pytest.raises(RuleError, match=words):
        sr.parse_rule(text)


def test_rules_are_points_of_one_space() -> None:
    """Each named rule behaves like its `Relaxed` spelling: the same trigger, payload, staleness and compensation."""
    pairs = [
        (sr.BSP(accumulate=3), sr.Relaxed(payload="gradient", steps=3)),
        (sr.LocalSGD(steps=5), sr.Relaxed(steps=5)),
        (sr.OSP(2, 9), sr.Relaxed(k_min=2, k_max=9, staleness=1)),
        (sr.LOSP(2, 9, compensation=0.5), sr.Relaxed(k_min=2, k_max=9, staleness=1, compensation=0.5)),
        (sr.CoCoD(steps=5), sr.Relaxed(steps=5, staleness=1, compensation=1.0)),
    ]
    for named, relaxed in pairs:
        for choice in ("trigger", "payload", "staleness", "compensation", "weighting"):
            assert getattr(named, choice) == getattr(relaxed, choice), f"{choice} of {named}"


def test_a_rule_is_a_value() -> None:
    assert sr.LOSP(k_max=3) == sr.LOSP(k_max=3)
    assert len({sr.BSP(), sr.BSP(), sr.BSP(2)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        sr.BSP().accumulate = 2  # type: ignore[misc]
    with pytest.raises(RuleError):
        dataclasses.replace(sr.OSP(), k_min=100)


# -- a rule of one's own ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Alternating(Trigger):
    """Windows of at most `steps`, shorter whenever the ring is free after an even number of steps."""

    steps: int

    def closes(self, moment: Moment) -> bool:
        return moment.steps >= self.steps or (moment.steps % 2 == 0 and moment.ring_free())


@dataclasses.dataclass(frozen=True)
class Evens(Rule):
    name: ClassVar[str] = "evens"
    steps: int = 5

    @property
    def trigger(self) -> Trigger:
        return Alternating(self.steps)

    @property
    def staleness(self) -> int:
        return 2

    @property
    def compensation(self) -> float:
        return 1.0


def test_a_rule_of_ones_own_is_found_by_its_entry_point_and_keeps_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "evens"

        def load(self) -> type[Rule]:
            return Evens

    class Impostor(Point):
        name = "bsp"

    def entry_points(group: str) -> Sequence[Point]:
        assert group == "slackring.rules"
        return [Point(), Impostor()]

    monkeypatch.setattr("slackring.rules.text.entry_points", entry_points)
    assert sr.parse_rule("evens:steps=3") == Evens(3)
    assert rules()["bsp"] is sr.BSP, "a built-in rule cannot be replaced"
    sr.testing.check_rule("evens", size=3)


def test_entry_points_of_other_groups_are_no_rules() -> None:
    assert importlib.metadata.entry_points(group="slackring.rules") == ()
    assert set(rules()) == {"bsp", "local_sgd", "osp", "losp", "cocod", "elastic_bsp", "anytime", "relaxed"}


@pytest.mark.parametrize("choice", ["payload", "weighting"])
def test_a_rule_of_ones_own_is_checked_when_it_is_made(choice: str) -> None:
    wrong = type("Wrong", (Evens,), {choice: "nonsense"})
    with pytest.raises(RuleError, match=f"{choice} is"):
        wrong()


# -- triggers --------------------------------------------------------------------------------------------------------------


def never_asked() -> bool:
    raise AssertionError("polls the network though the answer does not depend on it")


@given(counts, counts)
def test_every(limit: int, steps: int) -> None:
    assert Every(limit).closes(Moment(steps, never_asked)) == (steps >= limit)


@given(windows_of(), counts, st.booleans())
def test_when_free(bounds: tuple[int, int], steps: int, free: bool) -> None:
    k_min, k_max = bounds
    trigger = WhenFree(k_min, k_max)
    if steps < k_min:
        assert not trigger.closes(Moment(steps, never_asked))
    elif steps >= k_max:
        assert trigger.closes(Moment(steps, never_asked))
    else:
        assert trigger.closes(Moment(steps, lambda: free)) == free


# -- weights ---------------------------------------------------------------------------------------------------------------


@given(
    weightings,
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50), st.floats(-10, 10)), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_averages_of_deltas(weighting: str, windows: list[tuple[int, int, float]], idle: int) -> None:
    """Against the formulas, written down plainly: K steps, b samples a step, m training ranks."""
    sent = [(k, b * k, delta) for k, b, delta in windows if k]
    training = len(windows) + idle
    totals = Totals(sum(k for k, _, _ in sent), sum(s for _, s, _ in sent), len(sent), training)
    total = sum(delta_factor(weighting, k, s) * delta for k, s, delta in sent)  # type: ignore[arg-type]
    found = total / delta_divisor(weighting, totals)  # type: ignore[arg-type]
    if not sent:
        assert found == 0
        return
    mean_steps = sum(k for k, _, _ in sent) / len(sent)
    mean_samples = sum(s for _, s, _ in sent) / sum(k for k, _, _ in sent)
    expected = {
        "steps": sum(delta for *_, delta in sent) / training,
        "ranks": mean_steps / training * sum(delta / k for k, _, delta in sent),
        "samples": sum(s / k * delta for k, s, delta in sent) / (training * mean_samples),
        "sum": sum(delta for *_, delta in sent),
    }[weighting]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.sampled_from(["steps", "ranks", "samples"]), counts, counts, st.floats(-10, 10), counts)
def test_equal_windows_weigh_alike_in_every_average(weighting: str, k: int, b: int, delta: float, ranks: int) -> None:
    totals = Totals(k * ranks, b * k * ranks, ranks, ranks)
    total = ranks * delta_factor(weighting, k, b * k) * delta  # type: ignore[arg-type]
    assert total / delta_divisor(weighting, totals) == pytest.approx(delta)  # type: ignore[arg-type]


@pytest.mark.parametrize("weighting", ["steps", "ranks", "samples", "sum"])
def test_a_round_in_which_nobody_has_anything_divides_by_one(weighting: str) -> None:
    empty = Totals(steps=0, samples=0, contributors=0, training=0)
    assert delta_divisor(weighting, empty) == 1  # type: ignore[arg-type]
    overflowed = Totals(steps=3, samples=0, contributors=3, training=3)
    assert delta_divisor(weighting, overflowed) > 0  # type: ignore[arg-type]
