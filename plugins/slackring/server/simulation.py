"""The events of a parameter server and its workers, in the order of a virtual clock."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from slackring.errors import DivergedError
from slackring.optim.progress import Budget, Progress
from slackring.ring.network import Network
from slackring.ring.random_state import RandomState

if TYPE_CHECKING:
    from slackring.server.policies import Gate

__all__ = ["Push", "Simulation"]

Gradient = tuple[Tensor | None, ...]

_NANO = 1_000_000_000
_SENT, _ARRIVED = 0, 1  # at the same time, sending comes first


class Push(NamedTuple):
    """One local step of a worker, and what became of its gradient. All times are in virtual seconds.

    Attributes
    ----------
    worker, step
        Whose, and the how many-th, both from 0.
    round
        Counts the moments at which the server gave its OK; workers that got it together have the same.
    started
        When the worker had the weights and began to compute.
    sent, arrived
        When the gradient left the worker, and when the server had it.
    answered, received
        When the server gave its OK, and when the worker had the new weights; ``answered - arrived`` is what it was held.
    staleness
        Updates of the server's weights between those that the gradient was computed on and its own.
    lead
        How many pushes the worker was ahead of the slowest one when this one had arrived.
    training
        Workers that had not left when the server gave its OK.
    samples
        Samples in the mini-batch.
    loss
        Mean loss of the mini-batch.
    """

    worker: int
    step: int
    round: int
    started: float
    sent: float
    arrived: float
    answered: float
    received: float
    staleness: int
    lead: int
    training: int
    samples: int
    loss: float


@dataclass
class _Step:
    """A local step whose worker has no OK yet; times in nanoseconds."""

    step: int
    started: int
    sent: int
    version: int
    samples: int
    loss: float
    gradient: Gradient
    arrived: int = 0
    lead: int = 0
    staleness: int = 0


class _Link:
    """One direction of the server's link: messages of one size queue for it, first come, first served."""

    def __init__(self, network: Network, nbytes: int) -> None:
        self._latency, self._transfer = round(network.latency * _NANO), round(nbytes / network.bandwidth * _NANO)
        self._free = 0

    def arrival(self, now: int) -> int:
        """When a message that is sent now will be there."""
        self._free = max(self._free, now) + self._transfer
        return self._free + self._latency


class Simulation:
    """One run of a parameter server; :meth:`slackring.ParameterServer.run` documents what it is made of.

    The server's model serves all workers: a worker's gradient is computed when the server gives its OK, on the weights that the
    worker gets then, and put aside until its push arrives.
    """

    def __init__(
        self,
        gate: Gate,
        step_seconds: Callable[[int, int], float],
        network: Network,
        seed: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        batches: Sequence[Iterable[tuple[Tensor, Tensor]]],
        budget: Budget,
        on_update: Callable[[float, Progress], bool | None],
    ) -> None:
        self._gate, self._step_seconds, self._seed = gate, step_seconds, seed
        self._model, self._optimizer, self._loss, self._batches = model, optimizer, loss, batches
        self._budget, self._on_update = budget, on_update
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        nbytes = sum(parameter.nbytes for parameter in self._parameters)
        self._up, self._down = _Link(network, nbytes), _Link(network, nbytes)
        self._due: list[tuple[int, int, int]] = []  # (ns, what happens, worker)
        self._steps = [0] * len(batches)
        self._open: dict[int, _Step] = {}
        self._pool: set[int] = set()
        self.progress = Progress()
        self.updates = 0
        self._updated = False
        self.pushes: list[Push] = []

    def run(self) -> None:
        """Play all events until every worker has left."""
        caller, threads = RandomState(), torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # as on virtual ranks: the same sums on every machine
            self._states = [RandomState.seeded(self._seed, worker) for worker in range(len(self._batches))]
            self._streams = [iter(batches) for batches in self._batches]
            self._leave([worker for worker in range(len(self._batches)) if not self._begin(worker, 0)], 0)
            while self._due:
                now, event, worker = heapq.heappop(self._due)
                if event == _SENT:
                    heapq.heappush(self._due, (self._up.arrival(now), _ARRIVED, worker))
                    continue
                workers = [worker]
                while self._due and self._due[0][:2] == (now, _ARRIVED):
                    workers.append(heapq.heappop(self._due)[2])
                self._receive(workers, now)
        finally:
            caller.restore()
            torch.set_num_threads(threads)

    def _begin(self, worker: int, now: int) -> bool:
        """Have a worker compute its next gradient; False if it has nothing left to do."""
        if self.progress.stop:
            return False
        self._states[worker].restore()
        batch = next(self._streams[worker], None)
        if batch is None:
            return False
        x, y = batch
        loss = self._loss(self._model(x), y)
        value, step = loss.item(), self._steps[worker]
        if not math.isfinite(value):
            raise DivergedError(
                f"the loss of worker {worker} was not a finite number at its local step {step}; use a lower learning rate."
            )
        gradient = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        self._states[worker].capture()
        sent = now + max(round(self._step_seconds(worker, step) * _NANO), 1)
        self._open[worker] = _Step(step, now, sent, self.updates, len(y), value, gradient)
        self._steps[worker] += 1
        heapq.heappush(self._due, (sent, _SENT, worker))
        return True

    def _receive(self, workers: Sequence[int], now: int) -> None:
        """Take pushes that arrive at the same time."""
        verdict = self._gate.pushed(workers, now)
        for worker in workers:
            self._open[worker].arrived, self._open[worker].lead = now, self._gate.lead(worker)
        self._pool.update(verdict.pooled)
        self._update([worker for worker in workers if worker not in self._pool], average=False)
        self._answer(verdict.answered, now)

    def _answer(self, workers: Sequence[int], now: int) -> None:
        """Give workers their OK, after the update that their pooled gradients make."""
        self._update([worker for worker in workers if worker in self._pool], average=True)
        self._pool.difference_update(workers)
        index, training = self.progress.rounds, len(self._gate.training)
        self.progress.rounds += bool(workers)
        self._conclude(now)
        leaving = []
        for worker in workers:
            step, received = self._open.pop(worker), self._down.arrival(now)
            self.pushes.append(
                Push(
                    worker=worker,
                    step=step.step,
                    round=index,
                    started=step.started / _NANO,
                    sent=step.sent / _NANO,
                    arrived=step.arrived / _NANO,
                    answered=now / _NANO,
                    received=received / _NANO,
                    staleness=step.staleness,
                    lead=step.lead,
                    training=training,
                    samples=step.samples,
                    loss=step.loss,
                )
            )
            if not self._begin(worker, received):
                leaving.append(worker)
        self._leave(leaving, now)

    def _leave(self, workers: Sequence[int], now: int) -> None:
        released = {other for worker in workers for other in self._gate.left(worker, now).answered}
        if released:
            self._answer(sorted(released), now)

    def _update(self, workers: Sequence[int], *, average: bool) -> None:
        """Let the optimizer step once on the workers' gradients: their sample-weighted average, or their sum."""
        if not workers:
            return
        steps = [self._open[worker] for worker in workers]
        samples = sum(step.samples for step in steps)
        weights = [step.samples / samples if average else 1.0 for step in steps]
        total = _weighted([step.gradient for step in steps], weights)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()
        for step in steps:
            step.staleness, step.gradient = self.updates - step.version, ()
        self.updates += 1
        self.progress.steps += len(steps)
        self.progress.samples += samples
        self._updated = True

    def _conclude(self, now: int) -> None:
        """Tell of what has been updated, and notice when training is over."""
        progress, budget = self.progress, self._budget
        limits = (
            (progress.rounds, budget.rounds),
            (progress.samples, budget.samples),
            (now / _NANO, budget.seconds),
        )
        progress.stop |= any(limit is not None and reached >= limit for reached, limit in limits)
        if self._updated:
            self._updated = False
            progress.stop |= bool(self._on_update(now / _NANO, progress))


def _weighted(gradients: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    """The weighted sum by parameter; a parameter that some of them lack counts as zero there, and None if all do."""
    if len(gradients) == 1:
        return gradients[0]
    total: list[Tensor | None] = []
    for column in zip(*gradients, strict=True):
        present = [gradient * weight for gradient, weight in zip(column, weights, strict=True) if gradient is not None]
        total.append(functools.reduce(torch.add, present) if present else None)
    return tuple(total)
