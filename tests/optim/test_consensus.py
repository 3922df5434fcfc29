"""The consensus model, the agreed progress, and time that is not a step's."""

from __future__ import annotations

import pytest
import torch

import slackring as sr
from slackring.errors import AgreementError, SpecError
from slackring.optim.records import RoundRecord, StepRecord

RULES = ["bsp", "bsp:accumulate=2", "local_sgd:steps=2", "losp", "relaxed:payload=gradient,staleness=1"]


class Rows:
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.rounds: list[RoundRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def round(self, record: RoundRecord) -> None:
        self.rounds.append(record)


def one_step(optimizer: torch.optim.Optimizer, x: torch.Tensor, slope: float = 1.0) -> None:
    optimizer.zero_grad()
    (slope * x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_a_look_changes_nothing_and_its_time_is_nobodys(rule: str) -> None:
    def rank(look: bool) -> tuple[list[float], list[float]]:
        ring, rows = sr.ring(), Rows()
        x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1, momentum=0.9), rule, recorder=rows)
        for step in range(5):
            one_step(optimizer, x, 1.0 + ring.rank)
            if look and (step + ring.rank) % 2:
                before = x.item()
                with optimizer.consensus():
                    ring.clock.sleep(0.0)
                with pytest.raises(KeyError), optimizer.consensus():
                    raise KeyError
                assert x.item() == before
        optimizer.join()
        return [x.item()], [record.compute for record in rows.steps]

    assert sr.VirtualCluster(2).run(rank, True) == sr.VirtualCluster(2).run(rank, False)


def test_time_inside_consensus_is_not_counted_as_a_steps() -> None:
    def rank() -> tuple[list[float], float]:
        ring, rows = sr.ring(), Rows()
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "losp", recorder=rows)
        for _ in range(3):
            one_step(optimizer, x)
            with optimizer.consensus():
                ring.clock.sleep(5.0)
        return [record.end - record.start for record in rows.steps], ring.clock.now()

    ((walls, now),) = sr.VirtualCluster(1, step_time=0.5).run(rank)
    assert walls == pytest.approx([0.5] * 3)
    assert now == pytest.approx(3 * 5.5)


def test_consensus_before_the_first_step_is_the_model() -> None:
    x = torch.nn.Parameter(torch.ones(2))
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "losp")
    with optimizer.consensus():
        assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("rule", RULES)
def test_progress_is_agreed_round_by_round(rule: str) -> None:
    def rank() -> list[tuple[int, int, float]]:
        ring = sr.ring()
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule)
        seen = []
        for step in range(6 + ring.rank):
            optimizer.zero_grad()
            x.sum().backward()
            optimizer.step(samples=1 + (step + ring.rank) % 3)
            progress = optimizer.progress
            seen.append((progress.rounds, progress.steps, progress.samples))
        optimizer.join()
        progress = optimizer.progress
        return [*seen, (progress.rounds, progress.steps, progress.samples)]

    found = sr.VirtualCluster(3, straggler="persistent:ranks=1,factor=2.5").run(rank)
    agreed: dict[int, tuple[int, float]] = {}
    for seen in found:
        for rounds, steps, samples in seen:
            assert agreed.setdefault(rounds, (steps, samples)) == (steps, samples)
        assert seen[-1] == found[0][-1]
    taken = [1 + (step + rank) % 3 for rank in range(3) for step in range(6 + rank)]
    assert found[0][-1][1:] == (len(taken), float(sum(taken)))


def test_records_of_a_blocking_rule() -> None:
    """Two ranks of speeds 1 and 3, windows of two steps, rounds of 0.25 s, in virtual seconds."""

    def rank() -> Rows:
        rows = Rows()
        x = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "local_sgd:steps=2", recorder=rows)
        for _ in range(4):
            optimizer.zero_grad()
            x.sum().backward()
            optimizer.step(samples=3)
        return rows

    cluster = sr.VirtualCluster(2, 1.0, straggler="persistent:ranks=1,factor=3", network=sr.Network(latency=0.25))
    fast, slow = cluster.run(rank)
    # The handshake before the first round costs one latency, and belongs to no step.
    assert [(r.step, r.round, r.samples) for r in fast.steps] == [(0, 0, 3), (1, 0, 3), (2, 1, 3), (3, 1, 3)]
    assert [r.blocked for r in fast.steps] == pytest.approx([0, 4.25, 0, 4.25])
    assert [r.blocked for r in slow.steps] == pytest.approx([0, 0.25, 0, 0.25])
    assert [r.compute for r in fast.steps] == pytest.approx([1.0] * 4)
    assert [r.injected for r in slow.steps] == pytest.approx([3.0] * 4)
    assert [r.landed - r.launched for r in fast.rounds] == pytest.approx([4.25] * 2)
    for rows in (fast, slow):
        assert [(r.local_steps, r.local_samples, r.steps, r.samples) for r in rows.rounds] == [(2, 6, 4, 12)] * 2
        assert [(r.contributors, r.training, r.compensation) for r in rows.rounds] == [(2, 2, 0)] * 2
        assert all(r.nbytes > 4 * 8 for r in rows.rounds)


def test_an_overlapping_rule_does_not_wait_for_communication() -> None:
    def rank() -> list[float]:
        rows = Rows()
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "losp", recorder=rows)
        for _ in range(10):
            one_step(optimizer, x)
        return [record.blocked for record in rows.steps]

    assert sr.VirtualCluster(3, 0.1, network=sr.Network(latency=0.35)).run(rank) == [[0.0] * 10] * 3


def test_budgets_that_cannot_be() -> None:
    for bad in ({"rounds": 0}, {"samples": -1}, {"seconds": 0.0}):
        with pytest.raises(SpecError, match=f"budget: {next(iter(bad))} is above 0"):
            sr.Budget(**bad)  # type: ignore[arg-type]


def test_an_anchor_that_was_changed_on_one_rank_is_found() -> None:
    """Behind the optimizer's back, through a view that its version counter does not see."""

    def rank() -> None:
        x = torch.nn.Parameter(torch.zeros(4))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "bsp")
        for step in range(4):
            one_step(optimizer, x)
            if step == 1 and sr.ring().rank == 2:
                x.detach().numpy()[3] += 1e-6

    with pytest.raises(AgreementError, match=r"round 2: the anchor of rank 2 differs .* optimizer.reset_anchor\(\)"):
        sr.VirtualCluster(4).run(rank)


def test_ranks_that_start_from_different_models_are_told_to_broadcast() -> None:
    def rank() -> None:
        x = torch.nn.Parameter(torch.rand(4))
        one_step(sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "losp"), x)

    with pytest.raises(AgreementError, match="broadcast them first"):
        sr.VirtualCluster(3).run(rank)


def test_broadcast_before_the_first_step_sets_the_anchor() -> None:
    def rank() -> list[float]:
        x = torch.nn.Parameter(torch.rand(4))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.0), "losp")
        with torch.no_grad():
            x.copy_(sr.broadcast(x, root=1))
        one_step(optimizer, x)
        optimizer.drain()
        return x.tolist()

    found = sr.VirtualCluster(2).run(rank)
    assert found[0] == found[1]
