"""The ring that Horovod provides, over Gloo or NCCL."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from slackring.errors import HorovodMissingError, RingError
from slackring.ring.base import Clock, Flight, Ring
from slackring.ring.single import MachineClock

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HorovodRing", "import_horovod"]

log = logging.getLogger("slackring")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.002  # seconds between two polls
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
    def __init__(self, ring: HorovodRing, name: str) -> None:
        self._ring, self._name = ring, name
        self._handles: deque[int] = deque()
        self._index = itertools.count()

    def send(self, tensor: Tensor) -> None:
        self._handles.append(self._ring.start("allreduce_async_", f"{self._name}.{next(self._index)}", tensor))

    def seal(self) -> None:
        pass

    def done(self) -> bool:
        while self._handles and self._ring.arrived(self._handles[0]):
            self._ring.finish(self._handles.popleft(), self._name)
        return not self._handles

    def wait(self) -> None:
        self._ring.poll_until(self.done, self._name)


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
        self._failed: str | None = None

    def open(self, name: str) -> Flight:
        """Open a round; its tensors are called ``name.0``, ``name.1``, which keeps them in Horovod's response cache."""
        return _HorovodFlight(self, name)

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Collect every rank's bytes on every rank."""
        lengths = self._blocking("allgather_async", f"{name}.lengths", torch.tensor([len(payload)]))
        # A leading byte keeps the tensor from being empty.
        body = torch.frombuffer(bytearray(b"\0" + payload), dtype=torch.uint8)
        gathered = self._blocking("allgather_async", f"{name}.bytes", body).numpy().tobytes()
        ends = list(itertools.accumulate(int(length) + 1 for length in lengths))
        return [gathered[start + 1 : end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return self._blocking("broadcast_async", "slackring.broadcast", tensor.detach().contiguous(), root)

    def _blocking(self, collective: str, name: str, tensor: Tensor, *args: object) -> Tensor:
        handle = self.start(collective, name, tensor, *args)
        self.poll_until(lambda: self.arrived(handle), name)
        return self.finish(handle, name)

    def start(self, collective: str, name: str, tensor: Tensor, *args: object) -> int:
        """Start one of Horovod's asynchronous collectives; returns its handle."""
        if self._failed is not None:
            # After a failure Horovod may hold its locks for ever, so it is not touched again.
            raise RingError(
                f"rank {self.rank}: {name!r} cannot start, since this ring has failed before: {self._failed}"
            )
        options = {"op": self._hvd.Sum} if collective == "allreduce_async_" else {}
        try:
            handle: int = getattr(self._hvd, collective)(tensor, *args, name=name, **options)
        except (RuntimeError, ValueError) as exc:
            raise self._failure(name, exc) from exc
        return handle

    def arrived(self, handle: int) -> bool:
        """Whether a collective has ended, well or not."""
        return bool(self._hvd.poll(handle))

    def finish(self, handle: int, name: str) -> Tensor:
        """Take the result of a collective that has ended."""
        try:
            result: Tensor = self._hvd.synchronize(handle)
        except (RuntimeError, ValueError) as exc:
            raise self._failure(name, exc) from exc
        return result

    def poll_until(self, done: Callable[[], bool], name: str) -> None:
        """Sleep in short pauses until something is done; Horovod's own wait would spin a core."""
        pause, start, patience = _FIRST_PAUSE, self.clock.now(), _PATIENCE
        while not done():
            self.clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if self.clock.now() - start > patience:
                log.warning(
                    "rank %d has waited %.0f s in %r, which another rank has not entered "
                    "(Horovod's stall check lists the missing ranks on rank 0).",
                    self.rank,
                    patience,
                    name,
                )
                patience *= 2

    def _failure(self, name: str, exc: Exception) -> RingError:
        self._failed = f"rank {self.rank}: {name!r} failed, most likely because another rank died: {exc}"
        return RingError(self._failed)
