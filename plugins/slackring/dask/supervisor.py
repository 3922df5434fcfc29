"""The Dask task that owns a rank: it holds the worker, starts the rank's process, passes orders and events on, and ends it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slackring.dask import metrics
from slackring.dask.child import Child
from slackring.dask.rendezvous import Rendezvous
from slackring.dask.site import Event, Mailbox, Order, Site
from slackring.errors import PoolError

__all__ = ["HOLDING", "Seat", "supervise"]

HOLDING = ("running", "paused")
"""What a worker's status is while its rank goes on: Dask pauses one that has much in memory, which begins nothing new then."""

_TICK = 0.1  # seconds between two looks at the rank
_CHUNK = 1 << 20  # bytes of an event's content that are sent at once, before the event
_TAIL, _TAIL_LENGTH = 60, 20_000  # lines, and characters, of the log that tell why a rank has died
_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI_", "SLURM_", "SLACKRING_")  # what their variables begin with
_OF_OTHERS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Seat:
    """A rank's place in a pool.

    Attributes
    ----------
    pool
        Name of its pool.
    rank
        Its rank.
    incarnation
        Which process of the worker it is on: one that Dask has restarted is another.
    """

    pool: str
    rank: int
    incarnation: str


def supervise(seat: Seat) -> None:
    """Own a rank until it has ended, or this task is no longer wanted.

    It is no longer wanted once the client has cancelled it, has gone, or has lost the scheduler. The rank's process ends then,
    too; and by itself if this process dies.

    Raises
    ------
    PoolError
        If this is not the worker that the seat is on, since that one has died.
    """
    from distributed import get_worker, secede

    worker = get_worker()
    key = worker.get_current_task()
    secede()  # Dask neither counts this task's thread, nor takes the worker for one that can be closed
    if worker.id != seat.incarnation:
        raise PoolError(f"the worker of rank {seat.rank} has died.")

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return task is not None and task.state in ("executing", "long-running") and worker.status.name in HOLDING

    site = Site.of(worker)
    with site.mailbox(seat.pool) as box, site.held(seat.pool, wanted) as held:
        if held:
            box.put({"kind": "held"})
            folder = Path(tempfile.mkdtemp(prefix="slackring-", dir=worker.local_directory))
            try:
                _Supervisor(seat, box, folder, wanted).run()
            finally:
                shutil.rmtree(folder, ignore_errors=True)


class _Supervisor:
    def __init__(self, seat: Seat, box: Mailbox, folder: Path, wanted: Callable[[], bool]) -> None:
        self._seat, self._box, self._folder, self._wanted = seat, box, folder, wanted
        self._meeting: Rendezvous | None = None
        self._calls, self._run_id = 0, ""

    def run(self) -> None:
        with ExitStack() as at_the_end:
            at_the_end.callback(lambda: metrics.forget(self._run_id, self._seat.rank))
            while self._wanted():
                for order in self._orders():
                    if order["op"] == "meet":
                        self._meeting = Rendezvous(order["host"], order["secret"])
                        at_the_end.callback(self._meeting.stop)
                        self._box.put({"kind": "meeting", "port": self._meeting.port})
                    else:
                        self._run(order)
                        return

    def _run(self, start: Order) -> None:
        with Child(self._folder, _environment(start["environments"][self._seat.rank])) as child:
            child.send({"op": "hello", **start["hello"], "rank": self._seat.rank, "folder": str(self._folder)})
            told = self._told(child)
            while child.code is None and self._wanted():
                readable = [self._box.bell] if self._box.full else [self._box.bell, child.pipe]
                select.select(readable, [], [], _TICK)
                self._obey(child)
                self._pass_on(told)
            child.end()
            for _ in range(2):  # what was not passed on yet, and what it said last
                self._pass_on(told)
            self._box.put(self._ended(child))
            while not self._box.empty and self._wanted():
                list(self._orders())  # nobody is left to carry them out
                self._pass_on(told)

    def _orders(self) -> Iterator[Order]:
        """Wait a moment for orders."""
        select.select([self._box.bell], [], [], _TICK)
        return self._box.orders()

    def _obey(self, child: Child) -> None:
        for order in self._box.orders():
            if order["op"] == "open":
                self._open(order)
            else:
                child.send(self._in_files(order))

    def _open(self, order: Order) -> None:
        if self._meeting is not None:
            self._meeting.open(order["generation"], order["scope_sizes"])
            self._box.put({"kind": "open", "generation": order["generation"]})

    def _in_files(self, order: Order) -> Order:
        """Put the bytes of an order into files, which the rank removes."""
        if order["op"] != "call":
            return order
        metrics.forget(self._run_id, self._seat.rank)
        self._run_id = order["run"]
        self._calls += 1
        files = {"result": str(self._folder / f"result-{self._calls}")}
        for part in ("call", "archive"):
            file = self._folder / f"{part}-{self._calls}"
            file.write_bytes(order[part])
            files[part] = str(file)
        return {**order, **files}

    def _pass_on(self, told: Iterator[Event | None]) -> None:
        """Send the client what there is, as far as there is room for it; the rest comes later, or never if the rank ends."""
        while not self._box.full and (event := next(told)) is not None:
            self._box.put(event)

    def _told(self, child: Child) -> Iterator[Event | None]:
        """What the rank tells, in pieces and in order; None whenever it tells nothing more."""
        while True:
            events = child.events()
            for text in child.printed():  # before the event that comes after it
                yield {"kind": "log", "text": text}
            for event in events:
                if event["kind"] == "progress":
                    metrics.update(self._run_id, self._seat.rank, event)
                file = event.pop("content", None)
                if file is None:
                    yield event
                elif (content := _opened(file)) is not None:
                    with content:
                        while data := content.read(_CHUNK):
                            yield {"kind": "content", "data": data}
                    yield event
            yield None

    def _ended(self, child: Child) -> Event:
        code = child.code
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        tail = child.tail(_TAIL, _TAIL_LENGTH)
        return {
            "kind": "ended",
            "sentence": how,
            "text": f"Its log ends with:\n{tail}" if tail else "It has printed nothing.",
        }


def _opened(file: str) -> BinaryIO | None:
    """Take a file of the rank's from its folder; None if it is not there, since an earlier event of the same file took it."""
    try:
        content = open(file, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return None
    os.unlink(file)
    return content


def _environment(given: dict[str, str]) -> dict[str, Any]:
    """The rank's environment: this worker's, without what other launchers have left there, and what is given."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in _OF_OTHERS and not name.startswith(_LAUNCHERS)
    }
    return {**inherited, "PYTHONUNBUFFERED": "1", **given}
