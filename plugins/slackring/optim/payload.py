"""What a window gathers, sends and merges: parameter deltas, or sums of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slackring.optim.control import Landed
from slackring.optim.flat import FlatBuffers, FlatSpace, digest
from slackring.ring.base import Flight
from slackring.rules import Rule
from slackring.rules.weighting import delta_divisor, delta_factor

__all__ = ["Contribution", "DeltaPayload", "Payload"]


@dataclass
class Contribution:
    """What one window sends.

    Attributes
    ----------
    tensors
        In the order in which they are sent.
    buffers
        The memory behind them, given back to the payload when the round has landed.
    flight
        The round in which the tensors are on their way already, if they were sent during the backward pass.
    own
        A copy of the own delta, where the rule needs it after the sum has overwritten it.
    present
        For gradients: whether each parameter has one on this rank.
    culprit
        None, or the index of a parameter that was not finite, so that zeros are sent.
    unscaled
        A single micro-batch on a ring of one: its gradient is its own average, to the bit.
    again
        What was sent during the backward pass is not this step's gradient: the round must be reduced again.
    """

    tensors: list[Tensor]
    buffers: FlatBuffers
    flight: Flight | None = None
    own: FlatBuffers | None = None
    present: list[bool] | None = None
    culprit: int | None = None
    unscaled: bool = False
    again: bool = False


class Payload(ABC):
    """The part of a rule that touches tensors."""

    compensation: float = 0.0
    nbytes: int

    @abstractmethod
    def pack(self, steps: int, samples: float) -> Contribution:
        """Close the window: make its contribution, and move the local model to where the next window starts."""

    @abstractmethod
    def land(self, contribution: Contribution, landed: Landed) -> None:
        """Take in the sum over ranks."""

    @abstractmethod
    def settle(self) -> None:
        """With nothing in flight, make the local model the anchor."""

    @abstractmethod
    def anchor(self) -> list[Tensor] | None:
        """The anchor's tensors in the parameters' order; None if the model is the anchor."""

    @abstractmethod
    def reset(self) -> None:
        """With nothing in flight, make the local model the new anchor."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """What :meth:`restore` needs, in tensors and plain values."""

    @abstractmethod
    def restore(self, saved: dict[str, Any], *, exact: bool) -> None:
        """Go on from what was saved; not exactly, but from its anchor alone, if it was saved by another rank."""

    @abstractmethod
    def restore_contribution(self, saved: list[Tensor], place: int) -> Contribution:
        """Remake the contribution of the `place`-th round in flight, whose sum had landed when it was saved."""

    @abstractmethod
    def digest(self, turn: int) -> float:
        """Digest of a piece of the anchor."""


class DeltaPayload(Payload):
    """Parameter deltas: the optimizer steps locally, and the differences to the window's start are averaged.

    Beside the model it holds the anchor, the window's start (if rounds overlap, or parameters have 16 bits) and one buffer a
    round in flight; "auto" compensation, and a compensation with a staleness above 1, add a copy of each own delta in flight.

    Parameters of 16 bits hold the anchor rounded, while the anchor itself takes in what is smaller than that. A window starts
    from what they really hold, so that a rounding is never sent as work. Their differences are exact in float32, unless one is
    2**13 times the other: so a rank alone has the plain optimizer's bits.

    Parameters
    ----------
    rule
        Gives staleness, weighting and compensation.
    parameters
        The model's parameters, detached.
    device
        Where anchor and deltas lie; None is beside the parameters.
    """

    def __init__(self, rule: Rule, parameters: list[Tensor], device: torch.device | None = None) -> None:
        self._rule, self._parameters = rule, parameters
        space = FlatSpace(parameters, device)
        self._new, self.nbytes = space.new, space.nbytes
        self._anchor = space.new()
        self._rounds_off = any(parameter.dtype.itemsize < 4 for parameter in parameters)
        self._start = space.new() if rule.most_in_flight or self._rounds_off else self._anchor
        self._free: list[FlatBuffers] = []
        self._own: deque[FlatBuffers] = deque()
        self._keeps_own = rule.compensation == "auto" or (rule.most_in_flight > 1 and rule.compensation != 0)
        # Before anything has been measured, own progress is the best guess of everyone's.
        self.compensation = 1.0 if rule.compensation == "auto" else float(rule.compensation)
        self.reset()

    def pack(self, steps: int, samples: float) -> Contribution:
        """Send the difference to the window's start, and start the next window from anchor and compensation."""
        delta = self._free.pop() if self._free else self._new()
        culprit = None
        if steps:
            delta.load(self._parameters)
            delta.add_(self._start, -1.0)
            culprit = delta.not_finite()
        if not steps or culprit is not None:
            delta.zero_()
        own = None
        if self._keeps_own:
            own = self._new()
            own.copy_(delta)
        if self._rule.most_in_flight:
            self._start.copy_(self._anchor)
            if self.compensation:
                self._start.add_(delta, self.compensation)
                for earlier in self._own:
                    self._start.add_(earlier, self.compensation)
            self._start.store(self._parameters)
            if self._rounds_off:
                self._start.load(self._parameters)
            if own is not None:
                self._own.append(own)
        delta.mul_(delta_factor(self._rule.weighting, steps, samples))
        return Contribution(list(delta.flats), delta, own=own, culprit=culprit)

    def land(self, contribution: Contribution, landed: Landed) -> None:
        """Move the anchor by the average, and the model onto it if rounds do not overlap."""
        average = contribution.buffers
        average.div_(delta_divisor(self._rule.weighting, landed.totals))
        self._anchor.add_(average)
        if contribution.own is not None:
            self._own.popleft()
            if self._rule.compensation == "auto":
                norm = contribution.own.dot(contribution.own)
                if norm > 0:
                    self.compensation = min(max(average.dot(contribution.own) / norm, 0.0), 1.0)
        self._free.append(average)
        if not self._rule.most_in_flight:
            self.settle()

    def settle(self) -> None:
        """With nothing in flight, make the local model the anchor."""
        self._anchor.store(self._parameters)
        if self._start is not self._anchor:
            self._start.load(self._parameters)

    def anchor(self) -> list[Tensor]:
        """Views of the anchor, in the parameters' order."""
        return self._anchor.views

    def reset(self) -> None:
        """With nothing in flight, make the local model the new anchor."""
        self._anchor.load(self._parameters)
        if self._start is not self._anchor:
            self._start.copy_(self._anchor)

    def save(self) -> dict[str, Any]:
        """Anchor, window start, own model, and what compensation needs."""
        return {
            "anchor": self._anchor.save(),
            "start": self._start.save(),
            "model": [parameter.to("cpu", copy=True) for parameter in self._parameters],
            "own": [own.save() for own in self._own],
            "compensation": self.compensation,
        }

    def restore(self, saved: dict[str, Any], *, exact: bool) -> None:
        """Take anchor, start and model, or the anchor as all three."""
        self._anchor.restore(saved["anchor"])
        self.compensation = saved["compensation"]
        if not exact:
            self.settle()
            return
        if self._start is not self._anchor:
            self._start.restore(saved["start"])
        torch._foreach_copy_(self._parameters, saved["model"])
        for own in saved["own"]:
            self._own.append(self._new())
            self._own[-1].restore(own)

    def restore_contribution(self, saved: list[Tensor], place: int) -> Contribution:
        """Buffers with the landed sum, and the own delta that belongs to it."""
        buffers = self._new()
        buffers.restore(saved)
        own = self._own[place] if self._keeps_own else None
        return Contribution(list(buffers.flats), buffers, own=own)

    def digest(self, turn: int) -> float:
        """Digest of a piece of the anchor."""
        return digest(self._anchor.flats, turn)
