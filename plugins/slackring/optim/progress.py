"""What all ranks agree on while they train, and when they stop."""

from __future__ import annotations

from dataclasses import dataclass

from slackring.errors import SpecError

__all__ = ["Budget", "LandedRound", "Progress"]


@dataclass(frozen=True)
class Budget:
    """When training stops by itself, on all ranks after the same round; whichever limit comes first.

    Parameters
    ----------
    rounds
        Rounds in all.
    samples
        Samples of all ranks together; the round that reaches it is not the last one if rounds are in flight.
    seconds
        Seconds on any rank's clock since its first step.

    Examples
    --------
    >>> Budget(rounds=100, seconds=60.0)
    Budget(rounds=100, samples=None, seconds=60.0)
    """

    rounds: int | None = None
    samples: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "samples", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SpecError(f"budget: {name} is above 0, not {value}.")


@dataclass
class Progress:
    """What has landed, the same on every rank after the same round.

    Attributes
    ----------
    rounds, steps, samples
        Rounds that have landed, and the local steps and samples of all ranks in them.
    stop
        Whether the last round has been launched: leave the loop, then call ``join()`` or ``drain()``.
    """

    rounds: int = 0
    steps: int = 0
    samples: float = 0.0
    stop: bool = False


@dataclass(frozen=True)
class LandedRound:
    """What a landed round says of every rank; the same on all of them.

    Attributes
    ----------
    index
        Counts rounds from 0.
    steps
        Local steps by rank, those that overflowed included.
    samples
        Samples (or tokens) by rank, of contributions that count.
    helping
        By rank, whether it was in ``drain()`` or ``join()``, and so may have given less than it can.
    step_seconds
        By rank, the mean seconds that a local step computed; 0 where there was no step.
    """

    index: int
    steps: tuple[int, ...]
    samples: tuple[float, ...]
    helping: tuple[bool, ...]
    step_seconds: tuple[float, ...]
