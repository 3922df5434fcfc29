"""Sends gradients in buckets while the backward pass still runs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from slackring.errors import UnsupportedError
from slackring.optim.flat import FlatBuffers, scale_into
from slackring.ring.base import Flight

__all__ = ["BackwardOverlap"]

log = logging.getLogger("slackring")


class BackwardOverlap:
    """Copies each gradient into its bucket when it appears, and sends a bucket once it and those before it are full.

    The gradients are copied, since clipping and unscaling may write to ``.grad`` afterwards. If what was sent turns out not
    to be the step's gradient (another number of samples, a second backward pass, gradients changed since), the round is
    reduced again.

    Parameters
    ----------
    parameters
        In the order of the flat buffers.
    buckets
        As :meth:`FlatSpace.slices` gives them.
    take
        Gives flat buffers to fill.
    open_flight
        Opens the round.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buckets: Sequence[tuple[int, int, int, list[int]]],
        take: Callable[[], FlatBuffers],
        open_flight: Callable[[], Flight],
    ) -> None:
        self._parameters, self._buckets, self._take, self._open_flight = parameters, buckets, take, open_flight
        self._bucket_of = [0] * len(parameters)
        for bucket, (*_, members) in enumerate(buckets):
            for index in members:
                self._bucket_of[index] = bucket
        self._armed, self._usable = False, True
        self._samples = 1.0
        self._flight: Flight | None = None
        # The parameters outlive this object, and must not keep it alive.
        ready = weakref.WeakMethod(self._gradient_is_ready)
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hook = partial(_call, ready, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def active(self) -> bool:
        """Whether a backward pass has begun to send this step's gradients."""
        return self._flight is not None

    def arm(self, samples: float) -> None:
        """Send during the next backward pass, which is assumed to have `samples` samples."""
        self._armed, self._samples = self._usable, samples

    def disarm(self) -> None:
        """Send nothing during the next backward pass."""
        self._armed = False

    def disable(self) -> None:
        """Never send during a backward pass again."""
        self._usable = self._armed = False

    def complete(self, samples: float) -> tuple[FlatBuffers, Flight, list[bool], bool]:
        """Send what the backward pass left over.

        Returns
        -------
        buffers, flight
            What was sent, and in which round.
        present : list of bool
            Whether each parameter has a gradient.
        again : bool
            Whether the round must be reduced again.
        """
        flight, self._flight, self._armed = self._flight, None, False
        if flight is None:
            raise RuntimeError("complete() without an active backward pass")
        changed = self._repeated or any(
            parameter.grad is not grad or grad._version != version for parameter, grad, version in self._sent
        )
        self._sent.clear()
        again = changed or samples != self._samples
        if changed:
            log.warning(
                "gradients changed between their backward pass and step(), so the round is reduced again and communication no "
                "longer overlaps the backward pass; call step() after every backward pass (bsp:accumulate=k averages every k "
                "of them) and clip with max_grad_norm=."
            )
            self.disable()
        present = self._fired
        if not all(present):
            with torch.no_grad():
                for index, parameter in enumerate(self._parameters):
                    if not present[index]:
                        grad = parameter.grad
                        if grad is not None:
                            scale_into(self._buffers.views[index], grad, samples)
                            present[index] = True
                        else:
                            self._buffers.views[index].zero_()
        for which, start, stop, _ in self._buckets[self._next :]:
            flight.send(self._buffers.flats[which][start:stop])
        return self._buffers, flight, present, again

    def _begin(self) -> Flight:
        self._flight, self._buffers = self._open_flight(), self._take()
        self._fired = [False] * len(self._parameters)
        self._left = [len(members) for *_, members in self._buckets]
        self._next = 0
        self._sent: list[tuple[Tensor, Tensor, int]] = []  # each parameter, its gradient, and the gradient's version
        self._repeated = False
        return self._flight

    def _gradient_is_ready(self, index: int, parameter: Tensor) -> None:
        if not self._armed or parameter.grad is None:
            return
        flight = self._flight or self._begin()
        if self._fired[index]:
            self._repeated = True
            return
        grad = parameter.grad
        if grad.layout != torch.strided:
            raise UnsupportedError("sparse gradients cannot be averaged here; build the embedding with sparse=False.")
        with torch.no_grad():
            scale_into(self._buffers.views[index], grad, self._samples)
        self._fired[index] = True
        self._sent.append((parameter, grad, grad._version))
        self._left[self._bucket_of[index]] -= 1
        while self._next < len(self._buckets) and self._left[self._next] == 0:
            which, start, stop, _ = self._buckets[self._next]
            flight.send(self._buffers.flats[which][start:stop])
            self._next += 1


def _call(ready: Callable[[], Callable[[int, Tensor], None] | None], index: int, parameter: Tensor) -> None:
    method = ready()
    if method is not None:
        method(index, parameter)
