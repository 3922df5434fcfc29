"""Where anchors and sums lie, and GPUs: what is marked ``gpu`` needs one, and is the only check of those paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slackring as sr
from slackring.errors import UnsupportedError
from slackring.optim.fence import Fence
from slackring.optim.flat import FlatSpace
from slackring.optim.optimizer import _buffer_device
from slackring.ring.injected import InjectedNetwork
from slackring.ring.single import SingleRing
from slackring.testing.scenario import WatchedRing

RULES = (
    "bsp",
    "bsp:accumulate=2",
    "relaxed:payload=gradient,steps=2,staleness=1",
    "local_sgd:steps=2",
    "losp:compensation=auto",
    "relaxed:steps=1,staleness=2,compensation=1",
)
CUDA = torch.device("cuda")
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def train(rule: str, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    """Parameters and averaged statistics at the end, on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).to(device, dtype)
    unused = nn.Parameter(torch.ones(2, device=device, dtype=dtype))
    plain = torch.optim.SGD([*model.parameters(), unused], lr=0.1, momentum=0.9)
    optimizer = sr.DistributedOptimizer(plain, rule, named_buffers=model.named_buffers(), **options)
    data = torch.Generator().manual_seed(sr.ring().rank)
    for _ in range(9):
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=data).to(device, dtype)
        model(x).square().mean().backward()
        optimizer.step(samples=5)
        with optimizer.consensus():
            assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    optimizer.join()
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]


def same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("anchor_device", ["device", "cpu"])
@pytest.mark.parametrize("rule", RULES)
def test_on_a_cpu_it_is_the_same_wherever_anchors_lie(rule: str, anchor_device: str) -> None:
    cluster = sr.VirtualCluster(2)
    same(cluster.run(train, rule, "cpu", anchor_device=anchor_device), cluster.run(train, rule, "cpu"))


class CpuRing(SingleRing):
    """As a Horovod without NCCL."""

    def reduces(self, device: torch.device) -> bool:
        return device.type == "cpu"


def test_anchors_lie_where_the_ring_can_sum() -> None:
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    cpu = torch.device("cpu")
    assert _buffer_device(None, [here, there], SingleRing()) is None
    assert _buffer_device("device", [here, there], SingleRing()) is None
    assert _buffer_device("cpu", [here], SingleRing()) == cpu
    for ring in (CpuRing(), WatchedRing(CpuRing()), InjectedNetwork(CpuRing(), sr.Network(latency=1.0))):
        assert _buffer_device(None, [here], ring) is None
        assert _buffer_device(None, [here, there], ring) == cpu
        assert _buffer_device("device", [here], ring) is None
        with pytest.raises(UnsupportedError, match="the single ring cannot sum on meta as it was built"):
            _buffer_device("device", [here, there], ring)
    x = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedError, match="anchor_device= is None, 'device' or 'cpu', not 'gpu'"):
        sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "bsp", anchor_device="gpu")


def test_buffers_know_whether_they_are_away_from_their_tensors() -> None:
    tensors = [torch.zeros(2), torch.zeros(3, device="meta")]
    assert not FlatSpace(tensors).away
    assert [flat.device.type for flat in FlatSpace(tensors).new().flats] == ["cpu", "meta"]
    space = FlatSpace(tensors, torch.device("cpu"))
    assert space.away
    assert [(flat.device.type, flat.numel()) for flat in space.new().flats] == [("cpu", 5)]
    assert not FlatSpace(tensors[:1], torch.device("cpu")).away


# -- on a GPU --------------------------------------------------------------------------------------------------------------

gpu = [pytest.param(rule, marks=on_a_gpu) for rule in RULES]


@pytest.mark.parametrize("rule", gpu)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_anchors_in_pinned_memory_are_those_on_the_device(rule: str, dtype: torch.dtype) -> None:
    """To rounding: where one processor multiplies and adds, the other may round once."""
    cluster = sr.VirtualCluster(2)
    pinned, beside = (cluster.run(train, rule, "cuda", dtype, anchor_device=where) for where in ("cpu", "device"))
    for mine, theirs in zip(pinned, beside, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float32 else 1e-1, atol=1e-6)


@pytest.mark.parametrize("rule", gpu)
@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_ranks_on_one_gpu_agree_with_those_on_the_cpu(rule: str, where: str, compression: str | None) -> None:
    cluster = sr.VirtualCluster(2)
    found = cluster.run(train, rule, "cuda", anchor_device=where, compression=compression)
    same(found[1:], found[:1])
    for mine, theirs in zip(found, cluster.run(train, rule, "cpu"), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("rule", gpu)
def test_capturable_optimizers(rule: str) -> None:
    """Alone, against the plain one; with a learning rate that is a tensor."""

    def run(wrap: bool) -> list[torch.Tensor]:
        x = nn.Parameter(torch.ones(3, device=CUDA))
        lr = torch.tensor(0.1, device=CUDA)
        optimizer: torch.optim.Optimizer = torch.optim.Adam([x], lr=lr, capturable=True, foreach=False)
        if wrap:
            optimizer = sr.DistributedOptimizer(optimizer, rule)
        for _ in range(4):
            for _ in range(2 if wrap and ("accumulate" in rule or "steps=2,staleness" in rule) else 1):
                optimizer.zero_grad()
                x.sum().backward()
                optimizer.step()
        if isinstance(optimizer, sr.RelaxedOptimizer):
            optimizer.drain()
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
        return [x.detach().cpu()]

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_fence_waits_for_the_step_before() -> None:
    fence = Fence([torch.zeros(1, device=CUDA)])
    fence.cross()
    torch.cuda._sleep(10**9)  # about half a second
    queued = torch.cuda.Event()
    queued.record()
    fence.cross()
    assert not queued.query()  # this step may still run
    fence.cross()
    assert queued.query()  # the one before may not
