"""What a rule is: when a window closes, what it sends, how it is weighted, and how it merges.

Everything here is a value or a pure decision: no clock, no network, no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from slackring.errors import RuleError
from slackring.rules.triggers import Trigger, WhenFree
from slackring.spec import render

__all__ = ["Compensation", "Payload", "Plan", "Rule", "Seen", "Weighting"]

Payload = Literal["gradient", "delta"]
Weighting = Literal["steps", "ranks", "samples", "sum"]
Compensation = float | Literal["auto"]


class Seen(NamedTuple):
    """What every rank said of its window in the round that has just landed; tuples are by rank.

    Attributes
    ----------
    steps, samples
        Local steps and samples in the window.
    step_seconds, last_seconds
        Computing time of the window's local steps: their mean, and the last one's; 0 for an empty window.
    training
        Whether the rank still trains.
    round_seconds
        What a round takes once every rank has launched it; 0 if that is not known yet.
    """

    steps: tuple[int, ...]
    samples: tuple[float, ...]
    step_seconds: tuple[float, ...]
    last_seconds: tuple[float, ...]
    training: tuple[bool, ...]
    round_seconds: float


@dataclass(frozen=True)
class Plan:
    """What all ranks have agreed for the windows to come.

    Attributes
    ----------
    steps
        Local steps of each rank's window, for :class:`Planned`; empty is one each.
    seconds
        Length of a window, for :class:`Deadline`; None sets no deadline.
    in_flight
        Rounds that may be in flight while a rank computes; None is the rule's staleness. It may only grow.
    memory
        Whatever the rule wants to remember until the next round.
    """

    steps: tuple[int, ...] = ()
    seconds: float | None = None
    in_flight: int | None = None
    memory: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rule(ABC):
    """A synchronisation rule: one point in the space of triggers, payloads, staleness and merges.

    A rule of your own is a frozen dataclass that derives from this class, sets `name`, and is announced by an entry point in
    the group ``slackring.rules``; :func:`slackring.testing.check_rule` tells whether it keeps the promises.

    Attributes
    ----------
    name
        The rule's text name.
    payload
        What a window sends: ``"gradient"`` (the model is frozen inside the window; the sample-weighted sum of gradients goes
        through the optimizer once, identically on every rank) or ``"delta"`` (the optimizer steps locally; the parameter
        differences are averaged).
    """

    name: ClassVar[str]
    payload: ClassVar[Payload] = "delta"

    @property
    @abstractmethod
    def trigger(self) -> Trigger:
        """When a window closes."""

    @property
    def staleness(self) -> int:
        """How many rounds may be in flight while a rank computes; 0 is blocking."""
        return 0

    @property
    def most_in_flight(self) -> int:
        """The largest staleness, for rules that choose it while they run."""
        return self.staleness

    @property
    def least_flight(self) -> float:
        """Seconds after its launch before which no round is landed."""
        return 0.0

    @property
    def interrupts(self) -> bool:
        """Whether a deadline cuts injected delays short; the local step that was in them then counts no samples."""
        return False

    @property
    def first_plan(self) -> Plan:
        """The plan until the first round has landed."""
        return Plan()

    def plan(self, seen: Seen, plan: Plan) -> Plan:
        """Plan the windows to come, in every round that lands.

        A pure function, so that every rank comes to the same plan.

        Parameters
        ----------
        seen
            What the ranks said in the round.
        plan
            The plan so far.
        """
        return plan

    @property
    def compensation(self) -> Compensation:
        """How much of a rank's own work that is not in the anchor yet it keeps: 0 none, 1 all, "auto" measured."""
        return 0.0

    @property
    def weighting(self) -> Weighting:
        """What counts alike in an averaged delta: local steps, ranks or samples; "sum" adds deltas up.

        Gradients are always weighted by samples.
        """
        return "steps"

    def __post_init__(self) -> None:
        self.check()

    def __str__(self) -> str:
        """The text that :func:`slackring.parse_rule` reads back."""
        return render(self.name, self)

    def check(self) -> None:
        """Raise `RuleError` for a combination that no rule can have."""
        payload, staleness, compensation, trigger = self.payload, self.staleness, self.compensation, self.trigger
        if payload not in ("gradient", "delta"):
            raise RuleError(f"rule {self.name!r}: payload is 'gradient' or 'delta', not {payload!r}.")
        if self.weighting not in ("steps", "ranks", "samples", "sum"):
            raise RuleError(
                f"rule {self.name!r}: weighting is 'steps', 'ranks', 'samples' or 'sum', not {self.weighting!r}."
            )
        if staleness < 0:
            raise RuleError(f"rule {self.name!r}: staleness is 0 or more, not {staleness}.")
        if compensation != "auto" and not (isinstance(compensation, (int, float)) and math.isfinite(compensation)):
            raise RuleError(f"rule {self.name!r}: compensation is a finite number or 'auto', not {compensation!r}.")
        if payload == "gradient" and compensation != 0:
            raise RuleError(
                f"rule {self.name!r}: gradients have no compensation, since no rank moves its model alone; "
                "use payload=delta or compensation=0."
            )
        if payload == "gradient" and self.weighting != "steps":
            raise RuleError(f"rule {self.name!r}: gradients are weighted by samples; weighting= is for deltas.")
        if self.weighting == "sum" and compensation == "auto":
            raise RuleError(
                f"rule {self.name!r}: weighting=sum keeps every rank's work whole, so there is no share of it to measure; "
                "give compensation= as a number."
            )
        if staleness == 0 and compensation != 0:
            raise RuleError(
                f"rule {self.name!r}: with staleness 0 every rank's work is in the anchor when it merges, so there is "
                "nothing to compensate; use staleness=1 or compensation=0."
            )
        if staleness == 0 and isinstance(trigger, WhenFree):
            raise RuleError(
                f"rule {self.name!r}: with staleness 0 the ring is always free, so k_min and k_max decide nothing; "
                "use steps= or staleness=1."
            )
