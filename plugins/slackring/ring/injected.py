"""A network that is injected into a real ring, for experiments on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from slackring.ring.base import Clock, Flight, Ring
from slackring.ring.network import Network

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["InjectedNetwork"]


class _DelayedFlight(Flight):
    def __init__(self, ring: InjectedNetwork, inner: Flight) -> None:
        self._ring, self._inner = ring, inner
        self._nbytes = 0
        self._end: float | None = None
        self._launches = torch.zeros(ring.size, dtype=torch.float64)

    def send(self, tensor: Tensor) -> None:
        self._nbytes += tensor.nbytes
        self._inner.send(tensor)

    def seal(self) -> None:
        # The round starts when the last rank launches it, which no rank knows alone.
        self._launches[self._ring.rank] = time.time()
        self._inner.send(self._launches)
        self._inner.seal()

    def _finish(self) -> float:
        if self._end is None:
            self._end = self._ring.end_of_round(float(self._launches.max()), self._nbytes)
        return self._end

    def done(self) -> bool:
        return self._inner.done() and time.time() >= self._finish()

    def wait(self) -> None:
        self._inner.wait()
        self._ring.clock.sleep(self._finish() - time.time())


class InjectedNetwork(Ring):
    """A real ring whose rounds take at least what a slower network would take.

    A round ends no earlier than ``max(last rank's launch, end of the round before) + network.seconds(...)``, the rule of the
    virtual ring. Ranks on several machines need clocks that agree to well below the injected times.

    Parameters
    ----------
    inner
        The ring that carries the rounds.
    network
        What is injected.
    """

    def __init__(self, inner: Ring, network: Network) -> None:
        super().__init__()
        # Whoever asks the inner ring for a collective finds, and drains, the rounds that travel here.
        self._before_collective = inner._before_collective
        self._inner, self._network = inner, network
        self._last_end = 0.0
        self.rank, self.size, self.kind = inner.rank, inner.size, inner.kind
        self.clock: Clock = inner.clock

    def end_of_round(self, last_launch: float, nbytes: int) -> float:
        """Wall-clock time, in seconds, at which the next round of `nbytes` bytes may end."""
        self._last_end = max(last_launch, self._last_end) + self._network.seconds(nbytes, self.size)
        return self._last_end

    def before_collective(self, callback: Callable[[], object]) -> None:
        """Have `callback` run before every collective of the user's own, on either ring."""
        self._inner.before_collective(callback)

    def claim(self, owner: object = None) -> int:
        """A number from the inner ring, whose names both use."""
        return self._inner.claim(owner)

    def open(self, name: str) -> Flight:
        """Open a round on the inner ring and delay it."""
        return _DelayedFlight(self, self._inner.open(name))

    def reduces(self, device: torch.device) -> bool:
        """Whether the inner ring sums on a device."""
        return self._inner.reduces(device)

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Collect bytes on the inner ring, undelayed."""
        return self._inner.gather(payload, name)

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return self._inner._broadcast(tensor, root)
