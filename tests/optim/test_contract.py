"""Exact values, and what is refused; matrix.py has what works under which rule, test_peers.py what other packages miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.optim.harness import Vector, sgd, train

import slackring as sr
from slackring.errors import SlackringError, StoppedError, UnsupportedError
from slackring.optim.records import RoundRecord, StepRecord

DELTA_RULES = ["local_sgd:steps=2", "osp", "losp", "cocod:steps=2"]
RULES = ["bsp", "bsp:accumulate=2", "relaxed:payload=gradient,staleness=1", *DELTA_RULES]


def slope(*slopes: float) -> Callable[[int, int, Vector], Vector]:
    """Gradient of a linear loss, by rank."""
    return lambda rank, step, x: np.array([slopes[rank]])


def models(trace: Any) -> list[float]:
    return [model.item() for model in trace.model]


# -- exact values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("steps", (4 * 1 + 1 * 3) / 2),  # the plain mean of the deltas
        ("ranks", 2.5 / 2 * (4 * 1 / 4 + 1 * 3 / 1)),  # K_bar / m * sum(delta_i / K_i)
        ("samples", (8 / 4 * 4 + 4 / 1 * 3) / 2 / (12 / 5)),  # sum(b_i * delta_i) / (m * b_bar)
    ],
)
def test_weightings_of_deltas(weighting: str, expected: float) -> None:
    """Four steps of slope -1 and two samples meet one step of slope -3 and four samples."""
    for trace in train(
        f"relaxed:steps=4,weighting={weighting}",
        slope(-1, -3),
        [4, 1],
        optimizer=sgd(1.0),
        samples=lambda rank, step: [2, 4][rank],
        end="drain",
    ):
        assert trace.last.item() == pytest.approx(expected, abs=1e-12)


# -- the optimizer stays what it was ---------------------------------------------------------------------------------------


def one_step(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, **kwargs: Any) -> None:
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step(**kwargs)


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam-tensor-lr": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01), foreach=False),
    "adam-fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
    "adamw-amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rule", ["bsp", "bsp:accumulate=2", "losp:compensation=1"])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_optimizer_of_torch_works(name: str, rule: str, scaled: bool) -> None:
    """Also in windows that do not step, and with a gradient scaler; alone it equals the plain one."""

    def run(wrap: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        if wrap:
            optimizer = sr.DistributedOptimizer(optimizer, rule)
        halves = 2 if rule == "bsp:accumulate=2" else 1
        for step in range(4):
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            for part in inputs.chunk(halves) if wrap else [inputs]:
                optimizer.zero_grad()
                scaler.scale(model(part).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        if wrap:
            optimizer.drain()
        return torch.cat([parameter.detach().ravel() for parameter in model.parameters()])

    torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-5)


def test_a_gradient_rule_uses_the_rates_of_the_lowest_training_rank() -> None:
    def rank() -> float:
        ring = sr.ring()
        x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        plain = torch.optim.SGD([x], lr=[0.5, 0.25][ring.rank])
        optimizer = sr.DistributedOptimizer(plain, "bsp")
        for _ in range(2 if ring.rank else 1):
            optimizer.zero_grad()
            (-x).sum().backward()
            optimizer.step()
        optimizer.join()
        assert plain.param_groups[0]["lr"] == [0.5, 0.25][ring.rank]
        return x.item()

    # Rank 0's rate while it trains, then rank 1's.
    assert sr.VirtualCluster(2).run(rank) == [0.75, 0.75]


def test_numbers_in_tensors_are_agreed_and_stay_tensors() -> None:
    def rank() -> tuple[list[float], bool]:
        ring = sr.ring()
        x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        lr, betas = torch.tensor([0.5, 0.25][ring.rank]), (torch.tensor([0.5, 0.0][ring.rank]), torch.tensor(0.75))
        plain = torch.optim.Adam([x], lr=lr, betas=betas, foreach=False)
        used: list[tuple[object, ...]] = []
        plain.register_step_post_hook(
            lambda *_: used.append((plain.param_groups[0]["lr"], *plain.param_groups[0]["betas"]))
        )
        optimizer = sr.DistributedOptimizer(plain, "bsp")
        for step in range(3):
            optimizer.zero_grad()
            (-float(step + 1) * x).sum().backward()
            optimizer.step()
        group = plain.param_groups[0]
        assert all(isinstance(value, torch.Tensor) for value in used[-1])
        return [float(value) for value in used[-1]], group["lr"] is lr and group["betas"] == betas

    assert sr.VirtualCluster(2).run(rank) == [([0.5, 0.5, 0.75], True)] * 2


def test_numbers_inside_tuples_are_agreed_too() -> None:
    def rank() -> tuple[float, tuple[float, float]]:
        ring = sr.ring()
        x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        betas = (0.0, 0.9) if ring.rank else (0.5, 0.99)
        optimizer = sr.DistributedOptimizer(torch.optim.Adam([x], betas=betas), "bsp")
        for step in range(3):
            optimizer.zero_grad()
            (-float(step + 1) * x).sum().backward()
            optimizer.step()
        return x.item(), optimizer.param_groups[0]["betas"]

    one, two = sr.VirtualCluster(2).run(rank)
    assert one[0] == two[0]
    assert (one[1], two[1]) == ((0.5, 0.99), (0.0, 0.9))


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_with_a_way_out() -> None:
    x = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(TypeError, match="nonsense"):
        sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "bsp", nonsense=1)
    with pytest.raises(UnsupportedError, match=r"wraps a torch\.optim\.Optimizer, not str"):
        sr.DistributedOptimizer("sgd", "bsp")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="lacks 1 of the optimizer's parameters"):
        sr.DistributedOptimizer(torch.optim.SGD([x], lr=1), "bsp", named_parameters=[])
    with pytest.raises(UnsupportedError, match="max_grad_norm is above 0"):
        sr.DistributedOptimizer(torch.optim.SGD([x], lr=1), "bsp", max_grad_norm=0)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "bsp")
    with pytest.raises(UnsupportedError, match="follows a rule already"):
        sr.DistributedOptimizer(optimizer, "bsp")
    for bad in (0, -1, float("nan"), float("inf")):
        x.grad = torch.ones(1)
        with pytest.raises(UnsupportedError, match="samples="):
            optimizer.step(samples=bad)


def test_parameters_changed_from_outside_are_noticed() -> None:
    for rule in ("bsp", "losp"):
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule, named_parameters=[("x", x)])
        one_step(optimizer, x)
        with torch.no_grad():
            x.fill_(5.0)
        x.grad = torch.ones(1)
        with pytest.raises(UnsupportedError, match="'x' was changed outside"):
            optimizer.step()
        if rule == "losp":
            with pytest.raises(UnsupportedError, match=r"optimizer.drain\(\)"):
                optimizer.reset_anchor()
        # The order that works.
        y = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([y], lr=1.0), rule)
        one_step(optimizer, y)
        optimizer.drain()
        with torch.no_grad():
            y.fill_(5.0)
        optimizer.reset_anchor()
        one_step(optimizer, y)
        optimizer.drain()
        assert y.item() == 4.0


@pytest.mark.parametrize("rule", RULES)
def test_a_step_after_the_agreed_end_is_an_error(rule: str) -> None:
    x = torch.nn.Parameter(torch.zeros(1))
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule, budget=sr.Budget(rounds=2))
    steps = 0
    while not optimizer.progress.stop:
        one_step(optimizer, x)
        steps += 1
    with pytest.raises(StoppedError, match=r"optimizer.progress.stop"):
        one_step(optimizer, x)
    optimizer.join()
    optimizer.drain()
    assert optimizer.progress.rounds == 2
    assert optimizer.progress.steps == steps


@pytest.mark.parametrize("rule", RULES)
def test_budgets_end_all_ranks_together(rule: str) -> None:
    for budget in (sr.Budget(rounds=3), sr.Budget(samples=20), sr.Budget(seconds=1.05)):

        def rank(budget: sr.Budget = budget) -> tuple[int, int, float, float]:
            x = torch.nn.Parameter(torch.zeros(1))
            optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule, budget=budget)
            while not optimizer.progress.stop:
                one_step(optimizer, x, samples=2)
            stopped = sr.ring().clock.now()
            optimizer.join()
            return optimizer.progress.rounds, optimizer.progress.steps, optimizer.progress.samples, stopped

        found = sr.VirtualCluster(3, straggler="persistent:ranks=2,factor=3").run(rank)
        assert len({(rounds, steps, samples) for rounds, steps, samples, _ in found}) == 1
        rounds, _, samples, _ = found[0]
        if budget.rounds:
            assert rounds == 3
        if budget.samples:
            assert samples >= 20
        if budget.seconds:
            assert all(1.05 <= stopped < 4 for *_, stopped in found)


@pytest.mark.parametrize("hooked", [False, True])
def test_inside_a_window_of_gradients_the_optimizers_own_step_is_left_out(hooked: bool) -> None:
    """It would do nothing; but hooks of the user's are called once a step, also after `load_state_dict`."""
    calls: list[str] = []

    class Told(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            calls.append("step")
            for x in self.param_groups[0]["params"]:
                x.sub_(x.grad)

    x = torch.nn.Parameter(torch.zeros(1))
    optimizer = sr.DistributedOptimizer(Told([x], {}), "bsp:accumulate=4")
    if hooked:
        optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(4):
            one_step(optimizer, x, samples=2)
        optimizer.drain()
    assert x.item() == -2.0
    assert optimizer.progress.samples == 16
    assert calls.count("hook") == (8 if hooked else 0)
    # The first step after a start does not know yet that it opens a window.
    assert calls.count("step") == (8 if hooked else 4)


def test_a_step_that_fails_is_not_under_way_for_ever() -> None:
    class Failing(torch.optim.Optimizer):
        fails = True

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.fails:
                raise MemoryError
            for x in self.param_groups[0]["params"]:
                x.sub_(x.grad)

    x = torch.nn.Parameter(torch.zeros(1))
    optimizer = sr.DistributedOptimizer(Failing([x], {}), "local_sgd:steps=1")
    with pytest.raises(MemoryError):
        one_step(optimizer, x)
    Failing.fails = False
    one_step(optimizer, x)
    assert (x.item(), optimizer.progress.steps) == (-1.0, 1)


def test_errors_are_one_family() -> None:
    assert issubclass(UnsupportedError, SlackringError)
    assert issubclass(StoppedError, SlackringError)


def test_a_round_whose_deltas_have_no_samples_moves_nothing() -> None:
    """All ranks overflow in the same window: nothing is divided by zero."""

    def rank() -> tuple[float, list[float]]:
        x = torch.nn.Parameter(torch.ones(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "local_sgd:steps=1,weighting=samples")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale((torch.inf if step == 0 else 1.0) * x.sum()).backward()
            scaler.step(optimizer, samples=3)
            scaler.update()
        return x.item(), [scaler.get_scale()]

    assert sr.VirtualCluster(2).run(rank) == [(0.0, [2.0])] * 2


def test_scales_may_differ_by_rank_and_an_overflow_costs_its_micro_batch_only() -> None:
    class Rows:
        def __init__(self) -> None:
            self.samples: list[float] = []

        def step(self, record: StepRecord) -> None:
            self.samples.append(record.samples)

        def round(self, record: RoundRecord) -> None:
            pass

    def rank() -> tuple[float, list[float]]:
        ring, rows = sr.ring(), Rows()
        x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "bsp:accumulate=2", recorder=rows)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0 ** (1 + ring.rank))
        for step in range(2):
            optimizer.zero_grad()
            bad = ring.rank == 1 and step == 0
            scaler.scale((torch.inf if bad else -1.0 - ring.rank) * x.sum()).backward()
            scaler.step(optimizer, samples=2)
            scaler.update()
        return x.item(), rows.samples

    one, two = sr.VirtualCluster(2).run(rank)
    assert one[0] == two[0] == pytest.approx((2 + 2 + 4) / 6)
    assert (one[1], two[1]) == ([2, 2], [0, 2])


@pytest.mark.parametrize("rule", ["bsp", "anytime:compute_time=0.25", "losp"])
def test_a_step_that_raises_leaves_the_groups_as_they_were(rule: str) -> None:
    """Inside a window of gradients the groups are empty while the optimizer's own step runs."""

    class Raising(torch.optim.SGD):
        calls = 0

        def step(self, closure: object = None) -> object:
            self.calls += 1
            if self.calls == 1:
                raise MemoryError
            return super().step(closure)

    def rank() -> tuple[int, float]:
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(Raising([x], lr=0.5), rule)
        x.grad = torch.ones(1)
        with pytest.raises(MemoryError):
            optimizer.step()
        (group,) = optimizer.param_groups
        kept = len(group["params"]), group["lr"]
        x.grad = torch.ones(1)
        optimizer.step()
        optimizer.drain()
        assert float(x.detach()) < 0
        return kept

    assert sr.VirtualCluster(1).run(rank) == [(1, 0.5)]
