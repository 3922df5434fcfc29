"""The watch names real stragglers in time, and nobody among equals."""

from __future__ import annotations

import logging
import math
import time

import numpy as np
import pytest

from slackring.errors import StragglerError
from slackring.optim.progress import LandedRound
from slackring.stragglers import Bernoulli, Cedar, Mixture, Niagara, StragglerWatch, Straggling

ROUNDS, RANKS = 10_000, 32


def quiet(rng, shape):
    return 0.1 * (1 + 0.02 * rng.standard_normal(shape))


def exponential(rng, shape):
    return rng.exponential(0.1, shape)


def lognormal(rng, shape):
    return 0.1 * rng.lognormal(0, 1, shape)


def drawn(model: Mixture):
    """The model's steps, drawn all at once."""

    def draw(rng, shape):
        component = rng.choice(len(model.weights), shape, p=np.array(model.weights) / sum(model.weights))
        means, stds = np.array(model.means)[component], np.array(model.stds)[component]
        return 0.3 + np.abs(means + stds * rng.standard_normal(shape))

    return draw


def bernoulli(rng, shape):
    model = Bernoulli(probability=0.2, factor=60)
    return np.where(rng.random(shape) < model.probability, model.factor, 1.0)


def bursty(rng, shape):
    """Pauses of 1 to 20 rounds, six times as slow, about 200 rounds apart, on quiet ranks."""
    seconds = quiet(rng, shape)
    for rank in range(shape[1]):
        start = 0
        while (start := start + 20 + int(rng.exponential(180))) < shape[0]:
            length = int(rng.integers(1, 21))
            seconds[start : start + length, rank] *= 6
            start += length
    return seconds


def tied(rng, shape):
    return np.full(shape, 0.1)


NOISES = {
    "quiet": quiet,
    "exponential": exponential,
    "lognormal": lognormal,
    "niagara": drawn(Niagara()),
    "cedar": drawn(Cedar()),
    "bernoulli": bernoulli,
    "bursty": bursty,
    "tied": tied,
}


def warnings_of(seconds, **options) -> list[tuple[int, Straggling]]:
    """What a watch says of rounds, and after how many of them."""
    watch = StragglerWatch(say=lambda text: None, **options)
    return [(number, found) for number, row in enumerate(seconds, 1) for found in watch.take(row)]


@pytest.mark.parametrize("ranks", [1, 2, 3, RANKS])
@pytest.mark.parametrize("noise", NOISES)
def test_equal_ranks_are_left_alone(noise, ranks):
    assert warnings_of(NOISES[noise](np.random.default_rng(5), (ROUNDS, ranks))) == []


@pytest.mark.parametrize("ranks", [2, 4, RANKS])
@pytest.mark.parametrize(
    ("noise", "factor", "within"),
    [("quiet", 1.6, 40), ("bursty", 1.6, 60), ("lognormal", 2, 960), ("exponential", 2, 960), ("cedar", 2, 240)],
)
def test_a_persistent_straggler_is_named_once_and_in_time(noise, factor, within, ranks):
    for seed in range(3):
        seconds = NOISES[noise](np.random.default_rng(seed), (1500, ranks))
        seconds[:, 1] *= factor
        (number, found), *more = warnings_of(seconds)
        assert found.rank == 1 and found.best != 1 and number <= within and not more
        if noise == "quiet":
            assert number == 30 and found.factor == pytest.approx(factor, rel=0.05) and found.past is None


def test_all_that_straggle_are_named_if_they_are_no_more_than_half():
    seconds = quiet(np.random.default_rng(1), (100, 6))
    seconds[:, [1, 3, 4]] *= 4
    assert {found.rank for _, found in warnings_of(seconds)} == {1, 3, 4}


@pytest.mark.parametrize("start", [20, 300, 6000])
def test_a_rank_that_becomes_slow_is_held_against_its_own_past(start):
    seconds = quiet(np.random.default_rng(2), (start + 60, 4))
    seconds[start:, 3] *= 4
    ((number, found),) = warnings_of(seconds)
    assert start + 30 <= number <= start + 40
    assert str(found) == (
        f"rank 3 takes {found.seconds:.3g} s a local step, over the last 30 rounds: {found.factor:.1f} times the best rank "
        f"(rank {found.best}), {found.past:.1f} times its own past."
    )
    assert found.factor == pytest.approx(4, rel=0.05) and found.past == pytest.approx(4, rel=0.05)
    assert found.seconds == pytest.approx(0.4, rel=0.05)


def test_a_rank_that_always_was_slow_is_1_times_its_own_past_when_it_gets_a_peer_to_be_compared_with():
    seconds = quiet(np.random.default_rng(2), (200, 3))
    seconds[:, 2] *= 2
    seconds[:100, 0:2] *= 2  # all are equally slow at first
    ((number, found),) = warnings_of(seconds)
    assert number > 100 and found.rank == 2 and found.past == pytest.approx(1, rel=0.05)


def test_it_speaks_again_of_a_rank_that_gets_much_slower_or_relapses_but_not_of_a_little():
    rng = np.random.default_rng(3)
    factors = [(500, 2.0), (500, 2.6), (500, 5.0), (500, 1.0), (500, 3.0), (500, 1.0)]
    seconds = quiet(rng, (3000, 4))
    seconds[:, 2] *= np.concatenate([np.full(rounds, factor) for rounds, factor in factors])
    assert [(number, round(found.factor)) for number, found in warnings_of(seconds)] == [(30, 2), (1040, 5), (2030, 3)]


def test_no_flood_where_the_factor_comes_and_goes():
    seconds = exponential(np.random.default_rng(4), (ROUNDS, 8))
    seconds[:, 5] *= 2
    assert len(warnings_of(seconds)) == 1


def test_rounds_in_which_a_rank_only_helps_or_took_no_step_do_not_count(caplog):
    watch = StragglerWatch()
    rng = np.random.default_rng(6)

    def land(rounds, helping, steps):
        for index in range(rounds):
            seconds = quiet(rng, 3)
            seconds[1] = 0.9 if steps[1] else 0.0
            watch(LandedRound(index, steps, (1.0,) * 3, helping, tuple(seconds.tolist())))

    land(100, (False, True, False), (1, 1, 1))
    land(100, (False, False, False), (1, 0, 1))
    assert not caplog.records
    land(60, (False, False, False), (1, 1, 1))
    ((logger, level, text),) = caplog.record_tuples
    assert (logger, level) == ("slackring", logging.WARNING) and "rank 1 takes 0.9 s" in text


def test_other_ranks_begin_a_new_past():
    watch = StragglerWatch(say=lambda text: None)
    rng = np.random.default_rng(7)
    for row in quiet(rng, (25, 4)) * [1, 1, 1, 4]:
        assert watch.take(row) == []
    found = [found for row in quiet(rng, (40, 3)) * [1, 1, 4] for found in watch.take(row)]
    assert [(one.rank, one.past) for one in found] == [(2, None)]


def test_longer_spans_take_longer_and_bear_more_noise():
    seconds = exponential(np.random.default_rng(9), (4000, 4))
    seconds[:, 1] *= 1.6
    ((number, found),) = warnings_of(seconds, rounds=100)
    assert number >= 400 and found.rank == 1 and found.rounds >= 400


@pytest.mark.parametrize("row", [[math.nan] * 3, [0.0] * 3, [0.0, 0.0, 1.0], [math.nan, math.nan, 1.0], []])
def test_rounds_that_tell_nothing_say_nothing(row):
    assert warnings_of([row] * 100) == []


@pytest.mark.parametrize("options", [{"rounds": 29}, {"rounds": 0}, {"threshold": 1.0}, {"threshold": math.nan}])
def test_values_that_cannot_be_are_refused(options):
    with pytest.raises(StragglerError):
        StragglerWatch(**options)


def test_a_round_costs_microseconds():
    watch = StragglerWatch(say=lambda text: None)
    rows = list(exponential(np.random.default_rng(8), (3000, RANKS)))
    start = time.process_time()
    for row in rows:
        watch.take(row)
    assert (time.process_time() - start) / len(rows) < 200e-6  # about 15 where nothing else runs


def test_a_moment_of_short_steps_is_no_straggling_but_many_of_them_are():
    said = []
    watch = StragglerWatch(say=said.append)
    for _ in range(200):
        watch.take([0.001, 0.001, 0.004])  # 0.8 s of steps
    assert not said
    for _ in range(300):
        watch.take([0.001, 0.001, 0.004])
    assert len(said) == 1 and "rank 2" in said[0]
