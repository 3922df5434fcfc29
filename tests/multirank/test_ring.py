"""The Horovod ring itself: collectives, names, errors."""

from __future__ import annotations

import pytest
import torch
from tests.multirank.pool import Pool
from tests.multirank.scripts import (
    check_collectives,
    check_gpu,
    check_injected_network,
    check_that_a_killed_rank_is_an_error,
    check_that_waiting_sleeps,
)

import slackring as sr
from slackring.ring.ambient import ring as ambient
from slackring.ring.injected import InjectedNetwork

GLOO_TIMEOUT = 10  # seconds

hvd = pytest.importorskip("horovod.torch")


def test_collectives(ranks, size):
    check_collectives(ranks(size))


def rounds_in_flight():
    """Three rounds at once, sent and sealed before any is waited for, each rank asking at another time."""
    ring = ambient()
    flights, tensors = [], []
    for index in range(3):
        flight = ring.open(f"flight.{index}")
        tensors.append([torch.full((4,), float(10 * index + ring.rank)), torch.full((2, 2), 1.0, dtype=torch.float64)])
        for tensor in tensors[-1]:
            flight.send(tensor)
        flight.seal()
        flights.append(flight)
    while ring.rank == 0 and not flights[2].done():
        ring.clock.sleep(0.001)
    for flight in flights:
        flight.wait()
        assert flight.done()
    return [[float(tensor.unique()) for tensor in sent] for sent in tensors]


def test_several_rounds_can_be_in_flight(ranks, size):
    ids = size * (size - 1) / 2
    assert ranks(size).run(rounds_in_flight) == [[[10 * index * size + ids, size] for index in range(3)]] * size


def test_waiting_sleeps(ranks, size):
    check_that_waiting_sleeps(ranks(size))


def test_injected_network(ranks, size):
    check_injected_network(ranks(size))


def mix_rings():
    """Two optimizers on injected networks; a script's own collective, on the ambient ring, drains the rounds of both."""
    optimizers = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 1)
        injected = InjectedNetwork(ambient(), sr.Network(latency=0.01))
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers.append((model, sr.DistributedOptimizer(plain, "relaxed:steps=1,staleness=2", ring=injected)))
    for _ in range(3):
        for model, optimizer in optimizers:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step(samples=2)
    landed = [optimizer.progress.steps for _, optimizer in optimizers]
    sr.barrier()
    landed += [optimizer.progress.steps for _, optimizer in optimizers]
    for _, optimizer in optimizers:
        optimizer.join()
    return landed


def test_the_ambient_ring_knows_what_travels_on_the_injected_one(ranks, size):
    assert ranks(size).run(mix_rings) == [[size, size, 3 * size, 3 * size]] * size


def test_a_killed_rank_is_an_error_on_all_others(ranks, size):
    ranks(size).close()  # the processors are for the pool below
    pool = Pool(size, {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT)})
    check_that_a_killed_rank_is_an_error(pool, "another rank died", within=GLOO_TIMEOUT + 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("nccl", "ranks_on_it"), [(True, 1), (False, 2)])
def test_a_gpu(ranks, nccl, ranks_on_it):
    """NCCL refuses two ranks on one GPU, so it is tried with one; without it contributions lie in the host's memory."""
    if bool(hvd.nccl_built()) != nccl:
        pytest.skip(f"this Horovod is built {'without' if nccl else 'with'} NCCL")
    pool = ranks(ranks_on_it)
    check_gpu(pool, pool.run)
