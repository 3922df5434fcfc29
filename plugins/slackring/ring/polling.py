"""What rings over a real network share: collectives are started, polled with short pauses, and finished."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from slackring.errors import RingError
from slackring.ring.base import Clock, Flight, Ring
from slackring.ring.single import MachineClock

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PolledRing"]

log = logging.getLogger("slackring")

Handle = TypeVar("Handle")
T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.002  # seconds between two polls
_WATCH = 1.0  # seconds between two looks at whether the others are there
_PATIENCE = 30.0  # seconds after which a waiting rank says what it waits for
_FAREWELL = 30.0  # seconds that a process which ends gives the other ranks to enter what it has begun


class _PolledFlight(Flight, Generic[Handle]):
    """A round whose tensors are on their way as soon as they are sent."""

    def __init__(self, ring: PolledRing[Handle], name: str) -> None:
        self._ring, self._name = ring, name
        self._sent = 0
        self._handles: deque[Handle] = deque()

    def send(self, tensor: Tensor) -> None:
        index, self._sent = self._sent, self._sent + 1
        self._handles.append(self._ring.sum(tensor, self._name, index))

    def seal(self) -> None:
        pass

    def done(self) -> bool:
        while self._handles and self._ring.arrived(self._handles[0]):
            self._ring.finish(self._handles.popleft(), self._name)
        return not self._handles

    def wait(self) -> None:
        self._ring.poll_until(self.done, self._name)


class PolledRing(Ring, Generic[Handle]):
    """A ring over a library whose collectives are asynchronous; `Handle` is what the library gives for one under way.

    After the first failure it is not used again, since the library may hold its locks for ever.

    Parameters
    ----------
    whole
        The ring of all ranks, if this is one of some of them.
    """

    stalls: str
    """What a rank adds when it says that it waits."""

    def __init__(self, whole: Self | None = None) -> None:
        super().__init__()
        self.clock: Clock = MachineClock()
        self._failed: str | None = None
        self._whole = whole
        self._under_way: set[Handle] = set()
        self._leave = functools.partial(_leave, weakref.ref(self), os.getpid())
        atexit.register(self._leave)

    @property
    @abstractmethod
    def current(self) -> bool:
        """Whether the job that this ring belongs to is still the process's."""

    @abstractmethod
    def sum(self, tensor: Tensor, name: str, index: int) -> Handle:
        """Start summing tensor number `index` of round `name` over all ranks, in place."""

    @abstractmethod
    def arrived(self, handle: Handle) -> bool:
        """Whether a collective has ended, well or not."""

    @abstractmethod
    def _result(self, handle: Handle) -> Any:
        """Take the result of a collective that has ended."""

    def before_collective(self, callback: Callable[[], object]) -> None:
        """Have `callback` run before every collective of the user's own, over the same ranks or over all."""
        super().before_collective(callback)
        if self._whole is not None:
            self._whole.before_collective(callback)

    def claim(self, owner: object = None) -> int:
        """A number for whoever sends rounds here."""
        # What is registered last is called first: before what the library does at the end, also if it was initialised anew.
        atexit.unregister(self._leave)
        atexit.register(self._leave)
        return super().claim(owner)

    def open(self, name: str) -> Flight:
        """Open a round."""
        return _PolledFlight(self, name)

    def start(self, begin: Callable[[], T], name: str) -> T:
        """Have the library begin something that belongs to `name`.

        Raises
        ------
        RingError
            If it cannot start, or the ring has failed before.
        """
        if self._failed is not None:
            raise RingError(
                f"rank {self.rank}: {name!r} cannot start, since this ring has failed before: {self._failed}"
            )
        try:
            return begin()
        except (RuntimeError, ValueError) as exc:
            raise self._failure(name, str(exc)) from exc

    def begin(self, collective: Callable[[], Handle], name: str) -> Handle:
        """Start a collective, which is under way until it is finished; as :meth:`start`."""
        handle = self.start(collective, name)
        self._under_way.add(handle)
        return handle

    def finish(self, handle: Handle, name: str) -> Any:
        """Take the result of a collective that has ended.

        Raises
        ------
        RingError
            If it has failed.
        """
        self._under_way.discard(handle)
        try:
            return self._result(handle)
        except (RuntimeError, ValueError) as exc:
            raise self._failure(name, str(exc)) from exc

    def poll_until(self, done: Callable[[], bool], name: str) -> None:
        """Sleep in short pauses until something is done; the libraries' own waits would spin a core or be deaf to signals."""
        pause, start = _FIRST_PAUSE, self.clock.now()
        watch, patience = _WATCH, _PATIENCE
        while not done():
            self.clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            waited = self.clock.now() - start
            if waited > watch:
                watch = waited + _WATCH
                self._watch(name)
            if waited > patience:
                log.warning(
                    "rank %d has waited %.0f s in %r, which another rank has not entered (%s).",
                    self.rank,
                    patience,
                    name,
                    self.stalls,
                )
                patience *= 2

    def leave(self) -> None:
        """At the end of the process, wait for what this rank has begun: without it, it would fail on ranks that come later.

        A process that ends by an exception does not wait, one that ends by ``sys.exit`` does, half a minute at most.
        """
        if self._failed is None and self.current:
            deadline = self.clock.now() + _FAREWELL
            self.poll_until(
                lambda: all(map(self.arrived, self._under_way)) or self.clock.now() > deadline, "its last rounds"
            )

    def _blocking(self, handle: Handle, name: str) -> Any:
        self.poll_until(lambda: self.arrived(handle), name)
        return self.finish(handle, name)

    def _watch(self, name: str) -> None:
        """Look, once a second of waiting, for what makes waiting for `name` vain."""

    def _cause(self) -> str:
        """Say why a collective has failed."""
        return "most likely because another rank died"

    def _failure(self, name: str, told: str) -> RingError:
        self._failed = f"rank {self.rank}: {name!r} failed, {self._cause()}: {told}"
        return RingError(self._failed)


def _leave(ring: weakref.ref[PolledRing[Any]], pid: int) -> None:
    left = ring()
    if left is None or os.getpid() != pid or hasattr(sys, "last_type"):  # what ends by an error keeps nobody waiting
        return
    with contextlib.suppress(RingError):
        left.leave()
