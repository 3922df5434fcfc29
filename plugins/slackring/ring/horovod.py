"""The ring that Horovod provides, over Gloo or NCCL."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from slackring.errors import HorovodMissingError, RingError
from slackring.ring.base import Clock, Flight, Ring
from slackring.ring.single import MachineClock

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HorovodRing", "import_horovod"]

log = logging.getLogger("slackring")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.002  # seconds between two polls; Horovod's own wait would spin a core
_PATIENCE = 30.0  # seconds after which a waiting rank says what it waits for


def import_horovod() -> Any:
    """Import ``horovod.torch``.

    Raises
    ------
    HorovodMissingError
        With the command that mends it, if Horovod is missing or built for another torch.
    """
    try:
        import horovod.torch as hvd
    except Exception as exc:  # a build for another torch fails with its own error types
        raise HorovodMissingError(
            f"Horovod cannot be used here ({type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else 'no reason given'}); "
            "build it for this torch with: python cluster_configs/horovod/build.py"
        ) from exc
    return hvd


class _HorovodFlight(Flight):
    def __init__(self, hvd: Any, clock: Clock, name: str, rank: int) -> None:
        self._hvd, self._clock, self._name, self._rank = hvd, clock, name, rank
        self._handles: deque[int] = deque()
        self._index = itertools.count()

    def send(self, tensor: Tensor) -> None:
        name = f"{self._name}.{next(self._index)}"
        self._handles.append(self._hvd.allreduce_async_(tensor, op=self._hvd.Sum, name=name))

    def seal(self) -> None:
        pass

    def done(self) -> bool:
        while self._handles and self._hvd.poll(self._handles[0]):
            self._finish(self._handles.popleft())
        return not self._handles

    def wait(self) -> None:
        pause, start = _FIRST_PAUSE, self._clock.now()
        patience = _PATIENCE
        while not self.done():
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if self._clock.now() - start > patience:
                log.warning(
                    "rank %d has waited %.0f s for round %r; a rank has not launched it "
                    "(Horovod's stall check lists the missing ranks on rank 0).",
                    self._rank,
                    patience,
                    self._name,
                )
                patience *= 2

    def _finish(self, handle: int) -> None:
        try:
            self._hvd.synchronize(handle)
        except Exception as exc:
            raise RingError(
                f"rank {self._rank}: round {self._name!r} failed, most likely because another rank died: {exc}"
            ) from exc


class HorovodRing(Ring):
    """A rank of an initialised Horovod job.

    Raises
    ------
    HorovodMissingError
        If Horovod cannot be imported.
    RingError
        If ``hvd.init()`` has not been called.
    """

    kind = "horovod"

    def __init__(self) -> None:
        super().__init__()
        self._hvd = import_horovod()
        if not self._hvd.is_initialized():
            raise RingError("Horovod is not initialised; call hvd.init() first.")
        self.rank, self.size = int(self._hvd.rank()), int(self._hvd.size())
        self.clock: Clock = MachineClock()

    def open(self, name: str) -> Flight:
        """Open a round; its tensors are named ``name.0``, ``name.1`` and so on, which keeps them in Horovod's response cache."""
        return _HorovodFlight(self._hvd, self.clock, name, self.rank)

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Collect every rank's bytes on every rank."""
        lengths = self._wait(self._hvd.allgather_async(torch.tensor([len(payload)]), name=f"{name}.lengths"))
        # A leading byte keeps the tensor from being empty.
        body = torch.frombuffer(bytearray(b"\0" + payload), dtype=torch.uint8)
        gathered = self._wait(self._hvd.allgather_async(body, name=f"{name}.bytes")).numpy().tobytes()
        ends = list(itertools.accumulate(int(length) + 1 for length in lengths))
        return [gathered[start + 1 : end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return self._wait(self._hvd.broadcast_async(tensor.detach(), root, name="slackring.broadcast"))

    def _wait(self, handle: int) -> Tensor:
        pause = _FIRST_PAUSE
        while not self._hvd.poll(handle):
            self.clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        try:
            result: Tensor = self._hvd.synchronize(handle)
        except Exception as exc:
            raise RingError(
                f"rank {self.rank}: a collective failed, most likely because another rank died: {exc}"
            ) from exc
        return result
