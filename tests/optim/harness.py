"""A vector trained with gradients that the test gives, and all that happens to it, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

import slackring as sr
from slackring.optim.records import RoundRecord, StepRecord
from slackring.testing.scenario import WatchedRing

Vector = NDArray[np.float64]
Gradient = Callable[[int, int, Vector], Vector]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Trace:
    """One rank: models after its own optimizer (`own`) and after the merge (`model`), and anchors, by local step."""

    start: Vector
    own: list[Vector] = field(default_factory=list)
    model: list[Vector] = field(default_factory=list)
    anchor: list[Vector] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    last: Vector = field(default_factory=lambda: np.zeros(0))
    returned: int = -1
    sent: list[str] = field(default_factory=list)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def round(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def windows(self) -> list[tuple[Vector, Vector, Vector, Vector, int]]:
        """By round: model at the window's start and end, after the merge at its end, the anchor then, and its steps.

        Without the last window, which may have been closed by the end and not by a step.
        """
        found, start = [], self.start
        for number in range(len(self.rounds)):
            mine = [i for i, record in enumerate(self.steps) if record.round == number]
            if mine:
                last = mine[-1]
                found.append((start, self.own[last], self.model[last], self.anchor[last], len(mine)))
                start = self.model[last]
        return found[:-1]


def sgd(lr: float = 0.1, momentum: float = 0.0) -> MakeOptimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def train(
    rule: str,
    gradient: Gradient,
    steps: Sequence[int],
    *,
    start: Sequence[float] = (0.0,),
    optimizer: MakeOptimizer | None = None,
    speeds: Sequence[float] | None = None,
    network: sr.Network | None = None,
    samples: Callable[[int, int], float] = lambda rank, step: 1.0,
    end: str = "join",
    budget: sr.Budget | None = None,
) -> list[Trace]:
    """Train on as many virtual ranks as `steps` has numbers; `speeds` are seconds a step."""

    def rank() -> Trace:
        ring = sr.ring()
        seconds = [(speeds or [0.1] * ring.size)[ring.rank]] * steps[ring.rank]
        watched = WatchedRing(ring, seconds)
        x = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        trace = Trace(np.array(start, dtype=float))
        plain = (optimizer or sgd())([x])
        plain.register_step_post_hook(lambda *_: trace.own.append(x.detach().numpy().copy()))
        wrapped = sr.DistributedOptimizer(plain, rule, recorder=trace, ring=watched, budget=budget)
        for step in range(steps[ring.rank]):
            if wrapped.progress.stop:
                break
            x.grad = torch.from_numpy(np.array(gradient(ring.rank, step, x.detach().numpy().copy()), dtype=float))
            wrapped.step(samples=samples(ring.rank, step))
            trace.model.append(x.detach().numpy().copy())
            with wrapped.consensus():
                trace.anchor.append(x.detach().numpy().copy())
        if end == "join":
            trace.returned = wrapped.join()
        else:
            wrapped.drain()
        trace.last = x.detach().numpy().copy()
        trace.sent = watched.sent
        return trace

    return sr.VirtualCluster(len(steps), network=network).run(rank)
