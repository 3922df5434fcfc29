"""A ring of one rank: every round is done as soon as it is sealed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slackring.ring.base import ArrivedFlight, Flight, Ring

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MachineClock", "SingleRing"]


class MachineClock:
    """The machine's monotonic clock; on Linux its origin is the same for all processes of a machine."""

    def now(self) -> float:
        """Seconds since the clock's origin."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`; zero or less returns at once."""
        if seconds > 0:
            time.sleep(seconds)


class SingleRing(Ring):
    """The ring of a process that trains alone."""

    kind = "single"
    rank = 0
    size = 1

    def __init__(self) -> None:
        super().__init__()
        self.clock = MachineClock()

    def open(self, name: str) -> Flight:
        """Open a round that is done when sealed: a sum over one rank."""
        return ArrivedFlight()

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """The payload itself."""
        return [payload]

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return tensor.detach().clone()
