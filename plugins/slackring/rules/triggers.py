"""When a window closes: pure decisions after a local step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from slackring.errors import RuleError

__all__ = ["Deadline", "Every", "Moment", "Planned", "Trigger", "WhenFree"]

_IN_TIME = 1e-6  # seconds by which sums of times may be off


class Moment(NamedTuple):
    """What a trigger may look at after a local step.

    Attributes
    ----------
    steps
        Local steps in the open window, at least 1.
    ring_free
        Tells whether a launch would not block; asked only if the answer matters, since it polls the network.
    planned
        Local steps that the plan gives this rank for the window.
    step_seconds
        What the last local step took, in seconds.
    seconds_left
        Until the window's deadline; None if it has none.
    """

    steps: int
    ring_free: Callable[[], bool] = lambda: True
    planned: int = 1
    step_seconds: float = 0.0
    seconds_left: float | None = None


class Trigger(ABC):
    """Decides, after a local step, whether the window closes.

    Attributes
    ----------
    by_rank
        Whether ranks take different numbers of local steps until they wait for each other.
    """

    by_rank: ClassVar[bool] = False

    @abstractmethod
    def closes(self, moment: Moment) -> bool:
        """Whether the window closes now."""


@dataclass(frozen=True)
class Every(Trigger):
    """Close the window after a fixed number of local steps.

    Examples
    --------
    >>> [Every(2).closes(Moment(steps)) for steps in (1, 2)]
    [False, True]
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise RuleError(f"a window has at least one local step, not {self.steps}.")

    def closes(self, moment: Moment) -> bool:
        """Whether `steps` has been reached."""
        return moment.steps >= self.steps


@dataclass(frozen=True)
class Planned(Trigger):
    """Close the window after the local steps that the plan gives this rank.

    Examples
    --------
    >>> [Planned().closes(Moment(steps, planned=3)) for steps in (2, 3)]
    [False, True]
    """

    by_rank: ClassVar[bool] = True

    def closes(self, moment: Moment) -> bool:
        """Whether the planned steps have been reached."""
        return moment.steps >= moment.planned


@dataclass(frozen=True)
class Deadline(Trigger):
    """Close the window at its deadline; a window without one has a single local step.

    Parameters
    ----------
    overshoot
        Begin local steps up to the deadline, so that the last one may end after it; else begin none that would, if it took as
        long as the one before.

    Examples
    --------
    >>> half_a_step_left = Moment(3, step_seconds=0.2, seconds_left=0.1)
    >>> Deadline(overshoot=True).closes(half_a_step_left), Deadline(overshoot=False).closes(half_a_step_left)
    (False, True)
    """

    by_rank: ClassVar[bool] = True
    overshoot: bool = False

    def closes(self, moment: Moment) -> bool:
        """Whether no further local step is to begin."""
        if moment.seconds_left is None:
            return True
        left = moment.seconds_left
        return left <= _IN_TIME or (not self.overshoot and left < moment.step_seconds - _IN_TIME)


@dataclass(frozen=True)
class WhenFree(Trigger):
    """Close the window as soon as the ring is free, with at least `k_min` and at most `k_max` local steps.

    Examples
    --------
    >>> trigger = WhenFree(k_min=2, k_max=4)
    >>> [trigger.closes(Moment(steps)) for steps in (1, 2)]
    [False, True]
    >>> [trigger.closes(Moment(steps, ring_free=lambda: False)) for steps in (3, 4)]
    [False, True]
    """

    k_min: int
    k_max: int

    def __post_init__(self) -> None:
        if not 1 <= self.k_min <= self.k_max:
            raise RuleError(f"1 <= k_min <= k_max must hold, not k_min={self.k_min} and k_max={self.k_max}.")

    def closes(self, moment: Moment) -> bool:
        """Whether the bounds and the ring let the window close."""
        return moment.steps >= self.k_max or (moment.steps >= self.k_min and moment.ring_free())
