"""The ring's rule and gossip on a complete graph are one algorithm, since averages are exact in both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import slackring as sr
from slackring import gossip

EPOCHS = 12
SPEEDS = "persistent:ranks=1+2,factor=2.5+5"  # 10, 4 and 2 samples a second


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("growth", [0.0, 0.5])
def test_the_ring_and_a_complete_graph_train_alike(staleness: int, growth: float) -> None:
    communication_time = max(staleness, 0.5)

    def on_the_ring() -> tuple[float, list[tuple[float, ...]]]:
        target = 1.0 + sr.ring().rank
        w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        rule = sr.AnytimeMinibatch(compute_time=1.0, staleness=staleness, communication_time=communication_time)
        dual_averaging = sr.optim.DualAveraging([w], lr=0.2, growth=growth, staleness=staleness)
        optimizer = sr.DistributedOptimizer(dual_averaging, rule)
        batches: list[tuple[float, ...]] = []
        optimizer.on_landed(lambda landed: batches.append(landed.samples))
        while optimizer.progress.rounds < EPOCHS - staleness:
            w.grad = w.detach() - target
            optimizer.step()
        optimizer.drain()
        return w.item(), batches

    def gradient(node: int, w: NDArray[np.float64], samples: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return w - 1.0 - node

    nodes = gossip.AnytimeMinibatch(
        graph=gossip.complete(3),
        compute_time=1.0,
        share=10,
        rounds=1,
        communication_time=communication_time,
        stale=staleness > 0,
        straggler=SPEEDS,
    )
    run = nodes.run(gradient, [0.0], EPOCHS, lr=0.2, growth=growth)
    assert nodes.staleness == staleness
    for model, batches in sr.VirtualCluster(3, step_time=0.1, straggler=SPEEDS).run(on_the_ring):
        assert batches[:EPOCHS] == [epoch.batches for epoch in run.epochs] == [(10, 4, 2)] * EPOCHS
        assert not any(map(any, batches[EPOCHS:]))  # a drain ends with empty rounds
        assert run.models.ravel() == pytest.approx([model] * 3, rel=1e-12)
