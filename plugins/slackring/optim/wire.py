"""How payloads travel: as they are, or as float16 with a scale that all ranks agree on."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from slackring.errors import UnsupportedError
from slackring.ring.base import Flight
from slackring.spec import nearest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Wire", "WireFlight", "read_compression"]

T = TypeVar("T")

_TARGET = 10  # exponent of two that a sum of the largest values seen stays below: 2**5 under the limit
_LIMIT = 2.0**15  # a sum that stays below cannot overflow float16, however its terms are rounded
_SMALLEST, _LARGEST = -126, 126  # exponents whose powers of two, and their inverses, float32 holds in full


def read_compression(value: object) -> str | None:
    """Read what users give as ``compression=``.

    Parameters
    ----------
    value
        None or ``"none"``, ``"fp16"``, ``hvd.Compression.none`` or ``hvd.Compression.fp16``.

    Returns
    -------
    str or None
        ``"fp16"``, or None for none.

    Raises
    ------
    UnsupportedError
        For anything else.

    Examples
    --------
    >>> read_compression("fp16"), read_compression(None)
    ('fp16', None)
    """
    horovod = sys.modules.get("horovod.torch")  # else it is no class of Horovod's
    if value is None or value == "none" or (horovod and value is horovod.Compression.none):
        return None
    if value == "fp16" or (horovod and value is horovod.Compression.fp16):
        return "fp16"
    if value in ("bf16", "bfloat16"):
        raise UnsupportedError(
            f"compression={value!r} would save nothing: Horovod sums no bfloat16, so it would travel as float32; use 'fp16', "
            "whose scale follows what is sent."
        )
    if isinstance(value, str):
        raise UnsupportedError(f"there is no compression named {value!r}; {nearest(value, ('fp16', 'none'))}.")
    raise UnsupportedError(
        f"compression= is None, 'fp16' or hvd.Compression.fp16, not {value!r}; compressors of your own are not called."
    )


class Wire:
    """Sends payloads as float16 times a power of two, which halves the bytes of float32 (and quarters those of float64).

    The scale of a round follows from the largest absolute value that any rank sent in the last round that has landed; the
    control block carries it, so that all ranks scale alike: as many ranks as there are, each with a value 32 times as large,
    still do not overflow the sum. Values down to ``2**-24 / size`` of the largest keep float16's 11 bits, smaller ones fewer.
    Rounds travel as they are until one with something in it has landed.

    If a rank's contribution has grown more than that, it says so in the control block, and all ranks reduce the round once
    more as it is. What rounding takes away is lost: the anchor moves by the sums that travelled, on all ranks alike.

    Parameters
    ----------
    size
        Ranks.

    Attributes
    ----------
    exponent
        Of the next round's power of two; None while rounds travel as they are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.exponent: int | None = None
        self.free: list[list[Tensor]] = []

    def open(self, inner: Flight) -> WireFlight:
        """Have a round of the ring carry a payload."""
        return WireFlight(self, inner)

    def learn(self, peaks: NDArray[np.float64]) -> None:
        """Choose the scale of rounds to come from what the ranks told in the one that has just landed."""
        largest = float(peaks.max())
        if largest > 0:
            exponent = _TARGET - math.frexp(self.size * largest)[1]
            self.exponent = min(max(exponent, _SMALLEST), _LARGEST)


class WireFlight(Flight):
    """A round whose payload may travel as float16.

    Only the payload is sent into it; what must not be rounded is sent into `inner`, the ring's own round.

    Attributes
    ----------
    nbytes
        Bytes of the payload that have been sent.
    """

    def __init__(self, wire: Wire, inner: Flight) -> None:
        self._wire, self.inner, self._exponent = wire, inner, wire.exponent
        self._payload: list[Tensor] = []
        self._halves: list[Tensor] = wire.free.pop() if wire.free else []
        self._peaks: list[Tensor] = []
        self.nbytes = 0

    def send(self, tensor: Tensor) -> None:
        """Start summing a float16 copy of `tensor`; the tensor is left as it is until :meth:`unpack`."""
        place = len(self._payload)
        self._payload.append(tensor)
        if tensor.numel():
            self._peaks.append(torch.linalg.vector_norm(tensor, torch.inf))
        travels = tensor
        if self._exponent is not None:
            if place == len(self._halves):
                self._halves.append(torch.empty_like(tensor, dtype=torch.float16))
            travels = torch.mul(tensor, 2.0**self._exponent, out=self._halves[place])
        self.nbytes += travels.nbytes
        self.inner.send(travels)

    def peak(self) -> float:
        """Largest absolute value of the payload; of what is finite in it, since what is not spoils the sum anyway."""
        return max(filter(math.isfinite, map(float, self._peaks)), default=0.0)

    def too_wide(self, peak: float) -> bool:
        """Whether a sum in which any rank may have this peak could overflow."""
        return self._exponent is not None and peak * 2.0**self._exponent > _LIMIT / self._wire.size

    def unpack(self) -> None:
        """Put the sums that have arrived into the payload's tensors; a second time it does nothing."""
        if self._exponent is not None and self._halves:
            for tensor, half in zip(self._payload, self._halves, strict=True):
                tensor.copy_(half).mul_(2.0**-self._exponent)
            self._wire.free.append(self._halves)
            self._halves = []

    def seal(self) -> None:
        """Seal the ring's round."""
        self.inner.seal()

    def done(self) -> bool:
        """Whether the ring's round is done."""
        return self.inner.done()

    def wait(self) -> None:
        """Wait for the ring's round."""
        self.inner.wait()

    def once(self, what: str, compute: Callable[[], T]) -> T:
        """Compute once on the ring's round."""
        return self.inner.once(what, compute)
