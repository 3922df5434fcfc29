"""Virtual ranks: their clock, their network, and that they are kept apart."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slackring as sr
from slackring.errors import RingError, SpecError, StragglerError
from slackring.ring.virtual import VirtualRing

# -- time ------------------------------------------------------------------------------------------------------------------


def test_time_passes_only_by_sleeping() -> None:
    def rank() -> list[float]:
        clock = sr.ring().clock
        seen = [clock.now()]
        torch.randn(200, 200) @ torch.randn(200, 200)
        seen.append(clock.now())
        clock.sleep(1.5)
        clock.sleep(0)
        clock.sleep(-3)
        seen.append(clock.now())
        return seen

    assert sr.VirtualCluster(2).run(rank) == [[0.0, 0.0, 1.5]] * 2


def test_the_clock_counts_whole_nanoseconds() -> None:
    """Ten tenths are one second, which they are not in floating point."""

    def rank() -> float:
        clock = sr.ring().clock
        for _ in range(10):
            clock.sleep(0.1)
        return clock.now()

    assert sum([0.1] * 10) != 1.0
    assert sr.VirtualCluster(1).run(rank) == [1.0]


@settings(max_examples=25)
@given(st.lists(st.lists(st.floats(0, 5), max_size=5), min_size=1, max_size=5))
def test_ranks_run_in_the_order_of_their_times(sleeps: list[list[float]]) -> None:
    seen: list[float] = []

    def rank() -> float:
        ring = sr.ring()
        for seconds in sleeps[ring.rank]:
            ring.clock.sleep(seconds)
            seen.append(ring.clock.now())
        return ring.clock.now()

    ends = sr.VirtualCluster(len(sleeps)).run(rank)
    assert seen == sorted(seen)
    assert ends == pytest.approx([math.fsum(mine) for mine in sleeps], abs=1e-8)


def test_a_barrier_waits_for_the_last() -> None:
    def rank() -> float:
        ring = sr.ring()
        ring.clock.sleep(1.0 + ring.rank)
        ring.barrier()
        return ring.clock.now()

    assert sr.VirtualCluster(3).run(rank) == [3.0] * 3


def test_a_round_starts_with_its_last_rank_and_the_network_carries_one_at_a_time() -> None:
    network = sr.Network(latency=0.25, bandwidth=64.0)  # 32 bytes over 2 ranks: 0.25 + 0.5 s

    def rank() -> list[tuple[bool, float]]:
        ring = sr.ring()
        ring.clock.sleep(1.0 if ring.rank else 0.5)
        flights = []
        for name in ("a", "b"):
            flight = ring.open(name)
            flight.send(torch.ones(4, dtype=torch.float64))
            flight.seal()
            flights.append(flight)
        seen = []
        for flight in flights:
            early = flight.done()
            flight.wait()
            assert flight.done()
            seen.append((early, ring.clock.now()))
        return seen

    assert sr.VirtualCluster(2, network=network).run(rank) == [[(False, 1.75), (False, 2.5)]] * 2


def test_a_round_that_is_over_costs_nobody_time() -> None:
    def rank() -> float:
        ring = sr.ring()
        flight = ring.open("a")
        flight.send(torch.ones(1))
        flight.seal()
        ring.clock.sleep(1.0)
        assert flight.done()
        flight.wait()
        return ring.clock.now()

    assert sr.VirtualCluster(2, network=sr.Network(latency=0.5)).run(rank) == [1.0, 1.0]
    assert sr.VirtualCluster(2, network="latency=0.5").run(rank) == [1.0, 1.0]  # as text, too


def test_sleep_inside_a_backward_pass_is_owed_until_after_it() -> None:
    """Autograd's own stack cannot be left, so nobody else runs meanwhile; the time passes all the same."""
    order: list[tuple[int, str]] = []

    def rank() -> list[float]:
        ring = sr.ring()
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        inside = []

        def hook(grad: torch.Tensor) -> None:
            ring.clock.sleep(0.75)
            inside.append(ring.clock.now())
            order.append((ring.rank, "in"))

        y.register_hook(hook)
        order.append((ring.rank, "before"))
        y.sum().backward()
        order.append((ring.rank, "after"))
        owed = ring.clock.now()
        ring.clock.sleep(0.25)
        return [*inside, owed, ring.clock.now()]

    assert sr.VirtualCluster(2).run(rank) == [[0.0, 0.0, 1.0]] * 2
    assert order == [(rank, what) for rank in (0, 1) for what in ("before", "in", "after")]


def test_a_local_step_takes_what_the_straggler_says() -> None:
    def rank() -> float:
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "losp")
        for _ in range(3):
            optimizer.zero_grad()
            x.sum().backward()
            optimizer.step()
        return sr.ring().clock.now()

    slow = sr.VirtualCluster(2, step_time=0.5, straggler="persistent:ranks=1,factor=4")
    assert slow.run(rank) == [1.5, 6.0]


# -- collectives -----------------------------------------------------------------------------------------------------------


def test_collectives() -> None:
    def rank() -> tuple[object, ...]:
        ring = sr.ring()
        assert isinstance(ring, VirtualRing)
        mine = torch.full((2, 2), 1.0 + ring.rank)
        mean, total = sr.allreduce(mine), sr.allreduce(mine, average=False)
        copied = sr.broadcast(mine, root=2)
        sr.barrier()
        assert mine.tolist() == [[1.0 + ring.rank] * 2] * 2
        assert copied.data_ptr() != mine.data_ptr()
        return mean.tolist(), total.tolist(), copied.tolist(), ring.gather(bytes([ring.rank]), "mine")

    expected = ([[2.0] * 2] * 2, [[6.0] * 2] * 2, [[3.0] * 2] * 2, [b"\0", b"\1", b"\2"])
    assert sr.VirtualCluster(3).run(rank) == [expected] * 3


def test_names_may_be_used_again_and_do_not_mix() -> None:
    def rank() -> list[float]:
        ring = sr.ring()
        seen = []
        for turn in range(3):
            ring.clock.sleep(0.1 * (ring.rank + 1))
            tensor = torch.tensor([10.0**turn])
            flight = ring.open("again")
            flight.send(tensor)
            flight.seal()
            flight.wait()
            seen.append(tensor.item())
        return seen

    assert sr.VirtualCluster(2).run(rank) == [[2.0, 20.0, 200.0]] * 2


def test_what_follows_from_a_round_is_computed_once_for_all() -> None:
    computed: list[int] = []

    def rank() -> object:
        ring = sr.ring()
        flight = ring.open("a")
        flight.send(torch.ones(1))
        flight.seal()
        flight.wait()
        return flight.once("x", lambda: computed.append(ring.rank) or object())

    results = sr.VirtualCluster(3).run(rank)
    assert len(computed) == 1
    assert len(set(map(id, results))) == 1


@pytest.mark.parametrize("rule", ["bsp", "losp", "local_sgd:steps=3", "relaxed:payload=gradient,staleness=2"])
def test_lightning_9446_a_users_own_collective_drains_the_rounds_first(rule: str) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/pull/9446: else a rank waits in a metric, and another in a round."""

    def rank() -> list[float]:
        ring = sr.ring()
        x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule)
        metrics = []
        for epoch in range(3):
            for _ in range(2 + (ring.rank + epoch) % 3):
                optimizer.zero_grad()
                x.sum().backward()
                optimizer.step()
            metrics.append(sr.allreduce(torch.tensor(float(ring.rank))).item())
            metrics.append(x.item())
            sr.barrier()  # nothing is left to drain
        optimizer.join()
        return metrics

    results = sr.VirtualCluster(3, network=sr.Network(latency=0.15)).run(rank)
    assert results == [results[0]] * 3
    assert results[0][::2] == [1.0] * 3


# -- ranks are kept apart --------------------------------------------------------------------------------------------------


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_random_streams_belong_to_a_rank() -> None:
    def rank(steps: int) -> list[tuple[float, float, float]]:
        seen = []
        for _ in range(steps):
            seen.append(draws())
            sr.ring().clock.sleep(0.1 * (1 + sr.ring().rank))
        return seen

    together = sr.VirtualCluster(3, seed=5).run(rank, 4)
    assert len({draw for mine in together for one in mine for draw in one}) == 36
    assert sr.VirtualCluster(3, seed=5).run(rank, 4) == together
    assert sr.VirtualCluster(3, seed=6).run(rank, 4) != together
    # Other ranks do not change a rank's stream.
    assert sr.VirtualCluster(1, seed=5).run(rank, 4) == together[:1]


def test_the_callers_random_state_and_threads_come_back() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    threads = torch.get_num_threads()
    expected = draws()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)

    def fails() -> None:
        draws()
        raise ValueError("on purpose")

    sr.VirtualCluster(2).run(draws)
    with pytest.raises(ValueError, match="on purpose"):
        sr.VirtualCluster(2).run(fails)
    assert draws() == expected
    assert torch.get_num_threads() == threads


def test_gradient_mode_and_autocast_belong_to_a_rank() -> None:
    def rank() -> list[tuple[bool, bool, bool]]:
        ring = sr.ring()
        seen = []

        def look() -> None:
            ring.clock.sleep(0.1)
            result = torch.ones(2, 2) @ torch.ones(2, 2)
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), result.dtype == torch.bfloat16))

        look()
        if ring.rank == 0:
            with torch.no_grad():
                look()
                look()
        elif ring.rank == 1:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                look()
                look()
        else:
            look()
            look()
        look()
        return seen

    plain, without, low = (True, False, False), (False, False, False), (True, False, True)
    assert sr.VirtualCluster(3).run(rank) == [
        [plain, without, without, plain],
        [plain, low, low, plain],
        [plain, plain, plain, plain],
    ]
    with torch.no_grad():
        assert sr.VirtualCluster(1).run(torch.is_grad_enabled) == [False]
        assert not torch.is_grad_enabled()


def test_the_ambient_ring_is_the_ranks_own() -> None:
    outside = sr.ring()

    def rank() -> tuple[int, int, list[tuple[int, int]]]:
        ring = sr.ring()
        inner = sr.VirtualCluster(2).run(lambda: (sr.ring().rank, sr.ring().size))
        assert sr.ring() is ring
        return ring.rank, ring.size, inner

    inner = [(0, 2), (1, 2)]
    assert sr.VirtualCluster(3).run(rank) == [(0, 3, inner), (1, 3, inner), (2, 3, inner)]
    assert sr.ring() is outside


def test_a_run_is_the_same_every_time() -> None:
    def rank() -> tuple[list[float], float]:
        ring = sr.ring()
        model = torch.nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "losp")
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step(samples=4)
        optimizer.join()
        return torch.cat([parameter.detach().ravel() for parameter in model.parameters()]).tolist(), ring.clock.now()

    def run(seed: int) -> list[tuple[list[float], float]]:
        cluster = sr.VirtualCluster(
            4, straggler="shifted_exponential:mean=1", network=sr.Network(latency=0.03), seed=seed
        )
        first, second = cluster.run(rank), cluster.run(rank)
        assert first == second
        return first

    assert run(1) != run(2)


# -- what goes wrong -------------------------------------------------------------------------------------------------------


def test_a_deadlock_names_who_lacks_in_what() -> None:
    def rank() -> None:
        ring = sr.ring()
        ring.clock.sleep(0.5)
        if ring.rank == 0:
            ring.gather(b"", "one")
        elif ring.rank == 1:
            ring.gather(b"", "two")

    with pytest.raises(RingError) as caught:
        sr.VirtualCluster(3).run(rank)
    assert str(caught.value) == (
        "all ranks wait for each other at 0.500 virtual seconds: rank 0 waits for 'one', which lacks rank 1, 2; "
        "rank 1 waits for 'two', which lacks rank 0, 2."
    )


def test_a_rank_that_leaves_without_joining_is_named() -> None:
    def rank() -> None:
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "bsp")
        for _ in range(3 + sr.ring().rank):
            optimizer.zero_grad()
            x.sum().backward()
            optimizer.step()

    with pytest.raises(RingError, match=r"rank 1 waits for 'slackring\.\d+\.0', which lacks rank 0"):
        sr.VirtualCluster(2).run(rank)


def test_an_error_names_its_rank_and_time_and_ends_the_others() -> None:
    ended: list[int] = []

    def rank() -> None:
        ring = sr.ring()
        try:
            ring.clock.sleep(1.0 + ring.rank)
            if ring.rank == 1:
                raise KeyError("lost")
            ring.barrier()
        finally:
            ended.append(ring.rank)

    with pytest.raises(KeyError) as caught:
        sr.VirtualCluster(3).run(rank)
    assert caught.value.__notes__ == ["raised on virtual rank 1 of 3, at 2.000 virtual seconds"]
    assert sorted(ended) == [0, 1, 2]
    assert sr.VirtualCluster(2).run(lambda: sr.ring().rank) == [0, 1]


def test_ranks_that_send_different_things_are_told() -> None:
    def rank(dtype: bool) -> None:
        ring = sr.ring()
        flight = ring.open("a")
        odd = torch.float64 if dtype and ring.rank == 2 else torch.float32
        flight.send(torch.ones(3 if not dtype and ring.rank == 2 else 2, dtype=odd))
        flight.seal()
        flight.wait()

    for dtype in (False, True):
        with pytest.raises(RingError, match=r"rank 2 sent .* into a round in which rank 0 sent"):
            sr.VirtualCluster(3).run(rank, dtype)


def test_waiting_for_a_round_that_was_not_sealed_is_an_error() -> None:
    def rank() -> None:
        sr.ring().open("a").wait()

    with pytest.raises(RingError, match="rank 0 waits for round 'a', which it has not sealed"):
        sr.VirtualCluster(1).run(rank)


def test_a_cluster_that_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one rank, not 0"):
        sr.VirtualCluster(0)
    with pytest.raises(SpecError, match="step time"):
        sr.VirtualCluster(1, step_time=0)
    with pytest.raises(StragglerError, match="names rank 7"):
        sr.VirtualCluster(2, straggler="persistent:ranks=7,factor=2")


def test_arguments_and_results_pass_through() -> None:
    def rank(first: int, *, second: int) -> tuple[int, int]:
        return first * second, sr.ring().rank

    assert sr.VirtualCluster(2).run(rank, 3, second=5) == [(15, 0), (15, 1)]


@pytest.mark.parametrize("size", [1, 64])
def test_sizes(size: int) -> None:
    def rank() -> float:
        return sr.allreduce(torch.ones(1)).item()

    assert sr.VirtualCluster(size).run(rank) == [1.0] * size


def test_a_users_collective_drains_also_where_a_rank_took_no_step_since_the_last() -> None:
    def train() -> tuple[float, float]:
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.25), "losp")
        for epoch in range(3):
            for _ in range(0 if (sr.ring().rank, epoch) == (1, 1) else 2):
                optimizer.zero_grad()
                x.sum().backward()
                optimizer.step()
            sr.allreduce(torch.ones(1))
        optimizer.join()
        return x.item(), optimizer.progress.steps

    # Steps of a quarter: 6 of rank 0 and 4 of rank 1, averaged over two ranks.
    assert sr.VirtualCluster(2).run(train) == [(-1.25, 10)] * 2
