"""A run that is under way on a pool: its result, what is known of it meanwhile, its folder, and how to end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from slackring.dask.board import Board
from slackring.dask.live import Live
from slackring.dask.placement import Place
from slackring.dask.pool import Pool
from slackring.dask.saving import write_whole
from slackring.dask.site import Event
from slackring.errors import OutputError, PoolError

__all__ = ["Callback", "Run", "RunFolder"]

log = logging.getLogger("slackring")

_TICK = 0.05  # seconds between two looks at whether a run is over

Callback = Callable[[Mapping[str, Any]], object]
"""Takes what a rank has given to ``sr.report``, by name, and its number as ``rank``."""


class RunFolder:
    """``runs/<id>/``: a log for each rank, what they reported and saved, and what was run where; readable by its owner only.

    Parameters
    ----------
    path
        The folder, which is made.

    Raises
    ------
    OutputError
        If it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        except OSError as exc:
            raise OutputError(
                f"results cannot be written to {str(path)!r}: {exc.strerror}; give another out=."
            ) from exc
        self._files: dict[str, TextIO] = {}
        self._saving = ThreadPoolExecutor(1, "slackring-saving")  # large files would keep the event loop busy
        self._unsaved: dict[str, bytes] = {}  # the newest of each name: ranks may be faster than this disk
        self._unwritten: set[str] = set()
        self._closed = False

    def describe(self, what: str, places: Sequence[Place]) -> None:
        """Say what runs, and where."""
        ranks = [
            {
                "rank": place.rank,
                "worker": place.worker.address,
                "name": place.worker.name,
                "host": place.worker.hostname,
            }
            for place in places
        ]
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._append("run.json", json.dumps({"function": what, "started": started, "ranks": ranks}, indent=1) + "\n")

    def take(self, rank: int, event: Event) -> None:
        """Write what a rank tells; not what it still prints when the run is over, and somebody may have moved the folder."""
        if self._closed:
            return
        if event["kind"] == "log":
            self._append(f"rank-{rank}.log", event["text"])
        elif event["kind"] in ("report", "warning"):
            self._append("events.jsonl", json.dumps({"rank": rank, **event}) + "\n")
        elif event["kind"] == "saved":
            self._unsaved[event["name"]] = event["content"]
            self._saving.submit(self._save, event["name"])

    def close(self) -> None:
        """Take no more, and close its files; those that are being saved go on."""
        self._closed = True
        for file in self._files.values():
            file.close()
        self._files.clear()

    def settle(self) -> None:
        """Wait for files that are being saved."""
        self._saving.shutdown()

    def _append(self, name: str, text: str) -> None:
        with self._going_on(name):
            if name not in self._files:
                self._files[name] = (self.path / name).open("a", encoding="utf-8", buffering=1)
            self._files[name].write(text)

    def _save(self, name: str) -> None:
        content = self._unsaved.pop(name, None)
        if content is None:  # a newer one has come, and was saved
            return
        path = self.path / "saved" / name
        with self._going_on(f"saved/{name}"):
            path.parent.mkdir(exist_ok=True)
            write_whole(path, content)

    @contextlib.contextmanager
    def _going_on(self, name: str) -> Iterator[None]:
        """Have the run go on where a file cannot be written, and say so once."""
        try:
            yield
        except OSError as exc:
            if name not in self._unwritten:
                log.warning("%s cannot be written (%s); the run goes on.", self.path / name, exc.strerror)
            self._unwritten.add(name)


class _Messenger:
    """Calls the user's callbacks in a thread of their own, so that a slow one keeps nobody waiting."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks, self._abandoned = callbacks, False
        self._reports: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="slackring-callbacks", daemon=True)
        if callbacks:
            self._thread.start()

    def send(self, report: Mapping[str, Any]) -> None:
        if self._callbacks:
            self._reports.put(report)

    def abandon(self) -> None:
        """Have nobody wait: a callback may have ended the run, and waits for that itself."""
        self._abandoned = True

    def close(self) -> None:
        """Wait until all is delivered."""
        if self._callbacks:
            self._reports.put(None)
            if not self._abandoned:
                self._thread.join()

    def _deliver(self) -> None:
        while (report := self._reports.get()) is not None:
            for callback in self._callbacks:
                try:
                    callback(report)
                except Exception:
                    log.exception("a callback failed:")


class Run:
    """A function that runs on all ranks of a pool; what :meth:`DaskExecutor.run_remote` gives.

    Attributes
    ----------
    id : str
        The name of its folder.
    folder : Path
        ``rank-N.log`` is all that rank N has printed so far; ``events.jsonl`` has what ranks gave to ``sr.report``, and
        warnings; ``saved`` what they gave to ``sr.dask.save``; ``run.json`` says what runs where.
    places : sequence of Place
        Where its ranks are, by rank; empty until they have started.
    board : Board or None
        How far they are; None until they have started.
    stopping : bool
        Whether it was asked to stop.
    """

    def __init__(self, client: Any, folder: Path, what: str, callbacks: Sequence[Callback]) -> None:
        self.id, self.folder, self.what = folder.name, folder, what
        self.places: Sequence[Place] = ()
        self.board: Board | None = None
        self.stopping = False
        self._client = client
        self._written = RunFolder(folder)
        self._messenger = _Messenger(callbacks)
        self._outcome: Future[list[Any]] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._pool: Pool | None = None

    def __repr__(self) -> str:
        if self._outcome is None or not self._outcome.done():
            state = "under way"
        elif self._outcome.cancelled():
            state = "cancelled"
        else:
            state = "failed" if self._outcome.exception() else "done"
        return f"<Run {self.id}: {self.what} on {len(self.places)} ranks, {state}>"

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._outcome is not None and self._outcome.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for what the function returned, by rank; to be awaited if the client is asynchronous.

        Parameters
        ----------
        timeout
            Seconds to wait; None waits as long as it takes. The run goes on if they are not enough.

        Raises
        ------
        RankError
            If a rank failed; the error of the function itself is its cause.
        TimeoutError
            If it is not over in time.
        """
        return self._client.sync(self._wait, timeout)

    def live(self) -> Any:
        """Draw how far it is, until it is over; to be awaited if the client is asynchronous.

        There is a row for each rank: rounds, samples a second, how much it waits and for whom, and what it gives to
        ``sr.report``. In a notebook the last state stays. After Ctrl-C the run goes on.

        Returns
        -------
        Run
            This one: ``run.live().result()``.
        """
        if self._client.asynchronous:
            return self._live()
        while not self._begun:
            time.sleep(_TICK)
        if self.board is not None:
            with Live(self.board) as drawing:
                while not self.done():
                    drawing.draw()
                    time.sleep(_TICK)
                self.board.end()
        return self

    def stop(self) -> Any:
        """Ask all ranks to stop after the same round; they return what they return then.

        What they train with is a :func:`slackring.DistributedOptimizer`, and their loop ends when ``optimizer.progress.stop``
        says so. Other code does not hear it: :meth:`cancel` ends that.
        """
        return self._client.sync(self._stop)

    def cancel(self) -> Any:
        """End all ranks as they are. Returns when they have ended; :meth:`result` raises `PoolError` then."""
        return self._client.sync(self._cancel)

    def begin(self, work: Coroutine[Any, Any, list[Any]]) -> None:
        """Have the client's event loop do the work; the executor's."""
        self._outcome = asyncio.run_coroutine_threadsafe(self._carry_out(work), self._client.loop.asyncio_loop)

    def run_on(self, pool: Pool) -> None:
        """Take note of the ranks it runs on; the executor's."""
        self._pool, self.places = pool, pool.places
        self.board = Board([place.worker.address for place in pool.places], self.what)
        self._written.describe(self.what, pool.places)

    def take(self, rank: int, event: Event) -> None:
        """Take what a rank tells; the pool's."""
        self._written.take(rank, event)
        match event["kind"]:
            case "progress" if self.board is not None:
                self.board.take(rank, event)
            case "warning" if self.board is not None:
                self.board.warn(event["text"])
                log.warning("%s: %s", self.id, event["text"])
            case "report":
                self._messenger.send({"rank": rank, **event["values"]})

    async def _carry_out(self, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        self._task = asyncio.current_task()
        try:
            return await work
        except asyncio.CancelledError:
            self._messenger.abandon()
            raise PoolError(f"{self.what}() was cancelled, and its ranks have ended.") from None
        finally:
            self._written.close()
            settling = asyncio.create_task(asyncio.to_thread(self._settle))
            while not settling.done():
                with contextlib.suppress(asyncio.CancelledError):  # too late: the outcome is known
                    await asyncio.shield(settling)

    def _settle(self) -> None:
        """Wait for files and callbacks."""
        self._written.settle()
        self._messenger.close()

    @property
    def _begun(self) -> bool:
        """Whether there are ranks, or never will be."""
        return self.board is not None or self.done()

    async def _live(self) -> Run:
        while not self._begun:
            await asyncio.sleep(_TICK)
        if self.board is not None:
            with Live(self.board) as drawing:
                while not self.done():
                    drawing.draw()
                    await asyncio.sleep(_TICK)
                self.board.end()
        return self

    async def _wait(self, timeout: float | None) -> list[Any]:
        assert self._outcome is not None
        outcome = asyncio.wrap_future(self._outcome)
        # After Ctrl-C nobody waits for it, and asyncio would complain of an error that nobody has seen.
        outcome.add_done_callback(lambda over: over.cancelled() or over.exception())
        return await asyncio.wait_for(asyncio.shield(outcome), timeout)

    async def _stop(self) -> None:
        self.stopping = True
        if self._pool is not None and not self.done():
            await self._pool.wish_to_stop()

    async def _cancel(self) -> None:
        while self._task is None:
            await asyncio.sleep(0.01)  # it is about to begin
        self._task.cancel()
        await asyncio.wait([self._task])
