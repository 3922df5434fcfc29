"""Each sample is dealt once, and ranks finish together, whatever they do; checked on the pure dealer."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackring.data import Dealer, Remainder, Windows
from slackring.errors import DataError


def places(dealer: Dealer) -> list[list[int]]:
    """Samples dealt so far, by rank."""
    return [
        [sample for batch in range(len(batches)) for sample in dealer.samples(rank, batch)]
        for rank, batches in enumerate(dealer.batches)
    ]


class Ranks:
    """Ranks that take local steps on what they have been dealt; rounds land `staleness` rounds after their launch."""

    def __init__(self, dealer: Dealer, windows: Windows, prefetch: list[int]) -> None:
        self.dealer, self.windows, self.prefetch = dealer, windows, prefetch
        self.size = len(dealer.batches)
        self.taken = [0] * self.size
        self.in_flight: list[tuple[int, ...]] = []
        self.landed: list[tuple[int, ...]] = []
        self.trained: list[int] = []

    def can(self, rank: int) -> int:
        """Steps that a rank can take before it hears of another round; its loader must be able to take batches ahead."""
        ready = len(self.dealer.batches[rank]) - self.taken[rank]
        return ready if self.dealer.closed(rank) else max(ready - self.prefetch[rank], 0)

    def round(self, wishes: list[int]) -> None:
        steps = []
        for rank, wish in enumerate(wishes):
            number = min(wish, self.can(rank), self.windows.most or wish)
            for batch in range(self.taken[rank], self.taken[rank] + number):
                self.trained += self.dealer.samples(rank, batch)
            self.taken[rank] += number
            steps.append(number)
        self.in_flight.append(tuple(steps))
        if len(self.in_flight) > self.windows.staleness:
            self.landed.append(self.in_flight.pop(0))
            self.dealer.land(self.landed[-1])


@st.composite
def clusters(draw: st.DrawFn, size: int | None = None) -> tuple[list[int], Windows, list[int]]:
    size = draw(st.integers(1, 5)) if size is None else size
    least = draw(st.integers(1, 5))
    most = draw(st.sampled_from([least, least + 7, None]))
    windows = Windows(draw(st.integers(0, 3)), least, most)
    batch_sizes = draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    return batch_sizes, windows, draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))


@settings(max_examples=300)
@given(clusters(), st.integers(1, 300), st.integers(0, 2**32), st.data())
def test_each_sample_once_whatever_ranks_do(
    cluster: tuple[list[int], Windows, list[int]], length: int, seed: int, data: st.DataObject
) -> None:
    """Speeds that change every round, ranks that stand still, any batch sizes, prefetch and staleness."""
    batch_sizes, windows, prefetch = cluster
    ranks = Ranks(Dealer(Remainder(length, seed), batch_sizes, windows, prefetch), windows, prefetch)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bounds = [p + windows.ahead(max(7, windows.least)) for p in prefetch]
    stuck = 0
    while not ranks.dealer.consumed:
        before = len(ranks.trained)
        ranks.round([int(draw.integers(0, 8)) for _ in batch_sizes])
        # What a rank holds, and so what may be left to a rank that has become slow, is bounded.
        assert all(ranks.dealer.held(rank) <= bound for rank, bound in enumerate(bounds))
        stuck = 0 if len(ranks.trained) > before else stuck + 1
        assert stuck < 40, "ranks that are willing to go on get nothing"
    assert Counter(ranks.trained) == Counter(range(length))
    assert ranks.dealer.remainder() == Remainder(length, seed, epoch=1, history=ranks.dealer.remainder().history)
    sizes = [stop - start for rank, batches in enumerate(ranks.dealer.batches) for start, stop in batches]
    full = [size for rank, batches in enumerate(ranks.dealer.batches) for size in [batch_sizes[rank]] * len(batches)]
    assert sum(mine != whole for mine, whole in zip(sizes, full, strict=True)) <= 1  # only the last one is smaller


@settings(max_examples=200)
@given(clusters(), clusters(), st.integers(1, 200), st.data())
def test_each_sample_once_over_a_change_of_world_size(
    before: tuple[list[int], Windows, list[int]],
    after: tuple[list[int], Windows, list[int]],
    length: int,
    data: st.DataObject,
) -> None:
    """The state is taken anywhere; what is in flight then is left, and what is in landed rounds is not."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    batch_sizes, windows, prefetch = before
    dealer = Dealer(Remainder(length), batch_sizes, windows, prefetch)
    ranks = Ranks(dealer, windows, prefetch)
    for _ in range(data.draw(st.integers(0, 12))):
        ranks.round([int(draw.integers(0, 8)) for _ in batch_sizes])
    landed = [
        sample
        for rank, batches in enumerate(dealer.batches)
        for batch in range(len(batches) - dealer.held(rank))
        for sample in dealer.samples(rank, batch)
    ]
    state = json.loads(json.dumps(dealer.state_dict()))
    rest = Dealer.from_state_dict(state, windows).remainder()
    assert rest == dealer.remainder()
    assert Remainder.from_state_dict(json.loads(json.dumps(rest.state_dict()))) == rest
    if rest.epoch:
        assert sorted(landed) == list(range(length))
        return
    assert rest.samples == length - len(landed)
    batch_sizes, windows, prefetch = after
    ranks = Ranks(Dealer(rest, batch_sizes, windows, prefetch), windows, prefetch)
    while not ranks.dealer.consumed:
        ranks.round([int(draw.integers(1, 8)) for _ in batch_sizes])
    assert sorted(landed + ranks.trained) == list(range(length))


@settings(max_examples=100)
@given(clusters(), st.integers(1, 200), st.integers(0, 10), st.integers(0, 2**32))
def test_the_same_ranks_go_on_exactly(
    cluster: tuple[list[int], Windows, list[int]], length: int, rounds: int, seed: int
) -> None:
    """A dealer made from a state deals the same, to the batch, when it hears of the same rounds."""
    batch_sizes, windows, prefetch = cluster
    draw = np.random.default_rng(seed)
    ranks = Ranks(Dealer(Remainder(length), batch_sizes, windows, prefetch), windows, prefetch)
    for _ in range(rounds):
        ranks.round([int(draw.integers(0, 8)) for _ in batch_sizes])
    dealer, heard = ranks.dealer, len(ranks.landed)
    first = [len(batches) - dealer.held(rank) for rank, batches in enumerate(dealer.batches)]
    again = Dealer.from_state_dict(dealer.state_dict(), windows, prefetch)
    for _ in range(20):
        ranks.round([int(draw.integers(0, 8)) for _ in batch_sizes])
    for steps in ranks.landed[heard:]:
        again.land(steps)
    assert again.batches == [batches[start:] for batches, start in zip(dealer.batches, first, strict=True)]
    assert again.remainder() == dealer.remainder()


def test_a_rank_twice_as_slow_gets_half() -> None:
    windows = Windows(staleness=1, least=1, most=64)
    ranks = Ranks(Dealer(Remainder(6000), [2, 2, 2], windows), windows, [0, 0, 0])
    while not ranks.dealer.consumed:
        ranks.round([4, 4, 2])
    shares = [len(samples) for samples in places(ranks.dealer)]
    assert shares == pytest.approx([2400, 2400, 1200], abs=20)


def finishing_gap(speeds: list[int], batch_sizes: list[int], prefetch: list[int], windows: Windows) -> int:
    """Rounds between the first and the last rank to finish an epoch, with as many steps a round as `speeds` says."""
    length = 60 * sum(speed * batch for speed, batch in zip(speeds, batch_sizes, strict=True))
    ranks = Ranks(Dealer(Remainder(length), batch_sizes, windows, prefetch), windows, prefetch)
    finished: dict[int, int] = {}
    number = 0
    while len(finished) < len(speeds):
        ranks.round(speeds)
        number += 1
        for rank in range(len(speeds)):
            if ranks.dealer.closed(rank) and ranks.taken[rank] == len(ranks.dealer.batches[rank]):
                finished.setdefault(rank, number)
    return max(finished.values()) - min(finished.values())


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.data())
def test_ranks_of_any_steady_speed_finish_together(speeds: list[int], data: st.DataObject) -> None:
    """However stale rounds are and far loaders run ahead: each rank may hold a batch more than its share, and the rank with
    the least to do works off so much less."""
    batch_sizes, _, prefetch = data.draw(clusters(len(speeds)))
    windows = Windows(data.draw(st.integers(0, 3)), 1, data.draw(st.sampled_from([20, 64, None])))
    least = min(speed * batch for speed, batch in zip(speeds, batch_sizes, strict=True))
    assert finishing_gap(speeds, batch_sizes, prefetch, windows) <= 1 + math.ceil(sum(batch_sizes) / least)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("speeds", [[20, 20, 1], [10, 1, 1], [3, 20, 1, 2]])
def test_a_slow_rank_whose_loader_runs_far_ahead_is_closed_in_time(speeds: list[int], staleness: int) -> None:
    """It holds eight batches at least, which would keep it busy for eight rounds after the others."""
    size = len(speeds)
    assert finishing_gap(speeds, [4] * size, [8] * size, Windows(staleness, 1, 64)) <= 1


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_no_rank_waits_for_samples_when_windows_are_fixed(steps: int, prefetch: int) -> None:
    """Each window is whole until the epoch ends, and with equal batches no rank takes more than one step more."""
    windows = Windows(staleness=1, least=steps, most=steps)
    ranks = Ranks(Dealer(Remainder(1000), [8] * 3, windows, [prefetch] * 3), windows, [prefetch] * 3)
    while not any(ranks.dealer.closed(rank) for rank in range(3)):
        assert [ranks.can(rank) >= steps for rank in range(3)] == [True] * 3
        ranks.round([steps] * 3)
    while not ranks.dealer.consumed:
        ranks.round([steps] * 3)
    assert sorted(len(batches) for batches in ranks.dealer.batches) == [41, 42, 42]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    """Written down, so that a later version of the libraries or of this package cannot change a resumed epoch."""
    assert Remainder(8).order.tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    orders = [tuple(Remainder(50, seed, epoch).order) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


@pytest.mark.parametrize(
    "damage",
    [
        {"left": [3, 3]},
        {"left": [9]},
        {"next": 99},
        {"seed": -1},
        {"length": 0},
        {"epoch": None},
        {"history": 3},
        {"held": [[[0, 2]], [[1, 3]]]},
        {"held": [[[0, 99]], []]},
        {"dealt": 1},
        {"closed": []},
        {"batch_sizes": [0, 2]},
        {"held": "none"},
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, object]) -> None:
    state = Dealer(Remainder(20, next=8, left=(1, 5)), [2, 2], Windows()).state_dict()
    Dealer.from_state_dict(state, Windows())
    with pytest.raises(DataError, match="state of a RoundSampler"):
        Dealer.from_state_dict({**state, **damage}, Windows())
