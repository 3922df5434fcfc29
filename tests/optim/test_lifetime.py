"""What becomes of an optimizer that is dropped, reloaded or refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import slackring as sr
from slackring.errors import AgreementError


def step(model: torch.nn.Module, optimizer: sr.RelaxedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step(samples=4)


@pytest.mark.parametrize("rule", ["bsp", "losp", "relaxed:payload=gradient,staleness=1,steps=1"])
def test_a_dropped_optimizer_is_freed_at_once_on_all_ranks_alike(rule: str) -> None:
    """Were it freed by the garbage collector, a user's collective would drain it on some ranks only."""

    def train() -> list[bool]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule)
        for _ in range(3):
            step(model, optimizer)
        optimizer.join()
        wrapped = weakref.ref(optimizer)
        rest = [weakref.ref(optimizer._engine), weakref.ref(model.weight)]
        gc.disable()
        try:
            del model, optimizer
            at_once = wrapped() is None
        finally:
            gc.enable()
        gc.collect()
        return [at_once, *(reference() is None for reference in rest)]

    assert sr.VirtualCluster(2).run(train) == [[True] * 3] * 2


def test_a_second_optimizer_on_the_same_model_is_alone() -> None:
    """The first one's hooks must not send gradients any more."""

    def train() -> float:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1, bias=False).double()
        for _ in range(2):
            optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "bsp")
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.full((1, 2), 1.0 + sr.ring().rank, dtype=torch.float64)).sum().backward()
                optimizer.step(samples=1)
            optimizer.join()
        return float(model.weight.detach()[0, 0])

    torch.manual_seed(0)
    start = float(torch.nn.Linear(2, 1, bias=False).weight.detach()[0, 0])
    assert sr.VirtualCluster(2).run(train) == pytest.approx([start - 6 * 0.1 * 1.5] * 2, abs=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loaded_state_and_a_schedule_set_the_learning_rate_that_is_used(when: str) -> None:
    """Every rank follows rank 0's learning rate, also after a state was loaded, whenever the schedule was made."""

    def train() -> list[float]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5) if when == "before" else None
        optimizer = sr.DistributedOptimizer(plain, "bsp")
        schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        places = []

        def move() -> None:
            optimizer.zero_grad()
            (-model(torch.ones(1, 1))).sum().backward()
            optimizer.step()
            places.append(model.weight.item())

        move()
        schedule.step()
        move()
        optimizer.drain()
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.125 if sr.ring().rank == 0 else 8.0
        optimizer.load_state_dict(saved)
        move()
        schedule.step()
        move()
        return places

    # The schedule multiplies what the loaded state says.
    assert sr.VirtualCluster(2).run(train) == [[1.0, 1.5, 1.625, 1.6875]] * 2


def test_a_backward_pass_after_training_sends_nothing() -> None:
    """A rank that alone runs a backward pass after the end must not leave a collective behind."""

    def train() -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        budget = sr.Budget(rounds=3)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "bsp", budget=budget)
        while not optimizer.progress.stop:
            step(model, optimizer)
        ring = sr.ring()
        opened: list[str] = []
        ring.open = opened.append  # type: ignore[assignment,method-assign]
        model(torch.ones(4, 2)).sum().backward()
        return len(opened)

    assert sr.VirtualCluster(2).run(train) == [0, 0]


def test_ranks_that_disagree_learn_so_again_when_they_try_again() -> None:
    """And a user's own collective afterwards does not run rounds that cannot match."""

    def train() -> list[str]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1 + sr.ring().rank)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "bsp")
        told = []
        for _ in range(2):
            with pytest.raises(AgreementError) as caught:
                step(model, optimizer)
            told.append(str(caught.value))
        sr.barrier()
        return told

    for told in sr.VirtualCluster(2).run(train):
        assert told[0] == told[1]
        assert "rank 1 has" in told[0]
