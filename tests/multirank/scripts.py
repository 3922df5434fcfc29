"""What ranks run in several of these tests, on either library's ring."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

import slackring as sr
from slackring.errors import RingError
from slackring.ring.injected import InjectedNetwork


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def batches(rank, count, samples=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        x = torch.randn(samples, 8, generator=generator, dtype=torch.float64).to(dtype)
        yield x, x.sum(1).gt(0).long()


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def collectives():
    ring = sr.ring()
    assert ring is sr.ring()
    grid = torch.arange(6.0).reshape(2, 3) + ring.rank
    mean = sr.allreduce(grid.t())  # not contiguous, and left alone
    torch.testing.assert_close(mean, grid.t() - ring.rank + (ring.size - 1) / 2)
    assert sr.allreduce(torch.tensor(ring.rank), average=False) == ring.size * (ring.size - 1) // 2
    assert sr.allreduce(torch.tensor(1.5, dtype=torch.float64)).dtype == torch.float64
    last = ring.size - 1
    assert torch.equal(sr.broadcast(grid.t(), root=last), grid.t() - ring.rank + last)
    sr.barrier()
    gathered = ring.gather(bytes([65 + ring.rank]) * (3 * ring.rank), "mine"), ring.gather(b"", "empty")
    return (ring.kind, ring.rank, ring.size), gathered


def check_collectives(pool):
    gathered = [bytes([65 + rank]) * (3 * rank) for rank in range(pool.size)], [b""] * pool.size
    assert pool.run(collectives) == [((pool.kind, rank, pool.size), gathered) for rank in range(pool.size)]


def wait_for_a_late_rank(seconds):
    """CPU seconds, and wall-clock seconds, of waiting."""
    ring = sr.ring()
    sr.barrier()
    ring.gather(b"", "late.0")  # whatever the ring makes for a name is made now
    if ring.rank == 0:
        time.sleep(seconds)
    cpu, wall = time.thread_time(), time.monotonic()
    flight = ring.open("late.0")
    flight.send(torch.ones(1))
    flight.seal()
    first_answer = flight.done()
    flight.wait()
    return first_answer, time.thread_time() - cpu, time.monotonic() - wall


def check_that_waiting_sleeps(pool):
    for done_at_once, cpu, wall in pool.run(wait_for_a_late_rank, 1.0)[1:]:
        assert not done_at_once
        assert wall > 0.9
        assert cpu < 0.25 * wall


def train_under_network(latency, bandwidth):
    """Median seconds of a synchronous round with a payload of 400 kB."""
    model = nn.Linear(1000, 100, bias=False)
    model.weight.data.fill_(0.1)
    injected = InjectedNetwork(sr.ring(), sr.Network(latency=latency, bandwidth=bandwidth))
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "bsp", ring=injected)
    took = []
    for _ in range(7):
        start = time.monotonic()
        optimizer.zero_grad()
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step(samples=2)
        took.append(time.monotonic() - start)
    sr.allreduce(torch.ones(1))  # over the ambient ring; drains the rounds of the injected one
    optimizer.join()
    return sorted(took[2:])[2]


def check_injected_network(pool):
    # 0.1 s for the latency, 0.1 s for 2 (size - 1) / size * 400 kB at this bandwidth
    slow = pool.run(train_under_network, 0.1, 2 * (pool.size - 1) / pool.size * 400_000 / 0.1)
    assert min(slow) > 0.195
    assert max(slow) < 0.39, "more was injected than asked for"


def lose_a_rank(dying):
    """What the survivors see of a rank that is killed between two rounds, and in how many seconds."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "losp:k_max=4")
    started = time.monotonic()
    try:
        for step in range(100_000):
            if step == 20:
                started = time.monotonic()
                if sr.ring().rank == dying:
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


def check_that_a_killed_rank_is_an_error(pool, cause, within):
    """The last rank is killed; all others raise a sentence with this cause within as many seconds."""
    last = pool.size - 1
    answers = pool.run(lose_a_rank, last, dies={last})
    assert answers[-1] is None
    for rank, (message, seconds) in enumerate(answers[:-1]):
        assert message.startswith(f"rank {rank}: 'slackring."), message
        assert cause in message
        assert seconds < within
    assert not pool.alive


def train_on(device, rule, steps):
    """A model on a device, and what it comes to."""
    ring, model = sr.ring(), make_model(dtype=torch.float64).to(device)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rule)
    for x, y in batches(ring.rank, steps, dtype=torch.float64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step(samples=len(x))
    optimizer.join()
    model(torch.ones(1, 8, dtype=torch.float64, device=device))  # behind the merge, in stream order
    return flat(model).cpu()


def sum_on_gpu():
    """A round with a payload on the GPU, if the ring can sum there, and a control block on the CPU; and one's own sum."""
    ring = sr.ring()
    payload = torch.full((1000,), float(ring.rank + 1), device="cuda")
    control = torch.full((5,), 1.0, dtype=torch.float64)
    flight = ring.open("gpu.0")
    payload.mul_(2)  # not done yet when the round starts
    if ring.reduces(payload.device):
        flight.send(payload)
    flight.send(control)
    flight.seal()
    flight.wait()
    if not ring.reduces(payload.device):
        payload = sr.allreduce(payload, average=False)
    payload.add_(1)  # behind the sum, in stream order
    copy = sr.broadcast(payload)
    return payload.unique().tolist(), control.unique().tolist(), str(copy.device), ring.gather(b"x", "gpu.1")


def check_gpu(pool, run):
    """Rounds and training on a GPU that all ranks share; `run` calls a function on the ranks, on the ring that is meant."""
    size = pool.size
    assert run(sum_on_gpu) == [([float(size * (size + 1) + 1)], [float(size)], "cuda:0", [b"x"] * size)] * size
    for rule in ("bsp", "cocod:steps=2"):
        wanted = sr.VirtualCluster(size).run(train_on, "cpu", rule, 12)[0]
        for found in run(train_on, "cuda", rule, 12):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
