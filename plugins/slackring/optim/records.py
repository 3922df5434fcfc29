"""What an optimizer tells a recorder: one row a local step, one row a round. All times are in seconds."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["Recorder", "RoundRecord", "StepRecord"]


class StepRecord(NamedTuple):
    """One local step of this rank; ``end - start = compute + blocked + bookkeeping``.

    Attributes
    ----------
    step
        Counts this rank's local steps from 0.
    round
        The round that carries this step's work.
    start, end
        On the ring's clock.
    compute
        Seconds of computing, the injected ones included.
    injected
        Seconds injected by a step time or a straggler.
    blocked
        Seconds in which this rank waited for rounds.
    bookkeeping
        Seconds spent in Slackring's own code.
    samples
        Samples in the micro-batch.
    """

    step: int
    round: int
    start: float
    end: float
    compute: float
    injected: float
    blocked: float
    bookkeeping: float
    samples: float


class RoundRecord(NamedTuple):
    """One round, as this rank saw it.

    Attributes
    ----------
    round
        Counts rounds from 0.
    launched, landed
        On the ring's clock; `landed` is when this rank noticed it, which may be later than it was complete.
    blocked
        Seconds of it in which this rank waited.
    local_steps, local_samples
        In this rank's window.
    steps, samples
        Of all ranks together.
    contributors, training
        Ranks with a window that was not empty; ranks that had not joined.
    compensation
        The compensation this rank used when it launched the round.
    nbytes
        Bytes of this rank's contribution.
    """

    round: int
    launched: float
    landed: float
    blocked: float
    local_steps: int
    local_samples: float
    steps: int
    samples: float
    contributors: int
    training: int
    compensation: float
    nbytes: int


class Recorder(Protocol):
    """Receives the rows; called on the hot path, so it should only store them."""

    def step(self, record: StepRecord) -> None:
        """Take a local step's row."""
        ...

    def round(self, record: RoundRecord) -> None:
        """Take a round's row."""
        ...
