"""Synchronous steps: overlap with the backward pass, and every case in which what was sent must be reduced again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch

import slackring as sr
from slackring.testing.scenario import WatchedRing

SIZES = (3, 1, 5)  # samples of each rank's micro-batch


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(SIZES[rank], 4, generator=generator, dtype=torch.float64)


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


Touch = Callable[[int, torch.nn.Module], None]


def train(
    steps: int, touch: Touch, *, told: Sequence[float] = SIZES, passes: int = 1
) -> tuple[list[torch.Tensor], list[str]]:
    """Train with `touch` called between backward and step; `told` are the samples announced before the backward pass."""

    def rank() -> tuple[list[torch.Tensor], list[str]]:
        ring = WatchedRing(sr.ring())
        model = network()
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), "bsp", ring=ring)
        for step in range(steps):
            optimizer.set_samples(told[ring.rank])
            optimizer.zero_grad()
            for _ in range(passes):
                loss_of(model, batch(ring.rank, step)).backward()
            touch(ring.rank, model)
            optimizer.step(samples=SIZES[ring.rank])
        return [parameter.detach() for parameter in model.parameters()], ring.sent

    results = sr.VirtualCluster(len(SIZES)).run(rank)
    for parameters, _ in results:
        for mine, theirs in zip(parameters, results[0][0], strict=True):
            assert torch.equal(mine, theirs)
    return results[0]


def expected(steps: int, touch: Touch, passes: int = 1) -> list[torch.Tensor]:
    """Plain training on the sample-weighted mean of the gradients."""
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank, size in enumerate(SIZES):
            plain.zero_grad()
            for _ in range(passes):
                loss_of(model, batch(rank, step)).backward()
            touch(rank, model)
            for total, parameter in zip(sums, model.parameters(), strict=True):
                if parameter.grad is not None:
                    total += size * parameter.grad
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total / sum(SIZES)
        plain.step()
    return [parameter.detach() for parameter in model.parameters()]


def nothing(rank: int, model: torch.nn.Module) -> None:
    pass


def clip_all(rank: int, model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_on_one_rank(rank: int, model: torch.nn.Module) -> None:
    if rank == 1:
        clip_all(rank, model)


def change_one_layer(rank: int, model: torch.nn.Module) -> None:
    model[0].weight.grad.mul_(0.5)


def replace_a_gradient(rank: int, model: torch.nn.Module) -> None:
    model[0].bias.grad = 2 * model[0].bias.grad


def drop_a_gradient(rank: int, model: torch.nn.Module) -> None:
    if rank == 2:
        model[2].bias.grad = None


def rounds_redone(sent: list[str]) -> int:
    return len({number for number, text in enumerate(sent) if ".again." in text or ".again " in text})


def close(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_communication_overlaps_the_backward_pass_and_nothing_is_redone() -> None:
    parameters, sent = train(4, nothing)
    close(parameters, expected(4, nothing))
    assert rounds_redone(sent) == 0


def test_buckets_leave_before_the_backward_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slackring.optim.gradient._BUCKET_BYTES", 6 * 8)
    seen: list[tuple[str, int]] = []

    def rank() -> None:
        ring = WatchedRing(sr.ring())
        model = network()
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), "bsp", ring=ring)
        for step in range(2):
            optimizer.zero_grad()
            before = len(ring.sent)
            loss_of(model, batch(0, step)).backward()
            seen.append(("backward", len(ring.sent) - before))
            optimizer.step(samples=3)
            seen.append(("step", len(ring.sent) - before))

    sr.VirtualCluster(2).run(rank)
    # Four parameters in four buckets, and the control block. The first backward pass is before the agreement.
    assert [count for what, count in seen if what == "step"] == [5] * 4
    assert sorted(count for what, count in seen if what == "backward") == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("told", "redone"),
    [(SIZES, False), ((3, 1, 4), True), ((7, 7, 7), True)],
)
def test_samples_that_were_announced_wrongly(told: tuple[float, ...], redone: bool) -> None:
    """On one rank or on all: the round is reduced again, and the average is exact."""
    parameters, sent = train(4, nothing, told=told)
    close(parameters, expected(4, nothing))
    assert (rounds_redone(sent) > 0) == redone


@pytest.mark.parametrize("touch", [clip_all, clip_on_one_rank, change_one_layer, replace_a_gradient, drop_a_gradient])
def test_gradients_touched_between_backward_and_step(touch: Touch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="slackring"):
        parameters, sent = train(4, touch)
    close(parameters, expected(4, touch))
    assert rounds_redone(sent) > 0
    assert "max_grad_norm=" in caplog.text


def test_several_backward_passes_in_one_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="slackring"):
        parameters, _ = train(4, nothing, passes=2)
    close(parameters, expected(4, nothing, passes=2))
    assert "bsp:accumulate=k" in caplog.text


def test_a_backward_pass_without_its_step_is_no_work() -> None:
    """The rank then drains: what its buckets sent must not count."""

    def rank() -> torch.Tensor:
        ring = sr.ring()
        model = network()
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), "bsp")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(ring.rank, step)).backward()
            if step < 2 or ring.rank:
                optimizer.step(samples=SIZES[ring.rank])
        optimizer.drain()
        return torch.cat([parameter.detach().ravel() for parameter in model.parameters()])

    def alone() -> torch.Tensor:
        ring = sr.ring()
        model = network()
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), "bsp")
        for step in range(2 if ring.rank == 0 else 3):
            optimizer.zero_grad()
            loss_of(model, batch(ring.rank, step)).backward()
            optimizer.step(samples=SIZES[ring.rank])
        optimizer.drain()
        return torch.cat([parameter.detach().ravel() for parameter in model.parameters()])

    found, wanted = sr.VirtualCluster(3).run(rank), sr.VirtualCluster(3).run(alone)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_horovod_1099_the_average_is_clipped_without_a_second_reduction() -> None:
    """https://github.com/horovod/horovod/issues/1099: `max_grad_norm` clips on all ranks, and each parameter is sent once."""

    def rank() -> tuple[torch.Tensor, list[str]]:
        ring = WatchedRing(sr.ring())
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        optimizer = sr.DistributedOptimizer(plain, "bsp", ring=ring, max_grad_norm=0.01)
        for step in range(3):
            optimizer.set_samples(SIZES[ring.rank])
            optimizer.zero_grad()
            loss_of(model, batch(ring.rank, step)).backward()
            optimizer.step(samples=SIZES[ring.rank])
        return torch.cat([parameter.detach().ravel() for parameter in model.parameters()]), ring.sent

    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(3):
        plain.zero_grad()
        pool = torch.cat([batch(rank, step) for rank in range(3)])
        loss_of(model, pool).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        plain.step()
    wanted = torch.cat([parameter.detach().ravel() for parameter in model.parameters()])
    for found, sent in sr.VirtualCluster(3).run(rank):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert rounds_redone(sent) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_skip_a_step_that_is_not_finite(bad: float) -> None:
    """Whether its gradients left during the backward pass or not, and whatever the other ranks did meanwhile."""

    def rank(drains: bool) -> list[list[float]]:
        ring = sr.ring()
        x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "bsp")
        places = []
        for step in range(4):
            if drains and ring.rank == 1 and step == 2:
                optimizer.drain()
                break
            optimizer.zero_grad()
            slope = bad if ring.rank == 0 and step == 2 else -1.0 - ring.rank
            (slope * x).sum().backward()
            optimizer.step()
            places.append(x.tolist())
        else:
            if drains:
                optimizer.drain()
        return [*places, x.tolist()]

    one, two = sr.VirtualCluster(2).run(rank, False)
    assert one == two == [[1.5, 1.5], [3.0, 3.0], [3.0, 3.0], [4.5, 4.5], [4.5, 4.5]]
    one, two = sr.VirtualCluster(2).run(rank, True)
    assert one == [[1.5, 1.5], [3.0, 3.0], [3.0, 3.0], [4.0, 4.0], [4.0, 4.0]]
    assert two == [[1.5, 1.5], [3.0, 3.0], [4.0, 4.0]]


def test_averaged_buffers_are_right_when_a_round_is_reduced_again() -> None:
    def rank() -> list[float]:
        ring = sr.ring()
        x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        running = torch.zeros(1, dtype=torch.float64)
        optimizer = sr.DistributedOptimizer(
            torch.optim.SGD([x], lr=1.0), "bsp", named_parameters=[("x", x)], named_buffers=[("running", running)]
        )
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            slope = torch.inf if ring.rank == 0 and step == 1 else 1.0
            (slope * x).sum().backward()
            running.fill_(step + 10.0 * ring.rank)
            optimizer.step(samples=1.0 + step)  # not what was assumed
            seen.append(running.item())
        return seen

    assert sr.VirtualCluster(2).run(rank) == [[5.0, 6.0, 7.0]] * 2


def test_horovod_parameters_that_no_rank_used_do_not_decay() -> None:
    """https://github.com/horovod/horovod/blob/master/horovod/torch/optimizer.py: 1.0 stays 1.0 under weight decay.

    A parameter that has a gradient on some ranks only counts zeros for the others.
    """

    def rank() -> list[float]:
        ring = sr.ring()
        a, b, unused = (torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([a, b, unused], lr=1.0, weight_decay=0.5), "bsp")
        for _ in range(2):
            optimizer.zero_grad()
            (4.0 * (a if ring.rank == 0 else b)).sum().backward()
            optimizer.step()
        return [a.item(), b.item(), unused.item()]

    # Each step: x <- x - (mean gradient 2 + decay 0.5 x).
    once = 1 - 2 - 0.5
    twice = once - 2 - 0.5 * once
    assert sr.VirtualCluster(2).run(rank) == [[twice, twice, 1.0]] * 2
