"""How many copies of the model a rule needs beyond plain training, counted from torch's own allocations."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import slackring as sr

WIDTH = 400  # one copy of the model is 640 kB, far above everything else


@dataclass(frozen=True)
class Memory:
    """Copies of the model: still held at the end, and at most."""

    held: float
    peak: float


def train(rule: str | None) -> list[torch.Tensor | torch.optim.Optimizer]:
    """Train long enough that whatever is going to be allocated has been; return what a user keeps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Linear(WIDTH, 1, bias=False))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    if rule is not None:
        optimizer = sr.DistributedOptimizer(optimizer, rule)
    for _ in range(12):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
    return [*model.parameters(), optimizer]


def measure(rule: str | None, size: int) -> Memory:
    """Bytes per rank, in copies of the model."""
    gc.collect()  # what others left must not be freed while we count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = sr.VirtualCluster(size, network=sr.Network(latency=0.15)).run(train, rule)
    assert kept
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    total = highest = 0
    for _, change in changes:
        total += change
        highest = max(highest, total)
    copy = 4 * (WIDTH * WIDTH + WIDTH) * size
    return Memory(total / copy, highest / copy)


@pytest.fixture(scope="module")
def plain() -> Memory:
    memory = measure(None, 1)
    # Parameters and gradients; and what the backward pass holds before it adds it to a gradient.
    assert memory.held == pytest.approx(2, abs=0.1)
    assert memory.peak == pytest.approx(3, abs=0.1)
    return memory


@pytest.mark.parametrize(
    ("rule", "size", "copies"),
    [
        # The design allows BSP one copy, and LOSP with a number as compensation four.
        ("bsp", 1, 1),
        ("bsp", 2, 1),
        ("bsp:accumulate=3", 1, 1),
        ("local_sgd", 1, 2),
        ("osp", 1, 3),
        ("losp:compensation=0.5", 1, 3),
        ("losp:compensation=0.5,weighting=samples", 1, 3),
        ("losp:compensation=1", 1, 3),
        ("losp:compensation=1.5", 3, 3),
        ("cocod", 1, 3),
        ("losp:compensation=auto", 1, 4),
        ("relaxed:payload=gradient,steps=1,staleness=1", 1, 2),
    ],
)
def test_copies_beyond_plain_training(rule: str, size: int, copies: int, plain: Memory) -> None:
    memory = measure(rule, size)
    assert memory.held - plain.held == pytest.approx(copies, abs=0.05)
    # A virtual ring needs a sum of its own while it adds the ranks' contributions up.
    assert memory.peak - plain.peak <= copies + 0.05 + (1 / size if size > 1 else 0)
