"""What a rule is: when a window closes, what it sends, how it is weighted, and how it merges.

Everything here is a value or a pure decision: no clock, no network, no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from slackring.errors import RuleError
from slackring.spec import render

__all__ = ["Compensation", "Every", "Payload", "Rule", "Trigger", "Weighting", "WhenFree"]

Payload = Literal["gradient", "delta"]
Weighting = Literal["steps", "ranks", "samples"]
Compensation = float | Literal["auto"]


class Trigger(ABC):
    """Decides, after a local step, whether the window closes."""

    @abstractmethod
    def closes(self, steps: int, ring_free: Callable[[], bool]) -> bool:
        """Whether a window that now holds `steps` local steps closes.

        Parameters
        ----------
        steps
            Local steps in the window, at least 1.
        ring_free
            Tells whether a launch would not block; called only if the answer depends on it, since it polls the network.
        """


@dataclass(frozen=True)
class Every(Trigger):
    """Close the window after a fixed number of local steps.

    Examples
    --------
    >>> [Every(2).closes(steps, lambda: True) for steps in (1, 2)]
    [False, True]
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise RuleError(f"a window has at least one local step, not {self.steps}.")

    def closes(self, steps: int, ring_free: Callable[[], bool]) -> bool:
        """Whether `steps` has been reached."""
        return steps >= self.steps


@dataclass(frozen=True)
class WhenFree(Trigger):
    """Close the window as soon as the ring is free, with at least `k_min` and at most `k_max` local steps.

    Examples
    --------
    >>> trigger = WhenFree(k_min=2, k_max=4)
    >>> [trigger.closes(steps, lambda: True) for steps in (1, 2)]
    [False, True]
    >>> [trigger.closes(steps, lambda: False) for steps in (3, 4)]
    [False, True]
    """

    k_min: int
    k_max: int

    def __post_init__(self) -> None:
        if not 1 <= self.k_min <= self.k_max:
            raise RuleError(f"1 <= k_min <= k_max must hold, not k_min={self.k_min} and k_max={self.k_max}.")

    def closes(self, steps: int, ring_free: Callable[[], bool]) -> bool:
        """Whether the bounds and the ring let the window close."""
        return steps >= self.k_max or (steps >= self.k_min and ring_free())


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
    def compensation(self) -> Compensation:
        """How much of a rank's own work that is not in the anchor yet it keeps: 0 none, 1 all, "auto" measured."""
        return 0.0

    @property
    def weighting(self) -> Weighting:
        """What counts alike in an averaged delta: local steps, ranks or samples. Gradients are always weighted by samples."""
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
        if self.weighting not in ("steps", "ranks", "samples"):
            raise RuleError(f"rule {self.name!r}: weighting is 'steps', 'ranks' or 'samples', not {self.weighting!r}.")
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
