"""Models of stragglers against what their formulas say."""

from __future__ import annotations

import math
import pickle
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackring.errors import DataError, StragglerError
from slackring.stragglers import (
    MODELS,
    Constant,
    NoStraggler,
    Persistent,
    ShiftedExponential,
    Straggler,
    Trace,
    no_wait_limit,
    parse,
)

positive = st.floats(min_value=1e-6, max_value=1e6)
some_ranks = st.lists(st.integers(0, 40), unique=True, max_size=5).map(tuple)


@st.composite
def persistent(draw: st.DrawFn) -> Persistent:
    ranks = draw(some_ranks.filter(len))
    return Persistent(ranks, draw(positive | st.tuples(*[positive] * len(ranks))))


exponentials = st.builds(
    ShiftedExponential,
    mean=positive,
    shift=st.none() | st.just(0.0) | positive,
    cap=st.none() | positive,
    unit=st.sampled_from(["steps", "seconds"]),
    ranks=some_ranks,
    seed=st.none() | st.integers(0, 2**70),
)
models = st.one_of(
    st.builds(NoStraggler),
    st.builds(Constant, seconds=st.just(0.0) | positive, ranks=some_ranks),
    persistent(),
    exponentials,
)


@given(models)
def test_text_and_pickle_round_trip(model: Straggler) -> None:
    assert parse(str(model)) == model
    assert pickle.loads(pickle.dumps(model)) == model


@given(models, st.integers(0, 2**64), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**6)), max_size=8))
def test_a_step_does_not_depend_on_the_steps_asked_for_before(
    model: Straggler, seed: int, steps: list[tuple[int, int]]
) -> None:
    before = [model.seeded(seed).step_seconds(rank, step, 0.1) for rank, step in steps]
    backwards = [parse(str(model), seed).step_seconds(rank, step, 0.1) for rank, step in reversed(steps)]
    assert before == backwards[::-1]


def test_registry_names_every_model() -> None:
    general = ["none", "constant", "persistent", "shifted_exponential", "trace"]
    assert list(MODELS) == [*general, "mixture", "niagara", "cedar", "pauses", "scinet", "bernoulli"]
    with pytest.raises(StragglerError, match=r"did you mean 'persistent'\? Known: bernoulli, cedar, constant, "):
        parse("persistant:ranks=3,factor=4")


def test_none_constant_and_persistent_follow_their_formulas() -> None:
    assert parse("none").step_seconds(3, 5, 0.25) == 0.25
    assert [parse("constant:seconds=0.5").step_seconds(rank, 9, 0.25) for rank in range(3)] == [0.75, 0.75, 0.75]
    assert [parse("constant:seconds=0.5,ranks=0+2").step_seconds(rank, 9, 0.25) for rank in range(3)] == [
        0.75,
        0.25,
        0.75,
    ]
    assert [parse("persistent:ranks=2+0,factor=4").step_seconds(rank, 9, 0.25) for rank in range(3)] == [1.0, 0.25, 1.0]
    assert [parse("persistent:ranks=2+0,factor=4+0.5").step_seconds(rank, 9, 0.25) for rank in range(3)] == [
        0.125,
        0.25,
        1.0,
    ]


def test_equal_meanings_are_equal_models() -> None:
    assert Persistent((3,), (4.0,)) == Persistent((3,), 4)
    assert Persistent([3], [4.0]) == Persistent((3,), 4.0)  # type: ignore[arg-type]  # lists, as a notebook's parameters have them
    assert hash(Constant(1.0, [3])) == hash(Constant(1.0, (3,)))  # type: ignore[arg-type]


def draws(model: Straggler, step_time: float, count: int = 4000) -> list[float]:
    return [model.step_seconds(index % 4, index // 4, step_time) for index in range(count)]


@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize(
    ("text", "step_time", "shift", "mean"),
    [
        ("shifted_exponential:mean=0.5", 0.2, 0.2, 0.1),
        ("shifted_exponential:mean=0.5,shift=0", 0.2, 0.0, 0.1),
        ("shifted_exponential:mean=0.5,shift=2", 0.2, 0.4, 0.1),
        ("shifted_exponential:mean=0.5,unit=seconds", 0.2, 0.2, 0.5),
        ("shifted_exponential:mean=0.5,shift=2,unit=seconds", 0.2, 2.0, 0.5),
    ],
)
def test_shifted_exponential_has_its_mean_median_spread_and_shift(
    text: str, step_time: float, shift: float, mean: float, seed: int
) -> None:
    sample = draws(parse(text, seed), step_time)
    error = mean / math.sqrt(len(sample))  # standard error of the mean, and of the median, of an exponential
    assert statistics.fmean(sample) == pytest.approx(shift + mean, abs=4 * error)
    assert statistics.median(sample) == pytest.approx(shift + mean * math.log(2), abs=4 * error)
    assert statistics.stdev(sample) == pytest.approx(mean, rel=0.1)
    assert shift <= min(sample) < shift + 20 * mean / len(sample)


def test_shifted_exponential_draws_differ_by_seed_rank_and_step() -> None:
    model = parse("shifted_exponential:mean=1")
    values = {
        model.seeded(seed).step_seconds(rank, step, 1.0)
        for seed in (0, 1, 2**32)
        for rank in range(3)
        for step in range(3)
    }
    assert len(values) == 27
    sample = draws(model, 1.0)
    neighbours = statistics.correlation(sample[:-1], sample[1:])
    assert abs(neighbours) < 4 / math.sqrt(len(sample))


def test_cap_cuts_the_exponential_part_and_nothing_else() -> None:
    free, capped = parse("shifted_exponential:mean=1"), parse("shifted_exponential:mean=1,cap=0.7")
    assert draws(capped, 0.5) == [min(value, 0.5 + 0.7 * 0.5) for value in draws(free, 0.5)]


def test_only_the_named_ranks_draw() -> None:
    model = parse("shifted_exponential:mean=1,ranks=1")
    assert model.step_seconds(0, 0, 0.5) == model.step_seconds(2, 0, 0.5) == 0.5
    assert model.step_seconds(1, 0, 0.5) == parse("shifted_exponential:mean=1").step_seconds(1, 0, 0.5) > 0.5


def test_seeded_keeps_a_seed_of_its_own() -> None:
    own = parse("shifted_exponential:mean=1,seed=5", seed=6)
    assert own == ShiftedExponential(1.0, seed=5) == own.seeded(7)
    assert parse("shifted_exponential:mean=1", seed=6) == ShiftedExponential(1.0, seed=6)
    assert ShiftedExponential(1.0).step_seconds(1, 2, 0.1) == ShiftedExponential(1.0, seed=0).step_seconds(1, 2, 0.1)
    assert parse("constant:seconds=1", seed=6) == Constant(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("constant", "needs seconds="),
        ("constant:seconds=-1", r"seconds=-1.0 must be a finite number of at least 0"),
        ("constant:seconds=nan", "seconds=nan must be"),
        ("constant:seconds=1,ranks=-1", "ranks=-1 has a negative rank"),
        ("constant:seconds=1,ranks=1+1", r"ranks=1\+1 names a rank twice"),
        ("persistent:factor=2", "needs ranks="),
        ("persistent:ranks=1,factor=0", "factor=0.0 must be a finite number above 0"),
        ("persistent:ranks=1+2,factor=3+inf", "factor=inf must be"),
        ("persistent:ranks=1+2,factor=3+4+5", r"ranks=1\+2 and factor=3.0\+4.0\+5.0 differ in length"),
        ("persistent:ranks=1,factor=3+4", r"ranks=1 and factor=3.0\+4.0 differ in length"),
        ("persistent:ranks=x,factor=3", "ranks='x' is not a whole number"),
        ("shifted_exponential:mean=0", "mean=0.0 must be a finite number above 0"),
        ("shifted_exponential:mean=1,shift=-1", "shift=-1.0 must be a finite number of at least 0"),
        ("shifted_exponential:mean=1,cap=0", "cap=0.0 must be a finite number above 0"),
        ("shifted_exponential:mean=1,unit=hours", "unit='hours' is not 'steps' or 'seconds'"),
        ("shifted_exponential:mean=1,seed=-1", "seed=-1 must be at least 0"),
        ("shifted_exponential:mean=1,ranks=-1", "ranks=-1 has a negative rank"),
        ("none:factor=2", "has no option 'factor'; it takes none"),
    ],
)
def test_refuses_impossible_values(text: str, message: str) -> None:
    with pytest.raises(StragglerError, match=message) as caught:
        parse(text)
    assert repr(text.partition(":")[0]) in str(caught.value)


def test_refuses_impossible_values_given_in_python() -> None:
    with pytest.raises(StragglerError, match="at least one rank"):
        Persistent((), 2.0)
    with pytest.raises(StragglerError, match="unit='hours' must be"):
        ShiftedExponential(1.0, unit="hours")  # type: ignore[arg-type]
    with pytest.raises(StragglerError, match="seed=-3"):
        ShiftedExponential(1.0).seeded(-3)


@given(models, st.integers(1, 50))
def test_check_finds_ranks_that_do_not_exist(model: Straggler, size: int) -> None:
    ranks = getattr(model, "ranks", ())
    if all(rank < size for rank in ranks):
        model.check(size)
    else:
        with pytest.raises(StragglerError, match=rf"names rank \d+, but the last rank is {size - 1}"):
            model.check(size)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("rank,step,seconds\n0,0,1.0\n0,1,2.0\n1,0,4.0\n0,2,8.0\n1,1,4.0\n")
    return file


def test_trace_replays_exactly_and_wraps_around(trace: Path) -> None:
    model = parse(f"trace:file={trace}")  # its median is 4, so a step time of 0.5 is an eighth of a recorded second
    assert [model.step_seconds(0, step, 0.5) for step in range(5)] == [0.125, 0.25, 1.0, 0.125, 0.25]
    assert [model.step_seconds(1, step, 0.5) for step in range(3)] == [0.5, 0.5, 0.5]
    for rank, step in [(0, 1), (1, 1)]:
        assert model.step_seconds(rank + 2, step, 0.5) == model.step_seconds(rank, step, 0.5)
    model.check(1000)


def test_trace_is_its_file(trace: Path) -> None:
    model = Trace(trace)  # type: ignore[arg-type]  # a Path does as well
    assert str(model) == f"trace:file={trace}"
    assert parse(str(model), seed=3) == model == replace(model)
    restored = pickle.loads(pickle.dumps(model))
    trace.unlink()
    assert restored.step_seconds(0, 2, 1.0) == 2.0


def test_trace_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no trace file '.*gone.csv'"):
        parse(f"trace:file={tmp_path / 'gone.csv'}")
    with pytest.raises(StragglerError, match=r"'a,b\.csv' contains a comma"):
        Trace("a,b.csv")


def test_no_wait_limit_of_fixed_speeds() -> None:
    speeds = parse("persistent:ranks=2+3,factor=1.3+4")
    limit = no_wait_limit(speeds, step_time=0.1, size=4, steps=3)
    assert limit == pytest.approx(10 + 10 + 10 / 1.3 + 2.5)
    blocking = 4 / 0.4  # all four wait for the slowest
    assert blocking / limit == pytest.approx(0.331, abs=5e-4)


def test_no_wait_limit_takes_medians(trace: Path) -> None:
    # steps of rank 0: 0.125, 0.25, 1.0 and of rank 1: 0.5
    assert no_wait_limit(Trace(str(trace)), step_time=0.5, size=2, steps=3) == 1 / 0.25 + 1 / 0.5


def test_no_wait_limit_refuses_bad_arguments() -> None:
    for step_time, size, steps in [(0.0, 1, 1), (math.nan, 1, 1), (0.1, 0, 1), (0.1, 1, 0)]:
        with pytest.raises(StragglerError, match="the no-wait limit needs"):
            no_wait_limit(NoStraggler(), step_time, size, steps)
    with pytest.raises(StragglerError, match="names rank 4"):
        no_wait_limit(Constant(1.0, (4,)), 0.1, 4, 10)
