"""DualAveraging against the papers' update; oracles are numbered as in the notes on the Anytime Minibatch papers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import slackring as sr
from slackring.errors import UnsupportedError
from slackring.optim import DualAveraging

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def descend(make: Make, steps: int, start: Tensor) -> list[Tensor]:
    """Models on the way down ``1/2 ||w||^2 + 1/4 sum(w^4)``."""
    w = torch.nn.Parameter(start.clone())
    optimizer, models = make([w]), [start]
    for _ in range(steps):
        w.grad = w.detach() + w.detach() ** 3
        optimizer.step()
        models.append(w.detach().clone())
    return models


def as_published(steps: int, lr: float, growth: float, staleness: int, start: Tensor) -> list[Tensor]:
    """``w(t + 1) = w(1) - z(t + 1) / beta(t + 1)``, beta(t) = K + alpha(t) with K = 1 / lr."""
    z, models = torch.zeros_like(start), [start]
    for t in range(1, steps + 1):
        z = z + models[-1] + models[-1] ** 3
        models.append(start - z / (1 / lr + growth / lr * math.sqrt(t + 1 + staleness)))
    return models


@given(st.floats(0.01, 0.3), st.floats(0, 2), st.integers(0, 5))
def test_equals_the_published_update(lr: float, growth: float, staleness: int) -> None:
    start = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    ours = descend(lambda parameters: DualAveraging(parameters, lr, growth, staleness), 30, start)
    theirs = as_published(30, lr, growth, staleness, start)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@given(st.floats(0.001, 0.4))
def test_oracle_7_constant_beta_is_sgd_with_lr_one_over_beta(lr: float) -> None:
    start = torch.tensor([1.0, -0.5, 2.0])
    ours = descend(lambda parameters: DualAveraging(parameters, lr, growth=0), 20, start)
    theirs = descend(lambda parameters: torch.optim.SGD(parameters, lr), 20, start)
    assert all(map(torch.equal, ours, theirs))


def test_oracle_7_from_zero() -> None:
    """As published: h = 1/2 ||w||^2, so that w(1) = 0."""
    (gradients,) = torch.randn(1, 20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = DualAveraging([w], lr=0.25, growth=0)
    for count in range(20):
        w.grad = gradients[count]
        optimizer.step()
        torch.testing.assert_close(w.detach(), -gradients[: count + 1].sum(0) / 4)


def test_a_schedule_that_ends_at_zero_leaves_the_model_where_it_is() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = DualAveraging([w], lr=0.1, growth=0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=3)
    models = []
    for _ in range(5):
        w.grad = torch.ones(3)
        optimizer.step()
        schedule.step()
        models.append(w[0].item())
    assert models == pytest.approx([0.9, 0.9 - 0.2 / 3, 0.8, 0.8, 0.8])


def test_parameters_without_a_gradient_stay_and_fall_behind() -> None:
    pair = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    optimizer = DualAveraging(pair, lr=0.1, growth=1.0)
    for both in (False, True, True):
        pair[0].grad = torch.ones(2, dtype=torch.float64)
        pair[1].grad = torch.ones(2, dtype=torch.float64) if both else None
        optimizer.step()
    assert [w[0].item() for w in pair] == pytest.approx([1 - 0.3 / 3, 1 - 0.2 / (1 + math.sqrt(3))])


def test_groups_have_settings_of_their_own() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizer = DualAveraging([{"params": [first], "growth": 0.0}], lr=0.5, growth=1.0)
    first.grad = torch.ones_like(first)
    optimizer.step()
    optimizer.add_param_group({"params": [second], "lr": 0.25, "staleness": 7})
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert (first.item(), second.item()) == (-1.0, pytest.approx(-0.25 / (1 + math.sqrt(9))))


def test_copies_and_state_dicts_go_on_to_the_bit() -> None:
    def step(optimizer: torch.optim.Optimizer) -> Tensor:
        (w,) = optimizer.param_groups[0]["params"]
        w.grad = w.detach() * 3
        optimizer.step()
        return w.detach().clone()

    optimizer = DualAveraging([torch.nn.Parameter(torch.rand(5))], lr=0.1, growth=0.5, staleness=1)
    for _ in range(3):
        here = step(optimizer)
    loaded = DualAveraging([torch.nn.Parameter(here.clone())], lr=1.0, growth=0.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twins = [loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for _ in range(3):
        wanted = step(optimizer)
        assert all(torch.equal(step(twin), wanted) for twin in twins)


def test_a_closure_is_evaluated_with_gradients() -> None:
    w = torch.nn.Parameter(torch.ones(1))
    optimizer = DualAveraging([w], lr=0.5, growth=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert w.item() == 0.0
    assert optimizer.step() is None


def test_mixed_dtypes_and_layouts() -> None:
    weights = [
        torch.nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.ones(3, dtype=torch.float64)),
        torch.nn.Parameter(torch.ones(())),
    ]
    optimizer = DualAveraging(weights, lr=0.5, growth=0)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    assert all(torch.equal(w, torch.full_like(w, 0.5)) for w in weights)
    assert optimizer.state[weights[0]]["z"].is_contiguous(memory_format=torch.channels_last)


def test_ranks_agree_to_the_bit_under_bsp() -> None:
    """And train as one process that has all samples."""

    def train() -> Tensor:
        rank = sr.ring().rank
        w = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(DualAveraging([w], lr=0.1, growth=0.5), "bsp")
        for _ in range(10):
            optimizer.zero_grad()
            (torch.arange(1.0, 4) * (1 + rank) * w**2).sum().backward()
            optimizer.step(samples=1 + rank)
        optimizer.drain()
        return w.detach().clone()

    one, two, three = sr.VirtualCluster(3).run(train)
    assert torch.equal(one, two)
    assert torch.equal(one, three)
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = DualAveraging([w], lr=0.1, growth=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        (torch.arange(1.0, 4) * (1 + 4 + 9) / 6 * w**2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(one, w.detach())


@pytest.mark.parametrize(("name", "value"), [("lr", -0.1), ("growth", math.inf), ("staleness", -1), ("lr", math.nan)])
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(UnsupportedError, match=f"DualAveraging: {name} is a finite number of at least 0"):
        DualAveraging([torch.zeros(1)], **{"lr": 0.1, "growth": 0.1, name: value})  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="build the embedding with sparse=False"):
        DualAveraging(table.parameters(), lr=0.1, growth=0.1).step()
