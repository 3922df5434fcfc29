"""The gradient payload: sums of gradients, averaged over all samples, that go through the optimizer once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slackring.errors import UnsupportedError
from slackring.optim.control import Landed
from slackring.optim.flat import FlatBuffers, FlatSpace, digest
from slackring.optim.overlap import BackwardOverlap
from slackring.optim.payload import Contribution, Payload
from slackring.ring.base import Flight

__all__ = ["GradientPayload"]

_BUCKET_BYTES = 8 << 20
_ONE_BUCKET = 1 << 62


class GradientPayload(Payload):
    """Each micro-batch's mean gradient times its samples, summed; the model is frozen inside the window and is the anchor.

    Beside the model it holds one flat buffer, and one more a round in flight.

    Parameters
    ----------
    parameters
        The model's parameters, as the optimizer holds them.
    size
        Ranks.
    open_flight
        Opens the next round; given if every window is one local step and nothing is in flight while a rank computes, so that
        communication can overlap the backward pass. Else None.
    device
        Where sums lie; None is beside the parameters. Elsewhere nothing overlaps the backward pass, which would have to wait
        for copies.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        size: int,
        open_flight: Callable[[], Flight] | None,
        device: torch.device | None = None,
    ) -> None:
        self._model, self._size = parameters, size
        # Backward passes reach the last layers first, so these lie in the first buckets.
        self._parameters = list(parameters)[::-1]
        self._space = FlatSpace(self._parameters, device)
        self._synchronous = open_flight is not None
        self.nbytes = self._space.nbytes
        self._buckets = self._space.slices(_BUCKET_BYTES if self._synchronous else _ONE_BUCKET)
        self._free: list[FlatBuffers] = []
        self._filling: FlatBuffers | None = None
        self._present = [False] * len(parameters)
        self._weight: float | None = None  # of the window's only micro-batch so far, which is not scaled yet
        self._average: FlatBuffers | None = None
        self._average_present: list[bool] = []
        self._overlap = (
            BackwardOverlap(self._parameters, self._buckets, self._take, open_flight)
            if open_flight and not self._space.away
            else None
        )

    @property
    def ready(self) -> bool:
        """Whether an average has landed and waits to be applied."""
        return self._average is not None

    def overlap(self, samples: float) -> None:
        """Let the next backward pass send its gradients as they appear, if the rule allows it; it has `samples` samples."""
        if self._overlap is not None:
            self._overlap.arm(samples)

    def no_overlap(self) -> None:
        """Send gradients only in ``step()`` from now on."""
        if self._overlap is not None:
            self._overlap.disable()

    def accumulate(self, samples: float) -> None:
        """Add this micro-batch's gradients, weighted by its samples; zero samples add nothing."""
        if self._overlap is not None and self._overlap.active:
            return  # they are on their way; `pack` completes them
        if samples <= 0:
            return
        every = [parameter.grad for parameter in self._parameters]
        grads = [grad for grad in every if grad is not None]
        present = [index for index, grad in enumerate(every) if grad is not None]
        first = self._filling is None
        buffers = self._filling = self._filling or self._take()
        with torch.no_grad():
            if first and len(grads) == len(self._parameters):
                self._refuse_sparse(grads)
                buffers.load(grads)
                self._weight = samples
            else:
                if first:
                    self._refuse_sparse(grads)
                    buffers.zero_()
                self._scale_first_micro_batch()
                buffers.gather(present, grads, samples)
        for index in present:
            self._present[index] = True

    def pack(self, steps: int, samples: float) -> Contribution:
        """Hand over the sum, or complete what the backward pass has begun to send."""
        overlap = self._overlap
        if overlap is not None and overlap.active:
            buffers, flight, present, again = overlap.complete(samples)
            again = again or not steps  # a backward pass without its step() is no work
            return Contribution(self._tensors(buffers), buffers, flight=flight, present=present[::-1], again=again)
        unscaled, culprit = False, None
        if self._filling is None:
            buffers = self._take()
            buffers.zero_()
        else:
            buffers = self._filling
            unscaled = self._size == 1 and self._weight is not None
            if not unscaled:
                self._scale_first_micro_batch()
            culprit = buffers.not_finite()
            if culprit is not None:
                buffers.zero_()
                culprit = len(self._parameters) - 1 - culprit
        present = [False] * len(self._present) if culprit is not None else self._present[::-1]
        self._filling, self._weight, self._present = None, None, [False] * len(self._present)
        return Contribution(self._tensors(buffers), buffers, present=present, culprit=culprit, unscaled=unscaled)

    def land(self, contribution: Contribution, landed: Landed) -> None:
        """Turn the sum over ranks into the average over samples, which then waits to be applied."""
        buffers, samples = contribution.buffers, landed.totals.samples
        self.discard(contribution)
        # With one step a window all ranks skip together, as synchronous training does; longer windows go on with the rest.
        if samples <= 0 or (self._synchronous and landed.non_finite):
            return
        if not contribution.unscaled:
            buffers.div_(samples)
        # Buckets that leave during a backward pass cannot be checked before. Every rank checks, also those whose own
        # contribution did not leave so, since all must come to the same conclusion.
        if self._synchronous and buffers.not_finite() is not None:
            return
        self._average = self._free.pop()
        self._average_present = (landed.has_gradient > 0).tolist()[::-1]

    def own_culprit(self) -> int | None:
        """Index of a parameter whose own gradient is not finite; None if there is none."""
        for index, parameter in enumerate(self._model):
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return index
        return None

    def discard(self, contribution: Contribution) -> None:
        """Take back a contribution's memory."""
        self._free.append(contribution.buffers)

    def apply(self) -> None:
        """Put the average into ``.grad``: None for parameters that have a gradient on no rank."""
        average, self._average = self._average, None
        if average is None:
            return
        views, grads = [], []
        for parameter, view, present in zip(self._parameters, average.views, self._average_present, strict=True):
            if not present:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            views.append(view)
            grads.append(parameter.grad)
        with torch.no_grad():
            average.transfer(grads, views)
        self._free.append(average)

    def settle(self) -> None:
        """The model is the anchor already; the next backward pass may not be a step's, so it sends nothing."""
        if self._overlap is not None:
            self._overlap.disarm()

    def anchor(self) -> None:
        """None: the model is the anchor."""

    def reset(self) -> None:
        """Nothing to do: the model is the anchor."""

    def save(self) -> dict[str, Any]:
        """The open window's sum; the model itself is for the user to save."""
        return {
            "sum": None if self._filling is None else self._filling.save(),
            "present": list(self._present),
            "weight": self._weight,
        }

    def restore(self, saved: dict[str, Any], *, exact: bool) -> None:
        """Go on with the open window."""
        if exact and saved["sum"] is not None:
            self._filling = self._take()
            self._filling.restore(saved["sum"])
            self._present, self._weight = list(saved["present"]), saved["weight"]

    def restore_contribution(self, saved: list[Tensor], place: int) -> Contribution:
        """Buffers with the landed sum."""
        buffers = self._take()
        buffers.restore(saved)
        return Contribution(self._tensors(buffers), buffers)

    def digest(self, turn: int) -> float:
        """Digest of a piece of the model."""
        return digest(self._model, turn)

    def _take(self) -> FlatBuffers:
        return self._free.pop() if self._free else self._space.new()

    def _tensors(self, buffers: FlatBuffers) -> list[Tensor]:
        return [buffers.flats[which][start:stop] for which, start, stop, _ in self._buckets]

    def _scale_first_micro_batch(self) -> None:
        if self._weight is not None and self._filling is not None:
            self._filling.mul_(self._weight)
            self._weight = None

    @staticmethod
    def _refuse_sparse(grads: Sequence[Tensor]) -> None:
        if any(grad.layout != torch.strided for grad in grads):
            raise UnsupportedError("sparse gradients cannot be averaged here; build the embedding with sparse=False.")
