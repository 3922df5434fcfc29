"""How long a straggler makes a local step."""

from __future__ import annotations

import dataclasses
import math

from slackring.errors import SpecError
from slackring.stragglers.models import Straggler

__all__ = ["Pacer"]


@dataclasses.dataclass(frozen=True)
class Pacer:
    """A :class:`slackring.ring.base.Pace` that lengthens local steps to what a straggler says.

    A step that has computed for ``elapsed`` seconds is lengthened by ``max(0, target - elapsed)``, with ``target`` what
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

    def __call__(self, rank: int, step: int, elapsed: float) -> float:
        """Say what is missing to the step's length.

        Parameters
        ----------
        rank, step
            Which local step of which rank, both from 0.
        elapsed
            Seconds that the step has computed.

        Returns
        -------
        float
            Seconds to sleep, 0 or more.
        """
        base = elapsed if self.step_time is None else self.step_time
        return max(0.0, self.straggler.step_seconds(rank, step, base) - elapsed)
