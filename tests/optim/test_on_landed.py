"""Whoever listens to landed rounds hears the same on every rank, and all of it; a rank without data sits rounds out."""

from __future__ import annotations

import pytest
import torch

import slackring as sr
from slackring.optim.progress import LandedRound

RULES = ["bsp", "local_sgd:steps=2", "losp:k_max=4", "relaxed:payload=gradient,staleness=2,steps=2"]


@pytest.mark.parametrize("rule", RULES)
def test_all_ranks_hear_of_every_round_alike(rule: str) -> None:
    def train() -> tuple[list[LandedRound], int, float]:
        heard: list[LandedRound] = []
        rank = sr.ring().rank
        x = torch.nn.Parameter(torch.zeros(2))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule)
        optimizer.on_landed(heard.append)
        for _ in range(5 + 3 * rank):
            x.grad = torch.ones(2)
            optimizer.step(samples=rank + 1)
        optimizer.join()
        return heard, optimizer.progress.steps, optimizer.progress.samples

    results = sr.VirtualCluster(3, straggler="persistent:ranks=2,factor=3").run(train)
    heard, steps, samples = results[0]
    assert results == [results[0]] * 3
    assert [landed.index for landed in heard] == list(range(len(heard)))
    by_rank = [sum(column) for column in zip(*(landed.steps for landed in heard), strict=True)]
    assert by_rank == [5, 8, 11] and steps == 24
    assert [sum(column) for column in zip(*(landed.samples for landed in heard), strict=True)] == [5, 16, 33]
    assert samples == 54
    assert not any(heard[0].helping) and all(heard[-1].helping)


@pytest.mark.parametrize("rule", RULES)
def test_a_rank_that_sits_out_holds_nobody_up_and_counts_for_nothing(rule: str) -> None:
    def train() -> tuple[list[float], list[LandedRound], float]:
        heard: list[LandedRound] = []
        rank = sr.ring().rank
        x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        optimizer.on_landed(heard.append)
        for step in range(6):
            if rank == 1 and step in (2, 3, 5):
                optimizer._engine.sit_out()
                continue
            x.grad = torch.ones(2, dtype=torch.float64)
            optimizer.step()
        optimizer.join()
        return x.tolist(), heard, optimizer.progress.samples

    results = sr.VirtualCluster(2).run(train)
    assert results == [results[0]] * 2
    assert results[0][2] == 6 + 3
    assert max(results[0][0]) < 0
    assert any(landed.steps[1] == 0 and not any(landed.helping) for landed in results[0][1])
