from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import slackring as sr
from slackring.errors import HorovodMissingError, RingError, UnsupportedError
from slackring.ring import ambient
from slackring.ring.base import Ring
from slackring.ring.single import MachineClock, SingleRing
from slackring.ring.virtual import VirtualRing


def test_alone_every_collective_is_the_identity():
    ring = SingleRing()
    tensor = torch.arange(6.0).reshape(2, 3).t()
    for result in (ring.allreduce(tensor), ring.allreduce(tensor, average=False), ring.broadcast(tensor)):
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr()
    assert ring.gather(b"x", "name") == [b"x"]
    flight = ring.open("round")
    flight.send(tensor)
    flight.seal()
    assert flight.done()
    flight.wait()
    assert flight.once("three", lambda: 3) == 3


def test_counts_may_be_summed_but_not_averaged():
    ring = SingleRing()
    assert ring.allreduce(torch.tensor(3), average=False) == 3
    with pytest.raises(UnsupportedError, match=r"not torch.int64; convert it, or sum with average=False"):
        ring.allreduce(torch.tensor(3))


def test_collectives_of_ones_own_drain_first():
    ring, calls = SingleRing(), []
    ring.before_collective(lambda: calls.append("drained"))
    ring.allreduce(torch.ones(1))
    ring.broadcast(torch.ones(1))
    ring.barrier()
    assert calls == ["drained"] * 3
    ring.gather(b"", "not one's own")
    assert len(calls) == 3


def test_a_ring_has_no_other_ranks_than_its_own():
    with pytest.raises(UnsupportedError, match=r"root=1 is no rank of this ring; its ranks are 0 to 0"):
        SingleRing().broadcast(torch.ones(1), root=1)


def test_process_sets_need_real_ranks():
    def build():
        sr.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), "bsp", process_set=[0, 1])

    with pytest.raises(UnsupportedError, match=r"process_set= needs ranks of .*this is a single ring; leave it out"):
        build()
    with pytest.raises(UnsupportedError, match=r"process_set= needs ranks of .*this is a virtual ring; leave it out"):
        sr.VirtualCluster(2).run(build)


def test_claims_count_up():
    ring = SingleRing()
    assert [ring.claim() for _ in range(3)] == [0, 1, 2]


def test_the_machines_clock():
    clock = MachineClock()
    start = clock.now()
    clock.sleep(0.02)
    assert 0.02 <= clock.now() - start < 2
    clock.sleep(0)
    clock.sleep(-1)


def test_the_ambient_ring_is_single_alone_and_virtual_in_a_cluster():
    alone = sr.ring()
    assert isinstance(alone, SingleRing)
    assert sr.ring() is alone
    rings = sr.VirtualCluster(3).run(sr.ring)
    assert all(isinstance(ring, VirtualRing) for ring in rings)
    assert [(ring.rank, ring.size) for ring in rings] == [(0, 3), (1, 3), (2, 3)]
    assert sr.ring() is alone


def test_a_rank_that_has_not_called_init_does_not_train_alone(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(RingError, match=r"call hvd.init\(\) first"):
        sr.ring()
    model = torch.nn.Linear(1, 1)
    with pytest.raises(RingError, match=r"call hvd.init\(\) first"):
        sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "bsp")
    with pytest.raises(RingError, match=r"call hvd.init\(\) first"):
        sr.allreduce(torch.ones(1))
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    assert sr.ring().size == 1


def test_without_horovod_only_its_ring_raises(monkeypatch):
    from slackring.ring.horovod import HorovodRing

    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(HorovodMissingError, match=r"python cluster_configs/horovod/build.py$"):
        HorovodRing()
    assert isinstance(sr.ring(), Ring)


def test_horovods_ring_before_init():
    pytest.importorskip("horovod.torch")
    from slackring.ring.horovod import HorovodRing

    with pytest.raises(RingError, match=r"call hvd.init\(\) first"):
        HorovodRing()


def test_a_single_horovod_process_is_a_ring_of_one():
    pytest.importorskip("horovod.torch")
    script = """
import torch
import slackring as sr
before = sr.ring()
import horovod.torch as hvd
hvd.init()
ring = sr.ring()
assert (before.kind, ring.kind, ring.rank, ring.size) == ("single", "horovod", 0, 1), ring.kind
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
plain = torch.nn.Linear(2, 1)
plain.load_state_dict(model.state_dict())
expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "bsp")
for step in range(5):
    x = torch.randn(3, 2)
    for net, opt, options in ((model, optimizer, {"samples": 3}), (plain, expected, {})):
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step(**options)
optimizer.join()
assert all(map(torch.equal, model.parameters(), plain.parameters()))
print(sr.allreduce(torch.ones(2)).tolist(), ring.gather(b"abc", "g"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 1.0] [b'abc']"


def test_the_ambient_ring_is_the_one_set_for_a_context():
    ring = SingleRing()
    token = ambient.current.set(ring)
    try:
        assert sr.ring() is ring
    finally:
        ambient.current.reset(token)
    assert sr.ring() is not ring
