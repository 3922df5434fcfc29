"""How all ranks agree on the last round before a stop, a drain or the end of a join."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from slackring.optim.control import Landed, Slot
from slackring.optim.progress import Budget, Progress

__all__ = ["Ending"]


class Ending:
    """What follows from the control blocks for when rounds end: a pure state machine, the same on every rank.

    A flag in round r takes effect after round r + staleness: by the time a rank launches that round it has landed round r, so
    every rank launches exactly the rounds up to there.

    Parameters
    ----------
    staleness
        Of the rule.
    budget
        When training stops by itself.
    """

    def __init__(self, staleness: int, budget: Budget) -> None:
        self._staleness, self._budget = staleness, budget
        self.progress = Progress()
        self.stop_requested = False
        """Whether this rank wants all to stop."""
        self.last_joiner = 0
        self._joined: frozenset[int] = frozenset()
        self._boundary = -1
        self._pending: Literal["drain", "join"] | None = None
        self._completed = {"drain": 0, "join": 0}
        self.last: int | None = None
        """The last round of all, once it is agreed."""
        if budget.rounds is not None and budget.rounds <= staleness:
            self.last = budget.rounds - 1

    def take(self, index: int, landed: Landed) -> None:
        """Conclude what follows from round `index`."""
        progress, budget = self.progress, self._budget
        progress.rounds += 1
        progress.steps += landed.steps
        progress.samples += landed.samples
        joined = landed.joined
        newly = joined - self._joined
        if newly:
            # Several may join in the same round: the last of them has waited least since.
            self.last_joiner = min(newly, key=lambda rank: (landed.slots[rank, Slot.JOINED], -rank))
        self._joined = joined
        effective = index + self._staleness
        if self.last is None and (
            landed.stop
            or (budget.rounds is not None and effective + 1 >= budget.rounds)
            or (budget.samples is not None and progress.samples >= budget.samples)
        ):
            self.last = effective
        if index > self._boundary and (landed.all_joined or landed.all_draining):
            self._boundary, self._pending = effective, "join" if landed.all_joined else "drain"

    def save(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return {
            "progress": dataclasses.asdict(self.progress),
            "last": self.last,
            "last joiner": self.last_joiner,
            "joined": sorted(self._joined),
            "boundary": self._boundary,
            "pending": self._pending,
        }

    def restore(self, saved: dict[str, Any], *, exact: bool) -> None:
        """Go on from what was saved; from the progress alone, if rounds in flight are given up."""
        for name, value in saved["progress"].items():
            setattr(self.progress, name, value)
        if exact:
            self.last, self.last_joiner, self._joined = saved["last"], saved["last joiner"], frozenset(saved["joined"])
            self._boundary, self._pending = saved["boundary"], saved["pending"]
        self.progress.stop = False

    def over(self, launched: int) -> bool:
        """Whether a rank that has launched `launched` rounds has launched the last one of all."""
        return self.last is not None and launched > self.last

    def pause(self, launched: int) -> bool:
        """Whether a drain or join completes here: all ranks then land everything before they go on."""
        if self._pending is None or launched <= self._boundary:
            return False
        self._completed[self._pending] += 1
        self._pending = None
        return True

    def completed(self, what: Literal["drain", "join"]) -> int:
        """How many drains or joins have completed."""
        return self._completed[what]
