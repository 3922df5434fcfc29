"""Injects a straggler into local steps as sleep."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from slackring.errors import SpecError
from slackring.stragglers.models import Straggler

if TYPE_CHECKING:
    from slackring.ring.base import Clock

__all__ = ["Pacer"]


@dataclasses.dataclass(frozen=True)
class Pacer:
    """A :class:`slackring.ring.base.Pace` that sleeps until a local step has lasted as long as a straggler says.

    A step that has computed for ``elapsed`` seconds sleeps ``max(0, target - elapsed)`` more, with ``target`` what
    `straggler` makes of the step time. Sleep can only lengthen a step: a step whose computing exceeds the target stays
    as long as it is. On a virtual clock computing takes no time, so the whole step is sleep.

    Parameters
    ----------
    straggler
        How long each step takes.
    step_time
        What an undisturbed step takes, in seconds; above 0. None takes the step's own measured computing.

    Raises
    ------
    SpecError
        If `step_time` is not a finite number above 0.
    """

    straggler: Straggler
    step_time: float | None = None

    def __post_init__(self) -> None:
        if self.step_time is not None and not (math.isfinite(self.step_time) and self.step_time > 0):
            raise SpecError(f"the step time is {self.step_time} s, but must be a finite number above 0.")

    def __call__(self, clock: Clock, rank: int, step: int, started: float | None) -> float:
        """Sleep for the rest of a local step.

        Parameters
        ----------
        clock
            The rank's clock.
        rank, step
            Which local step of which rank, both from 0.
        started
            When the step's computing began, in the clock's seconds. None if that is not known: it then counts as now.

        Returns
        -------
        float
            The seconds that were injected.
        """
        elapsed = 0.0 if started is None else clock.now() - started
        base = elapsed if self.step_time is None else self.step_time
        injected = max(0.0, self.straggler.step_seconds(rank, step, base) - elapsed)
        clock.sleep(injected)
        return injected
