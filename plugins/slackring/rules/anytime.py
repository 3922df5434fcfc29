"""Anytime Minibatch: windows of a fixed time, with averages that may be stale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from slackring.errors import RuleError
from slackring.rules.base import Payload, Plan, Rule, Seen
from slackring.rules.timing import compute_time_for, staleness_for
from slackring.rules.triggers import Deadline, Trigger

__all__ = ["AnytimeMinibatch"]

_MOST_IN_FLIGHT = 8
_MEASURED_ROUNDS = 3
_WORTH_HIDING = 0.25
_MEMORY = 0.8


@dataclass(frozen=True)
class AnytimeMinibatch(Rule):
    """Anytime Minibatch: every rank computes gradients for the same time, however many it gets done.

    ``w <- w - lr * sum(samples_i * gradient_i) / sum(samples_i)``, each sum over the local steps that a rank fitted into
    `compute_time`. A straggler's work counts as far as it got; nobody waits for more than one local step of another rank. With
    `staleness` tau the gradients are those of the model tau averages ago, ranks compute while rounds are on their way, and each
    average is divided by its own samples.

    From "Anytime Minibatch: Exploiting Stragglers in Online Distributed Optimization" (ICLR 2019, arXiv 2006.05752) and
    "Anytime Minibatch with Delayed Gradients" (arXiv 2012.08616). The papers' update is
    :class:`slackring.optim.DualAveraging`; their authors use any optimizer on the average, and so does this rule. Gradient
    rules take Horovod's learning rate, and staleness wants a smaller one: plain gradient descent is stable up to
    ``2 sin(pi / (4 tau + 2))`` over the curvature.

    Parameters
    ----------
    compute_time
        T, seconds in which a window computes; None if `target_batch` is given. A little more than a whole number of the slowest
        rank's steps wastes least.
    staleness
        tau, averages that a gradient may be behind, which is also the rounds in flight. ``"auto"`` measures the first rounds:
        0 if they take less than a quarter of T (then hiding them gains less than stale gradients cost), else
        ``ceil(communication time / T)``, at most 8.
    communication_time
        T_c, in seconds: no round is landed before it, so that every update takes the same time, idle in it without staleness,
        computing with it. None lands rounds as soon as they are complete, which is never slower.
    target_batch
        Choose T so that all ranks together have at least so many samples in a window on average: ``(1 + n m / b) mu``, or
        ``mu`` with `overshoot` (n ranks, m samples a step, mu the mean time for b / n samples), measured anew in every round.
    overshoot
        Whether a local step may begin that will end after the deadline, as in the authors' code; else a rank stops before it,
        if the step would take as long as the last one. A window has at least one local step. Off by default, since on a ring
        all ranks wait for the one that overshoots most: on mnist5k with windows of 0.5 s, local steps of 0.1, 0.1, 0.13 and
        0.4 s and five seeds it took 33.6 s to an accuracy of 0.88, and 21.5 s without (``slackring compare --virtual --rules
        anytime:compute_time=0.5,anytime:compute_time=0.5,overshoot=yes --straggler persistent:ranks=2+3,factor=1.3+4
        --step-time 0.1 --seconds 40 --seeds 0,1,2,3,4 --lr-grid 0.2,0.4,0.8,1.6``).
    interrupt
        Whether the deadline cuts delays that are injected (by a straggler model, not real ones) short; the local step that
        was in one then counts no samples.

    Examples
    --------
    >>> str(AnytimeMinibatch(compute_time=2.5, staleness=1))
    'anytime:compute_time=2.5,staleness=1'
    """

    name: ClassVar[str] = "anytime"
    payload: ClassVar[Payload] = "gradient"
    compute_time: float | None = None
    staleness: int | Literal["auto"] = 0  # type: ignore[assignment]  # "auto" is what the plan makes of it
    communication_time: float | None = None
    target_batch: float | None = None
    overshoot: bool = False
    interrupt: bool = False

    def check(self) -> None:
        """Raise `RuleError` for values that no window can have."""
        if (self.compute_time is None) == (self.target_batch is None):
            raise RuleError(
                "rule 'anytime' needs either compute_time= (seconds) or target_batch= (samples of all ranks in a window), such "
                "as anytime:compute_time=2.5."
            )
        for name in ("compute_time", "communication_time", "target_batch"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise RuleError(f"rule 'anytime': {name} is a finite number above 0, not {value}.")
        if self.staleness != "auto":
            super().check()

    @property
    def trigger(self) -> Trigger:
        """At the deadline."""
        return Deadline(self.overshoot)

    @property
    def most_in_flight(self) -> int:
        """The staleness, or 8 if it is chosen."""
        return _MOST_IN_FLIGHT if self.staleness == "auto" else self.staleness

    @property
    def least_flight(self) -> float:
        """The communication time, if there is one."""
        return self.communication_time or 0.0

    @property
    def interrupts(self) -> bool:
        """As `interrupt` says."""
        return self.interrupt

    @property
    def first_plan(self) -> Plan:
        """Windows of the compute time, or of one step until it is known; blocking until the staleness is known."""
        return Plan(seconds=self.compute_time, in_flight=0 if self.staleness == "auto" else None)

    def plan(self, seen: Seen, plan: Plan) -> Plan:
        """Choose the compute time and the staleness from what was measured, where they are not given."""
        sample_seconds, rounds, communication = plan.memory or (0.0, 0.0, math.inf)
        if self.target_batch is not None:
            sample_seconds = _mean_sample_seconds(seen, sample_seconds)
            if sample_seconds and sum(seen.samples):
                ranks = sum(seen.training) or 1
                seconds = compute_time_for(
                    self.target_batch,
                    ranks,
                    sum(seen.samples) / sum(seen.steps),
                    self.target_batch / ranks * sample_seconds,
                    overshoot=self.overshoot,
                )
                plan = replace(plan, seconds=seconds)
        if self.staleness == "auto" and seen.round_seconds and rounds < _MEASURED_ROUNDS and plan.seconds:
            rounds, communication = rounds + 1, min(communication, seen.round_seconds)
            if rounds == _MEASURED_ROUNDS and communication >= _WORTH_HIDING * plan.seconds:
                plan = replace(plan, in_flight=min(staleness_for(communication, plan.seconds), _MOST_IN_FLIGHT))
        return replace(plan, memory=(sample_seconds, rounds, communication))


def _mean_sample_seconds(seen: Seen, before: float) -> float:
    """Mean over ranks of the seconds that a sample takes, smoothed over rounds; 0 if it is not known."""
    each = [
        seconds * steps / samples
        for seconds, steps, samples in zip(seen.step_seconds, seen.steps, seen.samples, strict=True)
        if samples > 0 and seconds > 0
    ]
    if not each:
        return before
    now = sum(each) / len(each)
    return _MEMORY * before + (1 - _MEMORY) * now if before else now
