"""The Horovod ring itself: collectives, names, errors."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from tests.multirank.pool import Pool

import slackring as sr
from slackring.errors import RingError, UnsupportedError
from slackring.ring.ambient import ring as ambient
from slackring.ring.injected import InjectedNetwork

GLOO_TIMEOUT = 10  # seconds

hvd = pytest.importorskip("horovod.torch")


def collectives():
    ring = ambient()
    assert (ring.kind, ring.rank, ring.size) == ("horovod", hvd.rank(), hvd.size())
    assert ring is ambient()
    grid = torch.arange(6.0).reshape(2, 3) + ring.rank
    mean = sr.allreduce(grid.t())  # not contiguous, and left alone
    torch.testing.assert_close(mean, grid.t() - ring.rank + (ring.size - 1) / 2)
    assert sr.allreduce(torch.tensor(ring.rank), average=False) == ring.size * (ring.size - 1) // 2
    assert sr.allreduce(torch.tensor(1.5, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(UnsupportedError, match="average=False"):
        sr.allreduce(torch.tensor(ring.rank))
    last = ring.size - 1
    assert torch.equal(sr.broadcast(grid.t(), root=last), grid.t() - ring.rank + last)
    sr.barrier()
    return ring.gather(bytes([65 + ring.rank]) * (3 * ring.rank), "mine")


def test_collectives(ranks, size):
    assert ranks(size).run(collectives) == [[bytes([65 + rank]) * (3 * rank) for rank in range(size)]] * size


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


def wait_for_a_late_rank(seconds):
    """CPU seconds, and wall-clock seconds, of waiting."""
    ring = ambient()
    sr.barrier()
    if ring.rank == 0:
        time.sleep(seconds)
    cpu, wall = time.thread_time(), time.monotonic()
    flight = ring.open("late")
    flight.send(torch.ones(1))
    flight.seal()
    first_answer = flight.done()
    flight.wait()
    return first_answer, time.thread_time() - cpu, time.monotonic() - wall


def test_waiting_sleeps(ranks, size):
    for done_at_once, cpu, wall in ranks(size).run(wait_for_a_late_rank, 1.0)[1:]:
        assert not done_at_once
        assert wall > 0.9
        assert cpu < 0.25 * wall


def train_under_network(latency, bandwidth):
    """Median seconds of a synchronous round with a payload of 400 kB."""
    model = torch.nn.Linear(1000, 100, bias=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    injected = InjectedNetwork(ambient(), sr.Network(latency=latency, bandwidth=bandwidth))
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "bsp", ring=injected)
    took = []
    for _ in range(7):
        start = time.monotonic()
        optimizer.zero_grad()
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step(samples=2)
        took.append(time.monotonic() - start)
    optimizer.join()
    return sorted(took[2:])[2]


def test_injected_network(ranks, size):
    # 0.1 s for the latency, 0.1 s for 2 (size - 1) / size * 400 kB at this bandwidth
    slow = ranks(size).run(train_under_network, 0.1, 2 * (size - 1) / size * 400_000 / 0.1)
    assert min(slow) > 0.195
    assert max(slow) < 0.39, "more was injected than asked for"


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


def lose_a_rank(dying):
    """What the survivors see of a rank that is killed between two rounds, and in how many seconds."""
    model = torch.nn.Linear(4, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "losp:k_max=4")
    started = time.monotonic()
    try:
        for step in range(100_000):
            if hvd.rank() == dying and step == 20:
                started = time.monotonic()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step(samples=1)
    except RingError as exc:
        first, seconds = str(exc), time.monotonic() - started
    else:
        raise AssertionError("nobody noticed")
    with pytest.raises(RingError, match="failed before"):
        sr.allreduce(torch.ones(1))
    return first, seconds


def test_a_killed_rank_is_an_error_on_all_others(ranks, size):
    ranks(size).close()  # the processors are for the pool below
    pool = Pool(size, {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT)})
    answers = pool.run(lose_a_rank, size - 1, dies={size - 1})
    assert answers[-1] is None
    for rank, (message, seconds) in enumerate(answers[:-1]):
        assert message.startswith(f"rank {rank}: ")
        assert "another rank died" in message
        assert seconds < GLOO_TIMEOUT + 5
    assert not pool.alive
