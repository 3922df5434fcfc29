"""The papers' stragglers against what their sources say."""

from __future__ import annotations

import math
import pickle
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackring.errors import StragglerError
from slackring.stragglers import Bernoulli, Cedar, Mixture, Niagara, Pauses, SciNet, Straggler, parse

STEPS = 4000
value = st.floats(0, 100)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    components = st.tuples(value, value, st.floats(0.01, 10))
    means, stds, weights = zip(*draw(st.lists(components, min_size=1, max_size=4)), strict=True)
    return Mixture(
        means, stds, weights, draw(st.sampled_from(["seconds", "steps"])), draw(st.none() | st.integers(0, 9))
    )


@st.composite
def pauses(draw: st.DrawFn) -> Pauses:
    means, stds = zip(*draw(st.lists(st.tuples(value, value), min_size=1, max_size=5)), strict=True)
    return Pauses(means, stds, draw(st.sampled_from(["seconds", "steps"])), draw(st.none() | st.integers(0, 9)))


models = st.one_of(
    mixtures(),
    pauses(),
    st.builds(Bernoulli, probability=st.floats(0, 1), factor=st.floats(0.01, 100)),
    st.sampled_from([Niagara(), Cedar(), SciNet(), Niagara(seed=3)]),
)


@given(models)
def test_text_and_pickle_round_trip(model: Straggler) -> None:
    assert parse(str(model)) == model
    assert pickle.loads(pickle.dumps(model)) == model


@given(models, st.integers(0, 2**64), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**6)), max_size=8))
def test_a_step_depends_on_seed_rank_and_step_alone(model: Straggler, seed: int, steps: list[tuple[int, int]]) -> None:
    before = [model.seeded(seed).step_seconds(rank, step, 0.1) for rank, step in steps]
    backwards = [parse(str(model), seed).step_seconds(rank, step, 0.1) for rank, step in reversed(steps)]
    assert before == backwards[::-1]


@pytest.mark.parametrize("text", ["niagara", "cedar", "scinet"])
def test_draws_differ_by_seed_rank_and_step(text: str) -> None:
    model = parse(text)
    values = {
        model.seeded(seed).step_seconds(rank, step, 1.0) for seed in range(5) for rank in (0, 5) for step in range(20)
    }
    # The mixtures have no sleep at all in four steps of ten.
    assert len(values) == 200 if text == "scinet" else 100 < len(values) < 150


def delays(model: Straggler, rank: int = 0) -> list[float]:
    return [model.step_seconds(rank, step, 1.0) - 1.0 for step in range(STEPS)]


@pytest.mark.parametrize(
    ("model", "components", "weights", "cap"),
    [
        (Niagara(seed=0), [(0, 0), (0, 0.4), (2, 0.3), (5, 0.3)], [0.4, 0.3, 0.2, 0.1], 6.5),
        (Cedar(seed=0), [(0, 0), (0.05, 0.04), (0.15, 0.03), (0.25, 0.03)], [0.4, 0.3, 0.2, 0.1], 0.4),
    ],
)
def test_the_authors_mixtures(
    model: Mixture, components: list[tuple[float, float]], weights: list[float], cap: float
) -> None:
    assert (list(zip(model.means, model.stds, strict=True)), list(model.weights)) == (components, weights)
    sample = delays(model)
    assert sum(delay == 0 for delay in sample) / STEPS == pytest.approx(0.4, abs=4 * math.sqrt(0.24 / STEPS))
    largest, _ = components[-1]
    above = sum(delay > largest for delay in sample) / STEPS  # half of the last component, and nearly nothing else
    assert above == pytest.approx(0.05, abs=4 * math.sqrt(0.05 / STEPS))
    # E|N(m, s)| = s sqrt(2 / pi) exp(-m^2 / 2 s^2) + m erf(m / s sqrt(2))
    mean = sum(
        weight * (s * math.sqrt(2 / math.pi) * math.exp(-(m**2) / (2 * s**2)) + m * math.erf(m / (s * math.sqrt(2))))
        for (m, s), weight in zip(components[1:], weights[1:], strict=True)
    )
    assert statistics.fmean(sample) == pytest.approx(mean, abs=4 * statistics.stdev(sample) / math.sqrt(STEPS))
    assert 0 <= min(sample) <= max(sample) <= cap


@pytest.mark.parametrize(("normal", "delay"), [(1.0, 5.3), (5.5, 6.5), (-9.0, 2.3), (-20.0, 1.0), (-50.0, 6.5)])
def test_a_mixture_folds_at_zero_and_cuts_at_five_deviations(
    normal: float, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last component of niagara, N(5, 0.3): |5 - 20 * 0.3| = 1, and no sleep is longer than 5 + 5 * 0.3."""
    fixed: Any = SimpleNamespace(random=lambda: 0.999, standard_normal=lambda: normal)
    monkeypatch.setattr(Niagara, "_generator", lambda *_: fixed)
    assert Niagara().step_seconds(0, 0, 1.0) == pytest.approx(1 + delay)


def test_weights_are_relative() -> None:
    one, two = Mixture((0, 3), (0, 0), (1, 3), seed=0), Mixture((0, 3), (0, 0), (0.25, 0.75), seed=0)
    assert delays(one) == delays(two)
    assert statistics.fmean(delays(one)) == pytest.approx(2.25, abs=4 * 1.3 / math.sqrt(STEPS))


def test_pause_groups_have_their_mean_and_spread_and_never_shorten_a_step() -> None:
    model = SciNet(seed=0)
    for group, (mean, std) in enumerate(zip((5, 10, 20, 35, 55), (1, 2, 3, 4, 5), strict=True)):
        sample = [1e3 * delay for delay in delays(model, rank=group + 5)]
        assert statistics.fmean(sample) == pytest.approx(mean, abs=4 * std / math.sqrt(STEPS))
        assert statistics.stdev(sample) == pytest.approx(std, rel=0.1)
        assert min(sample) >= 0
    around_zero = delays(Pauses((0.0,), (1.0,), seed=0))
    assert sum(delay == 0 for delay in around_zero) / STEPS == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(STEPS))


def test_bernoulli_work() -> None:
    """A worker that has a fixed time for 60 samples finishes all of them with probability 0.8, else one."""
    model = parse("bernoulli:probability=0.2,factor=60", seed=0)
    batches = [round(60 * 0.5 / model.step_seconds(0, step, 0.5)) for step in range(STEPS)]
    assert set(batches) == {1, 60}
    assert batches.count(60) / STEPS == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / STEPS))


def test_delays_are_in_seconds_or_in_steps() -> None:
    for text in ("mixture:means=0.5,stds=0,weights=1", "pauses:means=0.5,stds=0"):
        assert parse(text).step_seconds(0, 0, 0.25) == 0.75
        assert parse(f"{text},unit=steps").step_seconds(0, 0, 0.25) == 0.375


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixture:means=1,stds=0", "needs weights="),
        ("mixture:means=1+2,stds=0,weights=1", r"means=1.0\+2.0, stds=0.0 and weights=1.0 differ in length"),
        ("mixture:means=1,stds=-1,weights=1", "stds=-1.0 must be a finite number of at least 0"),
        ("mixture:means=1,stds=1,weights=0", "weights=0.0 must be a finite number above 0"),
        ("niagara:seed=-1", "seed=-1 must be at least 0"),
        ("pauses:means=1+2,stds=0", r"means=1.0\+2.0 and stds=0.0 differ in length"),
        ("pauses:means=nan,stds=0", "means=nan must be"),
        ("scinet:unit=hours", "unit='hours' is not 'seconds' or 'steps'"),
        ("bernoulli:probability=2,factor=2", "probability=2.0 must be from 0 to 1"),
        ("bernoulli:probability=0.5,factor=0", "factor=0.0 must be a finite number above 0"),
    ],
)
def test_refuses_impossible_values(text: str, message: str) -> None:
    with pytest.raises(StragglerError, match=message):
        parse(text)


def test_refuses_impossible_values_given_in_python() -> None:
    with pytest.raises(StragglerError, match="differ in length"):
        Mixture((), (), ())
    with pytest.raises(StragglerError, match="differ in length"):
        Pauses((), ())
