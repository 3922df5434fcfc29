"""What a Dask worker keeps for the ranks that sit on it: who holds the worker, and a mailbox for each rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Event", "Mailbox", "Order", "Site"]

Event = dict[str, Any]
"""What a rank, or its supervisor, tells the client; its ``kind`` says what."""

Order = dict[str, Any]
"""What the client tells a supervisor; its ``op`` says what."""

_FULL = 1 << 22  # bytes that wait for the client, above which supervisors send no more of logs and results
_REPLY = 1 << 20  # bytes of one answer to the client
_YET = 0.02  # seconds between two looks for a mailbox that is not open yet
_BESIDE = 100  # bytes that an event takes beside its text and data


class Mailbox:
    """Events on their way from a rank to the client, and orders on their way to the rank.

    Nothing is lost: an event is kept until the client asks for those after it.

    Parameters
    ----------
    loop
        The worker's event loop, on which the client's questions are answered.

    Attributes
    ----------
    bell : int
        A file descriptor that is readable while an order waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        self._events: deque[Event] = deque()
        self._first = self._size = 0
        self._arrived = asyncio.Event()
        self._orders: deque[Order] = deque()
        self._closed = False
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, event: Event) -> None:
        """Send an event to the client; from any thread."""
        with self._lock:
            self._events.append(event)
            self._size += _size(event)
        self._loop.call_soon_threadsafe(self._arrived.set)

    @property
    def empty(self) -> bool:
        """Whether the client has everything."""
        return not self._events

    @property
    def full(self) -> bool:
        """Whether so much waits for the client that what can wait should."""
        return self._size >= _FULL

    async def read(self, after: int, seconds: float) -> tuple[list[Event], int]:
        """Wait for events; on the worker's loop.

        Parameters
        ----------
        after
            How many events the client has received, which are dropped.
        seconds
            How long to wait for the first one.

        Returns
        -------
        tuple
            Some of the oldest events, and what to give as `after` next time.
        """
        self._drop(after)
        if not self._events and not self._closed:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), seconds)
            except TimeoutError:
                return [], after
        with self._lock:
            found, size = [], 0
            for event in self._events:
                found.append(event)
                size += _size(event)
                if size >= _REPLY:
                    break
        return found, after + len(found)

    def _drop(self, after: int) -> None:
        with self._lock:
            while self._events and self._first < after:
                self._size -= _size(self._events.popleft())
                self._first += 1

    def order(self, order: Order) -> None:
        """Give the supervisor an order; from any thread."""
        self._orders.append(order)
        os.eventfd_write(self.bell, 1)

    def orders(self) -> Iterator[Order]:
        """Take the orders that wait; the supervisor's."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        while self._orders:
            yield self._orders.popleft()

    def close(self) -> None:
        """Close it, and wake whoever reads; on the worker's loop, once it is no longer listed."""
        self._closed = True
        self._arrived.set()
        os.close(self.bell)


def _size(event: Event) -> int:
    return _BESIDE + len(event.get("text", "")) + len(event.get("data", b""))


class Site:
    """The ranks of one Dask worker.

    The client asks it by two operations of the worker, ``slackring_order`` and ``slackring_read``, which pass through the
    scheduler as all of the client's messages do. So there is no port beside Dask's, and what is sent is as safe as Dask is.

    Parameters
    ----------
    worker
        A ``distributed.Worker``.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._boxes: dict[str, Mailbox] = {}
        self._changed = threading.Condition()
        self.holder: str | None = None
        """The pool that has this worker; None if none has."""
        worker.handlers["slackring_order"] = self._order
        worker.handlers["slackring_read"] = self._read

    @classmethod
    def of(cls, worker: Any) -> Site:
        """The site of a worker, always the same one."""
        with _lock:
            if "slackring" not in worker.extensions:
                worker.extensions["slackring"] = cls(worker)
            site: Site = worker.extensions["slackring"]
            return site

    @contextmanager
    def mailbox(self, pool: str) -> Iterator[Mailbox]:
        """Open the mailbox of a pool's rank on this worker, and close it at the end of the block."""
        box = self._boxes[pool] = Mailbox(self._worker.loop.asyncio_loop)
        try:
            yield box
        finally:
            del self._boxes[pool]
            self._worker.loop.add_callback(box.close)  # after whatever the loop is doing with it

    @contextmanager
    def held(self, pool: str, wanted: Callable[[], bool]) -> Iterator[bool]:
        """Hold the worker for a pool, whose ranks are then the only ones on it.

        Parameters
        ----------
        pool
            Who wants it.
        wanted
            Whether to go on waiting for it.

        Yields
        ------
        bool
            Whether it is held.
        """
        with self._changed:
            while self.holder is not None and wanted():
                self._changed.wait(0.2)
            mine = self.holder is None
            if mine:
                self.holder = pool
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self.holder = None
                    self._changed.notify_all()

    async def _order(self, pool: str, order: Order) -> None:
        box = self._boxes.get(pool)
        if box is not None:
            box.order(order)

    async def _read(self, pool: str, incarnation: str, after: int, seconds: float) -> dict[str, Any]:
        """Answer the client: new events, and whether the rank is gone, or was on another incarnation of this worker."""
        box = self._boxes.get(pool)
        if box is None:
            if after == 0 and incarnation == self._worker.id:
                await asyncio.sleep(_YET)  # its supervisor has not begun
                return {"events": [], "next": 0, "gone": False}
            return {"events": [], "next": after, "gone": True}
        events, following = await box.read(after, seconds)
        return {"events": events, "next": following, "gone": not events and pool not in self._boxes}


_lock = threading.Lock()
