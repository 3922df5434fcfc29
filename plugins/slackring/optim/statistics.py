"""Averaged model buffers, such as BatchNorm's running statistics; they live beside the anchor."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from slackring.optim.flat import FlatBuffers, FlatSpace
from slackring.rules.weighting import Totals

__all__ = ["AveragedBuffers"]


class AveragedBuffers:
    """Averages the model's floating buffers over the ranks that contribute to a round.

    Parameters
    ----------
    buffers
        The model's floating buffers; integer ones (step counts) are a rank's own.
    device
        Where averages lie; None is beside the buffers.
    """

    def __init__(self, buffers: list[Tensor], device: torch.device | None = None) -> None:
        self._model = buffers
        space = FlatSpace(buffers, device)
        self._new, self.nbytes = space.new, space.nbytes
        self._average = space.new()
        self._average.load(buffers)
        self._in_flight: deque[FlatBuffers] = deque()
        self._free: list[FlatBuffers] = []

    def pack(self, contributes: bool) -> list[Tensor]:
        """What this rank sends: its buffers as they are now, or zeros."""
        sent = self._free.pop() if self._free else self._new()
        if contributes:
            sent.load(self._model)
        else:
            sent.zero_()
        self._in_flight.append(sent)
        return sent.flats

    def land(self, totals: Totals) -> None:
        """Take in the oldest round's sum."""
        total = self._in_flight.popleft()
        if totals.contributors:
            total.div_(totals.contributors)
            self._average.copy_(total)
        self._free.append(total)

    def save(self) -> dict[str, list[Any]]:
        """The average, and the sums of rounds that have landed but are not taken in."""
        return {"average": self._average.save(), "in flight": [total.save() for total in self._in_flight]}

    def restore(self, saved: dict[str, list[Any]], *, exact: bool) -> None:
        """Go on from what was saved."""
        self._average.restore(saved["average"])
        for total in saved["in flight"] if exact else ():
            self._in_flight.append(self._new())
            self._in_flight[-1].restore(total)

    def settle(self) -> None:
        """Put the average into the model."""
        self._average.store(self._model)

    @property
    def average(self) -> list[Tensor]:
        """The averages, in the order of the model's buffers."""
        return self._average.views
