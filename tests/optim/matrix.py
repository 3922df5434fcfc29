"""Every rule x everything that scripts do with an optimizer: each cell is tried on two virtual ranks, against exact values.

``python -m tests.optim.matrix`` writes what it finds to docs/contract.md; test_matrix.py checks each cell, and that page.

Most features are a script that runs on two ranks under the rule, and with the plain optimizer for what must come out. That is
exact because the losses are linear: gradients do not depend on where the model is, so that no rule may lose or repeat any.
Under a delta rule the ranks' own plain runs are averaged; under a gradient rule one plain run is given the mean gradient.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

import slackring as sr
from slackring.errors import UnsupportedError
from slackring.optim.optimizer import _HOROVOD_ARGUMENTS

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"
GRADIENT_RULES = ("bsp", "bsp:accumulate=2", "anytime:compute_time=0.1,staleness=1")
DELTA_RULES = ("local_sgd:steps=2", "elastic_bsp", "osp", "losp", "cocod:steps=2")
RULES = (*GRADIENT_RULES, *DELTA_RULES)
PLANNED_RULES = ("anytime:compute_time=0.1,staleness=1", "elastic_bsp")  # windows differ by rank
PULLS = (1.0, 3.0)  # what the ranks' losses multiply parameters with; their mean is 2
STEPS = 4


@dataclass(frozen=True)
class Feature:
    """Something scripts do, a function that tries it under a rule, and the rules that must refuse it."""

    section: str
    title: str
    attempt: Callable[[str], None]
    refused_by: tuple[str, ...]


FEATURES: list[Feature] = []


def feature(
    section: str, title: str, refused_by: Sequence[str] = ()
) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    def add(attempt: Callable[[str], None]) -> Callable[[str], None]:
        FEATURES.append(Feature(section, title, attempt, tuple(refused_by)))
        return attempt

    return add


@functools.cache
def outcome(tried: Feature, rule: str) -> str:
    """ "works", or "refused: " and the sentence that says so; anything else is an error."""
    try:
        tried.attempt(rule)
    except UnsupportedError as error:
        return f"refused: {error}"
    return "works"


# -- scripts, and what they must come to -----------------------------------------------------------------------------------


class Plain:
    """A script's optimizer without Slackring; gradients come once in `every` steps, as where a window closes."""

    def __init__(self, pull: float, every: int = 1) -> None:
        self.pull, self._every, self._steps = pull, every, 0

    def wrap(self, optimizer: torch.optim.Optimizer, **_: Any) -> Any:
        return optimizer

    def step(self, optimizer: Any) -> None:
        self._steps += 1
        if self._steps % self._every:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        optimizer.step()

    def drain(self, optimizer: Any) -> None:
        pass


class Ruled:
    """A script's optimizer under a rule, on the ambient ring."""

    def __init__(self, rule: str) -> None:
        self.pull, self.rule = PULLS[sr.ring().rank], rule

    def wrap(self, optimizer: torch.optim.Optimizer, **options: Any) -> sr.RelaxedOptimizer:
        return sr.DistributedOptimizer(optimizer, self.rule, **options)

    def step(self, optimizer: sr.RelaxedOptimizer) -> None:
        optimizer.step(samples=2)

    def drain(self, optimizer: sr.RelaxedOptimizer) -> None:
        optimizer.drain()


Hand = Plain | Ruled
Script = Callable[[Hand], list[Tensor]]


def window(rule: str) -> int:
    """Local steps that make one step of the optimizer."""
    return 2 if rule == "bsp:accumulate=2" else 1


def on_ranks(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Call a function on two ranks, the second one slower."""
    one, two = sr.VirtualCluster(2, straggler="persistent:ranks=1,factor=2").run(function)
    return one, two


def same_as_plain(rule: str, script: Script) -> None:
    one, two = on_ranks(lambda: [tensor.detach().clone() for tensor in script(Ruled(rule))])
    if rule in GRADIENT_RULES:
        wanted = script(Plain(sum(PULLS) / 2, window(rule)))
    else:
        wanted = [sum(tensors) / 2 for tensors in zip(*(script(Plain(pull)) for pull in PULLS), strict=True)]  # type: ignore[misc]
    for mine, theirs, right in zip(one, two, wanted, strict=True):
        assert torch.equal(mine, theirs), "ranks differ"
        torch.testing.assert_close(mine, right.detach(), rtol=1e-5, atol=1e-6)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.ones(shape or (2,), dtype=dtype))


def move(
    hand: Hand, optimizer: Any, parameters: Sequence[Tensor], schedule: Any = None, steps: int = STEPS, *told: Any
) -> None:
    """Local steps on a linear loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        (hand.pull * sum(tensor.sum() for tensor in parameters)).backward()  # type: ignore[union-attr]
        hand.step(optimizer)
        if schedule is not None:
            schedule.step(*told)


def steps_of(rule: str) -> int:
    """Steps of the optimizer in `STEPS` local steps."""
    return STEPS // window(rule)


def lands_on(rule: str, train: Callable[[], float], gradient: float, delta: float) -> None:
    """What ranks that start from 0 with lr 1 return is minus these numbers."""
    wanted = gradient if rule in GRADIENT_RULES else delta
    assert on_ranks(train) == (pytest.approx(-wanted, abs=1e-5),) * 2


# -- learning rates --------------------------------------------------------------------------------------------------------

RATES = "Learning rates"
SCHEDULES: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], tuple[Any, ...]]] = {
    "exponential decay": (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5), ()),
    "warm-up": (lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3), ()),
    "reduce on plateau": (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), (1.0,)),
    "one cycle, which moves the momentum too": (
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=STEPS + 1),
        (),
    ),
}


def _scheduled(name: str, before: bool, rule: str) -> None:
    make, told = SCHEDULES[name]

    def script(hand: Hand) -> list[Tensor]:
        x = parameter()
        plain = torch.optim.SGD([x], lr=1.0, momentum=0.5)
        schedule = make(plain) if before else None
        optimizer = hand.wrap(plain)
        schedule = schedule or make(optimizer)
        rates = {plain.param_groups[0]["lr"]}
        for _ in range(STEPS):
            move(hand, optimizer, [x], schedule, 1, *told)
            rates.add(plain.param_groups[0]["lr"])
        hand.drain(optimizer)
        assert len(rates) > 2
        return [x]

    same_as_plain(rule, script)


for _name in SCHEDULES:
    for _before in (True, False):
        feature(RATES, f"{_name}; made {'before' if _before else 'after'} wrapping")(
            functools.partial(_scheduled, _name, _before)
        )


@feature(
    RATES, "a schedule goes on after `load_state_dict` (Horovod and torch's PostLocalSGDOptimizer: rates part ways)"
)
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        x = parameter()
        plain = torch.optim.SGD([x], lr=1.0)
        schedule = lr_scheduler.ExponentialLR(plain, 0.5)
        optimizer = hand.wrap(plain)
        move(hand, optimizer, [x], schedule, 2)
        hand.drain(optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        move(hand, optimizer, [x], schedule, 2)
        hand.drain(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.5**4
        return [x]

    same_as_plain(rule, script)


@feature(RATES, "a schedule made after `load_state_dict`")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        x = parameter()
        optimizer = hand.wrap(torch.optim.SGD([x], lr=1.0))
        optimizer.load_state_dict(torch.optim.SGD([parameter()], lr=0.5).state_dict())
        move(hand, optimizer, [x], lr_scheduler.ExponentialLR(optimizer, 0.5))
        hand.drain(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.5**5
        return [x]

    same_as_plain(rule, script)


@feature(RATES, "a schedule that follows `progress.samples` gives all ranks one rate after the same round")
def _(rule: str) -> None:
    def train() -> dict[int, float]:
        x = parameter()
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + optimizer.progress.samples))
        rates = {}
        for _ in range(8):
            move(Ruled(rule), optimizer, [x], schedule, 1)
            rates[optimizer.progress.rounds] = optimizer.param_groups[0]["lr"]
        optimizer.drain()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / (1 + 2 * 2 * 8))
        return rates

    one, two = on_ranks(train)
    met = sorted(one.keys() & two.keys())
    assert len(met) >= 3
    assert [one[rounds] for rounds in met] == [two[rounds] for rounds in met]
    assert [one[rounds] for rounds in met] == sorted((one[rounds] for rounds in met), reverse=True)


@feature(RATES, "a learning rate that is a tensor")
def _(rule: str) -> None:
    _trains(lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False), rule)


# -- gradients -------------------------------------------------------------------------------------------------------------

GRADIENTS = "Mixed precision, accumulation and clipping"


@feature(GRADIENTS, "`GradScaler`, and one rank overflows (torch's PostLocalSGDOptimizer: hangs)")
def _(rule: str) -> None:
    def train() -> float:
        rank = sr.ring().rank
        x = Parameter(torch.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale((torch.inf if (rank, step) == (1, 0) else PULLS[rank]) * x.sum()).backward()
            scaler.step(optimizer, samples=2)
            scaler.update()
        optimizer.drain()
        assert scaler.get_scale() == (4.0, 2.0)[rank]
        return x.item()

    # Synchronous ranks skip together; else the micro-batch alone is lost: with one of each window, or in the first window.
    gradient = {"bsp": 3 * 2.0, "bsp:accumulate=2": (1 + 1 + 3) / 3 + 2}.get(rule, 1 + 3 * 2.0)
    lands_on(rule, train, gradient, delta=(4 * 1 + 3 * 3) / 2)


@feature(GRADIENTS, "`GradScaler.unscale_`, own clipping, then `GradScaler.step`")
def _(rule: str) -> None:
    def train() -> float:
        x = Parameter(torch.zeros(1))
        hand = Ruled(rule)
        optimizer = hand.wrap(torch.optim.SGD([x], lr=1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(hand.pull * x.sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([x], 1.5)
            scaler.step(optimizer, samples=2)
            scaler.update()
        optimizer.drain()
        return x.item()

    # Each rank clips its own gradient.
    lands_on(rule, train, steps_of(rule) * (1 + 1.5) / 2, STEPS * (1 + 1.5) / 2)


@feature(GRADIENTS, "autocast")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = hand.wrap(torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(torch.ones(4, 2))
                assert output.dtype == torch.bfloat16
            (hand.pull * output.sum()).backward()
            hand.step(optimizer)
        hand.drain(optimizer)
        return list(model.parameters())

    same_as_plain(rule, script)


@feature(GRADIENTS, "several backward passes before one `step()`")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        x = parameter()
        optimizer = hand.wrap(torch.optim.SGD([x], lr=0.5))
        for _ in range(STEPS):
            optimizer.zero_grad()
            for _ in range(3):
                (hand.pull * x.sum() / 3).backward()
            hand.step(optimizer)
        hand.drain(optimizer)
        return [x]

    same_as_plain(rule, script)


@feature(GRADIENTS, "`max_grad_norm=` clips the average (gradient rules) or each rank's own gradient (delta rules)")
def _(rule: str) -> None:
    def train() -> float:
        x = Parameter(torch.zeros(1))
        hand = Ruled(rule)
        optimizer = hand.wrap(torch.optim.SGD([x], lr=1.0), max_grad_norm=1.5)
        move(hand, optimizer, [x])
        optimizer.drain()
        return x.item()

    lands_on(rule, train, steps_of(rule) * 1.5, STEPS * (1 + 1.5) / 2)


@feature(
    GRADIENTS, "a closure, by position and by name, evaluated once (Horovod: steps on a gradient that is not averaged)"
)
def _(rule: str) -> None:
    def train() -> float:
        x = Parameter(torch.zeros(1))
        hand = Ruled(rule)
        optimizer = hand.wrap(torch.optim.SGD([x], lr=1.0))
        evaluated = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = hand.pull * (x.sum() - x.detach() + 1)
            loss.backward()
            evaluated.append(loss)
            return loss

        for step in range(STEPS):
            loss = optimizer.step(closure=closure, samples=2) if step % 2 else optimizer.step(closure, samples=2)
            assert loss.item() == hand.pull
        optimizer.drain()
        assert len(evaluated) == STEPS
        return x.item()

    lands_on(rule, train, steps_of(rule) * 2, STEPS * 2)


@feature(GRADIENTS, "`samples=` that counts tokens, a different number on each rank")
def _(rule: str) -> None:
    def train() -> float:
        x = Parameter(torch.zeros(1))
        rank = sr.ring().rank
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (PULLS[rank] * x.sum()).backward()
            optimizer.step(samples=(30, 10)[rank])
        optimizer.drain()
        assert optimizer.progress.samples == 40 * STEPS
        return x.item()

    # Under gradient rules every token counts alike; under delta rules every local step does, unless weighting= says otherwise.
    lands_on(rule, train, steps_of(rule) * (30 * 1 + 10 * 3) / 40, STEPS * 2)


# -- the optimizer's contract ----------------------------------------------------------------------------------------------

CONTRACT = "The optimizer's own contract"


@feature(CONTRACT, "state and groups from before wrapping are kept (Horovod: state is lost)")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        x, y = parameter(), parameter()
        plain = torch.optim.SGD([{"params": [x], "lr": 0.5}, {"params": [y]}], lr=0.1, momentum=0.5)
        x.grad, y.grad = torch.ones(2), torch.ones(2)
        plain.step()  # alike on every rank
        state, defaults = repr(plain.state_dict()), dict(plain.defaults)
        optimizer = hand.wrap(plain)
        assert optimizer is plain
        assert isinstance(optimizer, torch.optim.SGD)
        assert (repr(optimizer.state_dict()), optimizer.defaults) == (state, defaults)
        move(hand, optimizer, [x, y])
        hand.drain(optimizer)
        return [x, y]

    same_as_plain(rule, script)


@feature(CONTRACT, "a group added after `drain()`, with its settings (Horovod: the wrong ones, and not averaged)")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        x, y = parameter(), parameter(3)
        optimizer = hand.wrap(torch.optim.SGD([x], lr=0.5, momentum=0.5))
        move(hand, optimizer, [x], steps=2)
        hand.drain(optimizer)
        optimizer.add_param_group({"params": [y], "lr": 0.25})
        assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.5, 0.5), (0.25, 0.5)]
        move(hand, optimizer, [x, y])
        hand.drain(optimizer)
        return [x, y]

    same_as_plain(rule, script)


@feature(CONTRACT, "a group added while a window is open", refused_by=RULES)
def _(rule: str) -> None:
    def train() -> None:
        x = parameter()
        hand = Ruled(rule)
        optimizer = hand.wrap(torch.optim.SGD([x], lr=0.5))
        move(hand, optimizer, [x], steps=1)
        optimizer.add_param_group({"params": [parameter()]})

    on_ranks(train)


@feature(CONTRACT, "both forms of `zero_grad` (Horovod: TypeError)")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        x = parameter()
        optimizer = hand.wrap(torch.optim.SGD([x], lr=0.5))
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            assert (x.grad is None) if step % 2 == 0 else (x.grad is None or not x.grad.any())
            (hand.pull * x.sum()).backward()
            hand.step(optimizer)
        hand.drain(optimizer)
        return [x]

    same_as_plain(rule, script)


@feature(CONTRACT, "step hooks run once a step (Horovod: twice)")
def _(rule: str) -> None:
    def train() -> dict[str, int]:
        parameters = [parameter() for _ in range(3)]
        plain = torch.optim.SGD([{"params": [x]} for x in parameters], lr=0.1)
        calls = {"pre": 0, "post": 0}
        plain.register_step_pre_hook(lambda *_: calls.update(pre=calls["pre"] + 1))
        hand = Ruled(rule)
        optimizer = hand.wrap(plain)
        optimizer.register_step_post_hook(lambda *_: calls.update(post=calls["post"] + 1))
        move(hand, optimizer, parameters)
        assert calls == {"pre": STEPS, "post": STEPS}
        optimizer.drain()
        assert (optimizer.progress.steps, optimizer.progress.samples) == (2 * STEPS, 4 * STEPS)
        return calls

    on_ranks(train)


@feature(CONTRACT, "`pickle` and `deepcopy` give the plain optimizer (Horovod: cannot be pickled)")
def _(rule: str) -> None:
    def train() -> None:
        x = parameter()
        hand = Ruled(rule)
        optimizer = hand.wrap(torch.optim.SGD([x], lr=0.1, momentum=0.9))
        move(hand, optimizer, [x])
        optimizer.drain()
        for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert type(twin) is torch.optim.SGD
            theirs = optimizer.state_dict()
            del theirs["slackring"]  # a plain optimizer has no rounds
            assert repr(twin.state_dict()) == repr(theirs)
            (copied,) = twin.param_groups[0]["params"]
            before = copied.detach().clone()
            copied.grad = torch.ones(2)
            twin.step()
            assert not torch.equal(copied, before)
        move(hand, optimizer, [x])  # the original goes on
        optimizer.drain()

    on_ranks(train)


@feature(CONTRACT, "a plain optimizer's state dict loads, and this one loads into a plain one")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        donor_x, x = parameter(), parameter()
        donor = torch.optim.SGD([donor_x], lr=0.5, momentum=0.5)
        donor_x.grad = torch.ones(2)
        donor.step()
        optimizer = hand.wrap(torch.optim.SGD([x], lr=0.1, momentum=0.1))
        optimizer.load_state_dict(donor.state_dict())
        move(hand, optimizer, [x])
        hand.drain(optimizer)
        donor.load_state_dict(optimizer.state_dict())
        assert torch.equal(donor.state[donor_x]["momentum_buffer"], optimizer.state[x]["momentum_buffer"])
        return [x]

    same_as_plain(rule, script)


@feature(CONTRACT, "two optimizers in one process, parameters of the same names (GANs)", refused_by=PLANNED_RULES)
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        torch.manual_seed(0)
        models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
        optimizers = [
            hand.wrap(torch.optim.SGD(model.parameters(), lr=lr), named_parameters=model.named_parameters())
            for model, lr in zip(models, (0.5, 0.25), strict=True)
        ]
        # Other hands, so that each optimizer's windows are its own.
        hands = [copy.copy(hand) for _ in models]
        for _ in range(STEPS):
            for model, optimizer, own in zip(models, optimizers, hands, strict=True):
                move(own, optimizer, list(model.parameters()), steps=1)
        for own, optimizer in zip(hands, optimizers, strict=True):
            own.drain(optimizer)
        return [value for model in models for value in model.parameters()]

    same_as_plain(rule, script)


@feature(CONTRACT, "a GAN, whose generator's backward pass reaches the discriminator", refused_by=PLANNED_RULES)
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        real, fake = parameter(), parameter(3)
        discriminator, generator = (hand.wrap(torch.optim.SGD([x], lr=0.5, momentum=0.5)) for x in (real, fake))
        hands = copy.copy(hand), copy.copy(hand)  # each optimizer's windows are its own
        for _ in range(STEPS):
            move(hands[0], discriminator, [real], steps=1)
            move(hands[1], generator, [fake, real], steps=1)
        hands[0].drain(discriminator)
        hands[1].drain(generator)
        return [real, fake]

    same_as_plain(rule, script)


# -- models ----------------------------------------------------------------------------------------------------------------

MODELS = "Models"


@feature(
    MODELS, "frozen parameters, and such as no loss reaches, stay as they are (Horovod: weight decay shrinks them)"
)
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        used, unused, frozen = parameter(), parameter(), parameter().requires_grad_(False)
        groups = [{"params": [used]}, {"params": [unused, frozen], "weight_decay": 0.5}]
        optimizer = hand.wrap(torch.optim.SGD(groups, lr=0.5))
        move(hand, optimizer, [used])
        hand.drain(optimizer)
        assert unused.tolist() == frozen.tolist() == [1.0, 1.0]
        return [used, unused, frozen]

    same_as_plain(rule, script)


@feature(MODELS, "parameters that get a gradient on some ranks only (torch's averager: averages different ones)")
def _(rule: str) -> None:
    def train() -> list[float]:
        pair = [Parameter(torch.zeros(1)), Parameter(torch.zeros(1))]
        hand = Ruled(rule)
        optimizer = hand.wrap(torch.optim.SGD(pair, lr=1.0))
        move(hand, optimizer, [pair[sr.ring().rank]])
        optimizer.drain()
        return [x.item() for x in pair]

    assert on_ranks(train) == ([-steps_of(rule) * 1 / 2, -steps_of(rule) * 3 / 2],) * 2


@feature(MODELS, "tied weights")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        torch.nn.init.ones_(model[0].weight)
        model[1].weight = model[0].weight
        optimizer = hand.wrap(torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters())
        move(hand, optimizer, [model[0].weight, model[1].weight])
        hand.drain(optimizer)
        assert model[1].weight is model[0].weight
        return [model[0].weight]

    same_as_plain(rule, script)


@feature(MODELS, "BatchNorm's statistics, with `named_buffers=`")
def _(rule: str) -> None:
    def train() -> tuple[float, float, int]:
        model = torch.nn.BatchNorm1d(1, momentum=1.0)
        hand = Ruled(rule)
        optimizer = hand.wrap(torch.optim.SGD(model.parameters(), lr=0.1), named_buffers=model.named_buffers())
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(hand.pull * torch.tensor([[0.0], [2.0]])).sum().backward()
            hand.step(optimizer)
        optimizer.drain()
        assert model.running_mean is not None
        assert model.running_var is not None
        assert model.num_batches_tracked is not None
        return model.running_mean.item(), model.running_var.item(), int(model.num_batches_tracked)

    # Means 1 and 3, variances 2 and 18; equal speeds, so that both ranks are in the last round that averages.
    assert sr.VirtualCluster(2).run(train) == [(2.0, 10.0, STEPS)] * 2


def _sparse(make: Callable[..., torch.optim.Optimizer], rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        table = torch.nn.Embedding(4, 1, sparse=True)
        torch.nn.init.ones_(table.weight)
        optimizer = hand.wrap(make(list(table.parameters()), lr=0.5))
        for step in range(STEPS):
            optimizer.zero_grad()
            (hand.pull * table(torch.tensor([step, 0])).sum()).backward()
            hand.step(optimizer)
        hand.drain(optimizer)
        return [table.weight]

    same_as_plain(rule, script)


for _sparse_optimizer in (torch.optim.SGD, torch.optim.SparseAdam):
    feature(MODELS, f"embeddings with sparse gradients, {_sparse_optimizer.__name__}", refused_by=GRADIENT_RULES)(
        functools.partial(_sparse, _sparse_optimizer)
    )


@feature(MODELS, "channels-last")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = hand.wrap(torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
        inputs = torch.arange(27.0).reshape(1, 3, 3, 3).div(27).to(memory_format=torch.channels_last)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (hand.pull * model(inputs).sum()).backward()
            hand.step(optimizer)
        hand.drain(optimizer)
        weight = next(model.parameters())
        assert weight.is_contiguous(memory_format=torch.channels_last)
        return list(model.parameters())

    same_as_plain(rule, script)


@feature(MODELS, "float32 and float64 parameters together")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        both = [parameter(), parameter(3, dtype=torch.float64)]
        optimizer = hand.wrap(torch.optim.SGD(both, lr=0.5, momentum=0.5))
        move(hand, optimizer, both)
        hand.drain(optimizer)
        assert [x.dtype for x in both] == [torch.float32, torch.float64]
        return list(both)

    same_as_plain(rule, script)


def _narrow(dtypes: Sequence[torch.dtype], rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        parameters = [parameter(2, 3, dtype=dtype) for dtype in dtypes]
        optimizer = hand.wrap(torch.optim.SGD(parameters, lr=0.5, momentum=0.5))
        move(hand, optimizer, parameters)
        hand.drain(optimizer)
        assert [x.dtype for x in parameters] == list(dtypes)
        return list(parameters)

    same_as_plain(rule, script)


for _title, _dtypes in {
    "bfloat16 parameters (Horovod: refused when it sends them)": (torch.bfloat16,),
    "float16 parameters": (torch.float16,),
    "float32, bfloat16 and float16 parameters together": (torch.bfloat16, torch.float32, torch.float16),
}.items():
    feature(MODELS, _title)(functools.partial(_narrow, _dtypes))


@feature(MODELS, '`anchor_device="cpu"`')
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        parameters = [parameter(), parameter(3, dtype=torch.bfloat16)]
        optimizer = hand.wrap(torch.optim.SGD(parameters, lr=0.5), anchor_device="cpu")
        move(hand, optimizer, parameters)
        hand.drain(optimizer)
        return list(parameters)

    same_as_plain(rule, script)


@feature(MODELS, "complex parameters", refused_by=RULES)
def _(rule: str) -> None:
    on_ranks(lambda: Ruled(rule).wrap(torch.optim.SGD([parameter(dtype=torch.complex64)], lr=0.5)))


@feature(MODELS, "`torch.compile`d models")
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        optimizer = hand.wrap(torch.optim.SGD(model.parameters(), lr=0.125))
        # Traced, with its graph run as it is: what a backend makes of the graph is none of the optimizer's business.
        compiled = torch.compile(model, backend="eager")
        for _ in range(STEPS):
            optimizer.zero_grad()
            (hand.pull * compiled(torch.ones(2, 2)).sum()).backward()
            hand.step(optimizer)
        hand.drain(optimizer)
        return list(model.parameters())

    same_as_plain(rule, script)


@feature(MODELS, "EMA weights, updated inside `consensus()`")
def _(rule: str) -> None:
    def train() -> tuple[list[float], list[float]]:
        model = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        hand = Ruled(rule)
        optimizer = hand.wrap(torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(STEPS):
            move(hand, optimizer, list(model.parameters()), steps=1)
            with optimizer.consensus():
                average.update_parameters(model)
        optimizer.drain()
        trained = [value.item() for tensor in model.parameters() for value in tensor.ravel()]
        return trained, [value.item() for tensor in average.parameters() for value in tensor.ravel()]

    # Equal speeds: both ranks look at the same anchors.
    (one, average_of_one), two = sr.VirtualCluster(2).run(train)
    assert two == (one, average_of_one)
    assert one == [-2.0 * steps_of(rule)] * 3  # looking changed nothing
    assert all(-2.0 * steps_of(rule) < value < 0 for value in average_of_one)


# -- optimizers ------------------------------------------------------------------------------------------------------------

OPTIMIZERS = "Optimizers"


class Fading(torch.optim.Optimizer):
    """A user's own class: a rate that fades by a count in the state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    state = self.state[x]
                    state["count"] = state.get("count", 0) + 1
                    x.sub_(x.grad, alpha=group["lr"] / state["count"])


class Extended(torch.optim.SGD):
    """A class that extends one of torch's and calls its ``step()``, which torch hooks as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _trains(make: Callable[[list[Parameter]], torch.optim.Optimizer], rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        parameters = [parameter(), parameter(2, 3)]
        optimizer = hand.wrap(make(parameters))
        move(hand, optimizer, parameters)
        hand.drain(optimizer)
        return list(parameters)

    same_as_plain(rule, script)


MAKE: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD, Nesterov momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, weight_decay=0.0),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
    "`slackring.optim.DualAveraging`": lambda parameters: sr.optim.DualAveraging(parameters, lr=0.1, growth=0.5),
    "a class of your own": lambda parameters: Fading(parameters, lr=0.1),
    "a class of your own that extends torch's and calls its `step()`": lambda parameters: Extended(parameters, lr=0.1),
    "`foreach=True`": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
    "`fused=True`": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "`fused=True` with a learning rate that is a tensor": lambda parameters: torch.optim.SGD(
        parameters, lr=torch.tensor(0.1), momentum=0.9, fused=True
    ),
    "betas that are tensors": lambda parameters: torch.optim.Adam(
        parameters, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
}
for _name, _make in MAKE.items():
    feature(OPTIMIZERS, _name)(functools.partial(_trains, _make))


@feature(OPTIMIZERS, "`capturable=True` on a CPU: torch's own error comes through")
def _(rule: str) -> None:
    with pytest.raises(AssertionError, match="If capturable=True, params and state_steps must be on supported devices"):
        _trains(lambda parameters: torch.optim.Adam(parameters, lr=0.1, capturable=True), rule)


@feature(OPTIMIZERS, "LBFGS", refused_by=RULES)
def _(rule: str) -> None:
    on_ranks(lambda: Ruled(rule).wrap(torch.optim.LBFGS([parameter()])))


# -- what Horovod's wrapper has --------------------------------------------------------------------------------------------

HOROVODS = "Horovod's own arguments and methods"


def _argument(name: str, rule: str) -> None:
    on_ranks(lambda: Ruled(rule).wrap(torch.optim.SGD([parameter()], lr=0.1), **{name: 1}))


def _method(name: str, rule: str) -> None:
    on_ranks(lambda: getattr(Ruled(rule).wrap(torch.optim.SGD([parameter()], lr=0.1)), name)())


@feature(HOROVODS, '`compression="fp16"`, and `hvd.Compression.fp16`')
def _(rule: str) -> None:
    def script(hand: Hand) -> list[Tensor]:
        x = parameter()
        optimizer = hand.wrap(torch.optim.SGD([x], lr=0.5), compression="fp16")
        move(hand, optimizer, [x])
        hand.drain(optimizer)
        return [x]

    same_as_plain(rule, script)


@feature(HOROVODS, '`compression="bf16"`', refused_by=RULES)
def _(rule: str) -> None:
    on_ranks(lambda: Ruled(rule).wrap(torch.optim.SGD([parameter()], lr=0.1), compression="bf16"))


for _name in _HOROVOD_ARGUMENTS:
    feature(HOROVODS, f"`{_name}=`", refused_by=RULES)(functools.partial(_argument, _name))
for _name in ("synchronize", "skip_synchronize"):
    feature(HOROVODS, f"`{_name}()`", refused_by=RULES)(functools.partial(_method, _name))


# -- the page --------------------------------------------------------------------------------------------------------------

HEAD = """\
# What keeps working, by rule

`sr.DistributedOptimizer` gives back your own optimizer; these tables list what scripts do with one. "works" has been tried on two
virtual ranks, against exact values; "refused" has a number, and the sentence of that number, at the end, says what to do instead.
In brackets: what other packages make of it. Process sets need real ranks: `tests/multirank/test_process_sets.py` tries
`process_set=` on four, over Horovod and over `torch.distributed`. `tests/multirank/test_peers.py` tries
`hvd.broadcast_optimizer_state`, before wrapping, with six optimizers, fresh or trained. `capturable=True` needs a GPU: its test
in `tests/optim/test_devices.py` has not been run on one.

This page is written by `python -m tests.optim.matrix`; a test fails if it is out of date.
"""


def page() -> str:
    """The table as a page of Markdown."""
    lines, sentences = [HEAD], []
    for section in dict.fromkeys(tried.section for tried in FEATURES):
        lines += [
            f"## {section}",
            "",
            "| | " + " | ".join(f"`{rule}`" for rule in RULES) + " |",
            "|---" * (len(RULES) + 1) + "|",
        ]
        for tried in (tried for tried in FEATURES if tried.section == section):
            cells = []
            for rule in RULES:
                kind, _, sentence = outcome(tried, rule).partition(": ")
                if sentence and sentence not in sentences:
                    sentences.append(sentence)
                cells.append(f"{kind} ({sentences.index(sentence) + 1})" if sentence else kind)
            lines.append(f"| {tried.title} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["## Refusals", "", *(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
