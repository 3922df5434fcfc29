"""The control block: the small vector beside every payload from which all ranks decide alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from slackring.errors import AgreementError
from slackring.optim.progress import LandedRound
from slackring.rules import Seen
from slackring.rules.weighting import Totals

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["ControlBlock", "ControlLayout", "Landed", "Slot"]


class Slot(IntEnum):
    """What each rank says of itself; seconds are of its own clock."""

    STEPS = 0
    """Local steps in the window."""
    SAMPLES = 1
    """Samples in the window."""
    STEP_SECONDS = 2
    """Mean computing time of the window's local steps."""
    LAST_SECONDS = 3
    """Computing time of the window's last local step."""
    BLOCKED_SECONDS = 4
    """Time blocked since the contribution before."""
    FLIGHT_SECONDS = 5
    """From launch to landing of the last landed round."""
    JOINED = 6
    """0 while the rank trains; once it is out of data, 1 and the seconds since then."""
    DRAINING = 7
    """The rank is in ``drain()``."""
    STOP = 8
    """The rank asks everyone to stop."""
    NON_FINITE = 9
    """The contribution was not finite, or overflowed in mixed precision, and is sent as zeros."""
    AGAIN = 10
    """The buckets sent during the backward pass are not this step's: reduce the round again."""
    DIGEST = 11
    """Digest of a piece of the anchor."""
    PEAK = 12
    """Largest absolute value in the payload, if payloads are compressed."""
    WIDE = 13
    """The payload may overflow as it travelled: reduce the round again, uncompressed."""


@dataclass(frozen=True)
class ControlLayout:
    """How the control block is laid out: a row of slots and hyper-parameters a rank, then a count a parameter.

    Attributes
    ----------
    size
        Ranks.
    hyper_parameters
        Numbers of the optimizer's hyper-parameters (gradient rules; else 0).
    parameters
        Parameters whose gradients are counted (gradient rules; else 0).
    """

    size: int
    hyper_parameters: int
    parameters: int

    @property
    def _row(self) -> int:
        return len(Slot) + self.hyper_parameters

    def new(self, rank: int) -> ControlBlock:
        """Make a block in which this rank has yet to write its row."""
        tensor = torch.zeros(self.size * self._row + self.parameters, dtype=torch.float64)
        numbers: NDArray[np.float64] = tensor.numpy()
        row = numbers[rank * self._row : (rank + 1) * self._row]
        return ControlBlock(tensor, row[: len(Slot)], row[len(Slot) :], numbers[self.size * self._row :])

    def read(self, block: ControlBlock) -> Landed:
        """Read a block that holds the sums over ranks."""
        numbers: NDArray[np.float64] = block.tensor.numpy()
        rows = numbers[: self.size * self._row].reshape(self.size, self._row)
        return Landed(rows[:, : len(Slot)], rows[:, len(Slot) :], numbers[self.size * self._row :])


@dataclass(frozen=True)
class ControlBlock:
    """A rank's own block before the round; all arrays are views of `tensor` (1-d, float64, CPU)."""

    tensor: Tensor
    slots: NDArray[np.float64]
    hyper_parameters: NDArray[np.float64]
    has_gradient: NDArray[np.float64]


@dataclass(frozen=True)
class Landed:
    """A block after the round: what every rank said, and what follows from it.

    Attributes
    ----------
    slots
        ``(size, len(Slot))``
    hyper_parameters
        ``(size, n)``
    has_gradient
        ``(parameters,)``: ranks on which the parameter has a gradient.
    """

    slots: NDArray[np.float64]
    hyper_parameters: NDArray[np.float64]
    has_gradient: NDArray[np.float64]

    @cached_property
    def totals(self) -> Totals:
        """Sums that weigh the contributions."""
        steps = self.slots[:, Slot.STEPS]
        sent = (steps > 0) & (self.slots[:, Slot.NON_FINITE] == 0)
        return Totals(
            steps=float(steps[sent].sum()),
            samples=float(self.slots[sent, Slot.SAMPLES].sum()),
            contributors=int(sent.sum()),
            training=int((self.slots[:, Slot.JOINED] == 0).sum()),
        )

    @cached_property
    def steps(self) -> int:
        """Local steps of all ranks."""
        return int(self.slots[:, Slot.STEPS].sum())

    @cached_property
    def samples(self) -> float:
        """Samples of all ranks."""
        return float(self.slots[:, Slot.SAMPLES].sum())

    @cached_property
    def stop(self) -> bool:
        """Whether any rank asked to stop."""
        return bool(self.slots[:, Slot.STOP].any())

    @cached_property
    def again(self) -> bool:
        """Whether the round has to be reduced again."""
        return bool(self.slots[:, Slot.AGAIN].any())

    @cached_property
    def wide(self) -> bool:
        """Whether the payload's sum may have overflowed, so that it has to be reduced again as it is."""
        return bool(self.slots[:, Slot.WIDE].any())

    @cached_property
    def all_joined(self) -> bool:
        """Whether every rank is out of data."""
        return bool(self.slots[:, Slot.JOINED].all())

    @cached_property
    def all_draining(self) -> bool:
        """Whether every rank that has not joined is draining, and there is one."""
        return not self.all_joined and bool((self.slots[:, Slot.JOINED] + self.slots[:, Slot.DRAINING]).all())

    @cached_property
    def joined(self) -> frozenset[int]:
        """Ranks that have joined."""
        return frozenset(np.flatnonzero(self.slots[:, Slot.JOINED]).tolist())

    @cached_property
    def non_finite(self) -> bool:
        """Whether any contribution was not finite."""
        return bool(self.slots[:, Slot.NON_FINITE].any())

    @cached_property
    def lowest_training_rank(self) -> int:
        """The lowest rank that has not joined; the last one to join if all have."""
        return int(np.argmin(self.slots[:, Slot.JOINED]))

    @cached_property
    def seen(self) -> Seen:
        """What rules plan from."""
        slots = self.slots
        training = slots[:, Slot.JOINED] == 0
        # The last rank to launch sees the flight alone; the others' flights include waiting for it.
        flights = slots[training, Slot.FLIGHT_SECONDS]
        return Seen(
            tuple(slots[:, Slot.STEPS].astype(int).tolist()),
            tuple(slots[:, Slot.SAMPLES].tolist()),
            tuple(slots[:, Slot.STEP_SECONDS].tolist()),
            tuple(slots[:, Slot.LAST_SECONDS].tolist()),
            tuple(training.tolist()),
            float(flights.min()) if len(flights) else 0.0,
        )

    def told(self, index: int) -> LandedRound:
        """What listeners are told of round `index`."""
        slots = self.slots
        helping = (slots[:, Slot.JOINED] + slots[:, Slot.DRAINING]) > 0
        return LandedRound(
            index,
            tuple(slots[:, Slot.STEPS].astype(int).tolist()),
            tuple(slots[:, Slot.SAMPLES].tolist()),
            tuple(helping.tolist()),
            tuple(slots[:, Slot.STEP_SECONDS].tolist()),
        )

    def check_anchor(self, index: int) -> None:
        """Check that every rank had the same anchor when it launched round `index`.

        Raises
        ------
        AgreementError
            On every rank alike, naming those that differ from most.
        """
        digests = self.slots[:, Slot.DIGEST]
        if (digests == digests[0]).all():
            return
        values, counts = np.unique(digests, return_counts=True)
        odd = np.flatnonzero(digests != values[counts.argmax()]).tolist()
        raise AgreementError(
            f"round {index}: the anchor of rank {', '.join(map(str, odd))} differs from the other ranks'; memory is faulty, or "
            "parameters were changed outside the optimizer (call optimizer.reset_anchor() on every rank after doing so)."
        )
