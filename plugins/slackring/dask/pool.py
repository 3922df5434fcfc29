"""The ranks on a cluster's workers, driven by the client; everything here runs on the client's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slackring.dask.answers import Answer, blamed, culprit
from slackring.dask.code import Bundle
from slackring.dask.facts import WorkerFacts, check_alike, look, read_answers
from slackring.dask.placement import Place, place
from slackring.dask.relay import ping
from slackring.dask.signing import new_secret
from slackring.dask.site import Event, Order, Site
from slackring.dask.supervisor import HOLDING, Seat, supervise
from slackring.errors import PoolError, RankError

__all__ = ["Pool", "Settings", "Sink"]

T = TypeVar("T")

log = logging.getLogger("slackring")

_POLL = 5.0  # seconds that a question for events may stay open
_LOOK = 1.0  # seconds between two looks at which workers there are
_QUIET = 5.0  # seconds to wait for others' workers before saying so
_PATIENCE = 3.0  # seconds in which the rank that is to blame may answer, after those that suffer from it
_SOON = 0.2  # seconds in which others may have failed, too, and earlier
_FAREWELL = 5.0  # seconds that ranks get to end by themselves

Sink = Callable[[int, Event], None]
"""Takes what a rank tells: its number, and the event."""


@dataclass(frozen=True)
class Settings:
    """How a pool is started and watched.

    Parameters
    ----------
    timeout_s
        Seconds after which ranks give up on a peer that does not answer, and within which all ranks have stopped once one has
        failed.
    placement_timeout_s
        Seconds to wait for enough workers, for other pools to leave them, and for ranks to start.
    nics
        Network interfaces to use on every worker; None takes the one that has the worker's address.
    """

    timeout_s: float = 30.0
    placement_timeout_s: float = 100.0
    nics: tuple[str, ...] | None = None


class _Member:
    """One rank, as the client knows it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.held, self.started, self.meeting, self.open, self.ready = (asyncio.Event() for _ in range(5))
        self.port = 0
        self.over: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        """Set once the rank is no more: it has died, or its worker has."""
        self.gone = asyncio.Event()
        """Set once it has no supervisor on the worker any more."""
        self.modules: str | None = None
        """Digest of the user's modules that it has; None until a call brings some."""
        self.answer: asyncio.Future[Answer] | None = None
        self._content = bytearray()

    @property
    def name(self) -> str:
        return f"rank {self.place.rank} on {self.place.worker}"

    def take(self) -> bytes:
        """Take the content that has come for the event that is here now."""
        content, self._content = bytes(self._content), bytearray()
        return content

    def add(self, content: bytes) -> None:
        """Add to what :meth:`take` gives."""
        self._content += content

    def settle(self, answer: Answer) -> None:
        """Answer the call that is under way."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(answer)

    def lose(self) -> None:
        """Take note that its worker is no more, or cannot be reached."""
        self.end(Answer(self.place.rank, "lost", sentence="has lost its worker, which has died or left the cluster"))

    def end(self, answer: Answer) -> None:
        """Take note that the rank is no more."""
        if not self.over.done():
            self.over.set_result(answer)
        self.settle(answer)


class Pool:
    """Ranks on the workers of a cluster, one a worker.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    number
        How many ranks; None is one on every worker there is, once there are as many as `least` says.
    least
        See `number`; asked again and again, since it may change.
    settings
        See :class:`Settings`.
    use_gpu
        See :func:`slackring.dask.placement.place`.
    environment
        Variables for every rank.
    """

    def __init__(
        self,
        client: Any,
        number: int | None,
        least: Callable[[], int],
        settings: Settings,
        use_gpu: bool | None,
        environment: Mapping[str, str],
    ) -> None:
        self.name = f"pool-{secrets.token_hex(4)}"
        self._client, self._number, self._least = client, number, least
        self._settings, self._use_gpu = settings, use_gpu
        self._environment = environment
        self._secret = new_secret()
        self._members: list[_Member] = []
        self._futures: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._calls, self._kept, self._closed = 0, False, False
        self._sink: Sink = lambda rank, event: None

    @property
    def places(self) -> list[Place]:
        """Where the ranks are, by rank."""
        return [member.place for member in self._members]

    def has_others_than(self, modules: Bundle) -> bool:
        """Whether its ranks have imported other modules of the user's, or what these were before they changed."""
        return bool(modules.archive) and any(member.modules not in (None, modules.digest) for member in self._members)

    async def open(self) -> None:
        """Start the ranks.

        Raises
        ------
        PoolError
            If there are too few workers, if they differ, if they are others' for too long, or cannot reach each other.
        HorovodMissingError
            If a worker lacks Horovod.
        RankError
            If a rank does not start.
        """
        try:
            workers = await self._workers()
            self._members = [_Member(where) for where in place(workers, self._number or len(workers), self._use_gpu)]
            self._tasks.append(asyncio.create_task(self._watch()))
            await self._hold()
            host, port = await self._meet()
            await self._order(
                {
                    "op": "start",
                    "environments": [self._environment_of(member.place) for member in self._members],
                    "hello": {"host": host, "port": port, "secret": self._secret.hex()},
                }
            )
            await self._all("started", "did not start")
        except BaseException:
            await asyncio.shield(self.close(kill=True))
            raise

    async def ready(self) -> bool:
        """Ask every rank whether it can take a call; if one cannot, end all of them.

        What becomes of a rank between two calls is not known at once, and is no fault of the next call's.
        """
        if self._closed:
            return False
        for member in self._members:
            member.ready.clear()
        asking = asyncio.create_task(self._order({"op": "ready"}))  # not waited for, as in a call
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await asyncio.gather(*(self._until(member, member.ready) for member in self._members))
        except (RankError, TimeoutError) as exc:
            silent = ", ".join(member.name for member in self._members if not member.ready.is_set())
            log.warning(
                "Starting all ranks anew: %s", str(exc) or f"{silent} does not answer, though nothing runs there."
            )
            await self.close(kill=True)
            return False
        finally:
            asking.cancel()
        return True

    async def call(
        self,
        content: bytes,
        modules: Bundle,
        what: str,
        sink: Sink,
        *,
        run: str = "",
        ranks: Sequence[int] | None = None,
        executable: bool = False,
        keep: bool = False,
        stopping: bool = False,
    ) -> list[bytes]:
        """Have ranks call a function, and wait for what it returns.

        Parameters
        ----------
        content
            What :func:`slackring.dask.code.dump_call` gave.
        modules
            The user's modules that it needs. A pool takes some once: ranks do not import anew.
        what
            What to call it in messages.
        sink
            Takes what the ranks tell meanwhile.
        run
            What metrics call it.
        ranks
            Which; all if None.
        executable, keep
            Whether the ranks' executable is its first argument, and whether what it returns is the executable from now on.
        stopping
            Whether it is to stop as soon as it can.

        Returns
        -------
        list of bytes
            Pickled results, by rank.

        Raises
        ------
        RankError
            If one of them fails. All ranks have ended then.
        """
        members = self._members if ranks is None else [self._members[rank] for rank in ranks]
        self._calls += 1
        generation = str(self._calls)
        self._sink = sink
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Answer]] = []
        for member in members:
            member.answer = loop.create_future()
            answers.append(member.answer)
            if member.over.done():
                member.settle(member.over.result())
        order = {
            "op": "call",
            "call": content,
            "generation": generation,
            "what": what,
            "run": run,
            "executable": executable,
            "keep": keep,
            "stopping": stopping,
        }
        # Beside the answers, since Dask tries for long to reach a worker that has just died.
        ordering = asyncio.create_task(self._open_and_order(order, modules, members))
        try:
            came = await self._answers(answers)
        except BaseException:
            await asyncio.shield(self.close(kill=True))
            raise
        finally:
            ordering.cancel()
        guilty = culprit(came)
        if guilty is not None:
            silent = [member.place.rank for member, answer in zip(members, answers, strict=True) if not answer.done()]
            await self.close(kill=True)
            raise self._error(blamed(guilty, silent)) from guilty.exception()
        self._kept |= keep
        if not self._kept:  # what ranks keep may have met, and count on it
            await self._order({"op": "rest"})
        return [answer.result().content for answer in answers]

    async def _answers(self, pending: Sequence[asyncio.Future[Answer]]) -> list[Answer]:
        """Wait for all answers, or for one that is a failure and those that follow at once; in the order in which they come."""
        came: list[Answer] = []
        waiting = set(pending)
        loop = asyncio.get_running_loop()
        deadline = math.inf
        while waiting and (left := deadline - loop.time()) > 0:
            timeout = None if left == math.inf else left
            done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            came += [answer.result() for answer in done]
            guilty = culprit(came)
            if guilty is not None:
                patience = min(_PATIENCE if guilty.of_peers else _SOON, self._settings.timeout_s / 2)
                deadline = min(deadline, loop.time() + patience)
        return came

    async def wish_to_stop(self) -> None:
        """Ask rank 0 to have all ranks stop the call under way after the same round."""
        await self._order({"op": "stop", "generation": str(self._calls)}, self._members[:1])

    async def close(self, *, kill: bool = False) -> None:
        """End all ranks and leave nothing of them on the workers.

        Parameters
        ----------
        kill
            Do not let them end by themselves.
        """
        self._closed = True
        whole = self._members and not any(member.over.done() for member in self._members)
        if whole and not kill:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_FAREWELL):  # also for a worker that does not answer
                    await self._order({"op": "quit"})
                    await asyncio.wait([member.over for member in self._members])
        if self._futures:
            with contextlib.suppress(Exception):
                await self._client.cancel(self._futures, force=True)
            # Those that never had their worker have started nothing, and do not begin any more.
            gone = [asyncio.create_task(member.gone.wait()) for member in self._members if member.held.is_set()]
            if gone:
                await asyncio.wait(gone, timeout=self._settings.timeout_s)
            for task in gone:
                task.cancel()
        for background in self._tasks:
            background.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members:
            member.end(Answer(member.place.rank, "died", sentence="was ended"))
        self._tasks, self._futures = [], []

    # How it starts

    async def _workers(self) -> list[WorkerFacts]:
        """Those to place ranks on: free ones, if there are enough of them."""
        loop = asyncio.get_running_loop()
        began, told = loop.time(), False
        while len(there := await self._workers_that_are("running")) < (wanted := self._number or self._least()):
            waited = loop.time() - began
            if waited > _QUIET and not told:
                log.warning("waiting for workers: %d are needed, and the cluster has %d.", wanted, len(there))
                told = True
            if waited > self._settings.placement_timeout_s:
                raise PoolError(
                    f"{wanted} workers are needed, and the cluster has {len(there)} after "
                    f"{self._settings.placement_timeout_s:g} s; ask for fewer ranks, scale the cluster up, or wait longer "
                    "(create_settings(placement_timeout_s=...), --wait)."
                )
            await asyncio.sleep(_LOOK / 4)
        visited = await self._run_on(there, _visit)
        workers = read_answers({address: _part(answer, 0) for address, answer in visited.items()})
        for warning in check_alike(workers):
            log.warning("%s", warning)
        free = [worker for worker in workers if _part(visited[worker.address], 1) is None]
        return free if self._number is not None and len(free) >= self._number else workers

    async def _workers_that_are(self, *status: str) -> list[str]:
        workers = (await self._client.scheduler.identity(n_workers=-1))["workers"]
        return [address for address, worker in workers.items() if worker["status"] in status]

    async def _run_on(self, addresses: Sequence[str], fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """Have workers call a function; give what it returns or raises, by their addresses."""
        seconds = self._settings.placement_timeout_s

        async def ask(address: str) -> Any:
            asking = self._client.run(fn, *args, workers=[address], on_error="return")
            try:
                return (await asyncio.wait_for(asking, seconds))[address]
            except TimeoutError:
                raise PoolError(f"the worker at {address} does not answer within {seconds:g} s; end it.") from None

        return dict(zip(addresses, await asyncio.gather(*map(ask, addresses)), strict=True))

    async def _meet(self) -> tuple[str, int]:
        """Have rank 0's supervisor open the place where ranks find each other, and see that all of them can reach it.

        Ranks have to reach each other's hosts anyway, and not this process, which may be a laptop outside their network.
        """
        first = self._members[0]
        host = first.place.worker.host
        await self._order({"op": "meet", "host": host, "secret": self._secret}, [first])
        await self._within(self._until(first, first.meeting), first, "did not open a port")
        addresses = [member.place.worker.address for member in self._members]
        answers = await self._run_on(addresses, _ping, host, first.port, self._secret)
        for member in self._members:
            trouble = answers.get(member.place.worker.address)
            if trouble is not None:
                raise PoolError(
                    f"{member.place.worker} does not reach {first.place.worker}: {trouble}; start workers on addresses that the "
                    "others reach (dask worker --host or --interface)."
                )
        return host, first.port

    async def _open_and_order(self, order: Order, modules: Bundle, members: Sequence[_Member]) -> None:
        """Tell ranks to call; what prevents that is their answer."""
        try:
            await self._open_and_order_call(order, modules, members)
        except Exception as exc:  # of whatever kind: they would be waited for without end
            for member in members:
                member.settle(
                    Answer(member.place.rank, "lost", sentence=f"cannot be told to call: {type(exc).__name__}: {exc}")
                )

    async def _open_and_order_call(self, order: Order, modules: Bundle, members: Sequence[_Member]) -> None:
        first, sizes = self._members[0], _scope_sizes(self.places)
        first.open.clear()
        await self._order({"op": "open", "generation": order["generation"], "scope_sizes": sizes}, [first])
        await first.open.wait()
        have = [member for member in members if not modules.archive or member.modules == modules.digest]
        lack = [member for member in members if member not in have]
        for member in lack:
            member.modules = modules.digest
        await self._order({**order, "archive": b""}, have)
        await self._order({**order, "archive": modules.archive}, lack)

    async def _hold(self) -> None:
        """Take the workers, one after the other in the same order as everybody, so that no two pools wait for each other."""
        for member in sorted(self._members, key=lambda member: member.place.worker.address):
            worker = member.place.worker
            seat = Seat(self.name, member.place.rank, worker.incarnation)
            future = self._client.submit(
                supervise, seat, key=f"{self.name}-rank-{member.place.rank}",
                workers=[worker.address], pure=False, retries=0, priority=100,
            )  # fmt: skip
            self._futures.append(future)
            self._tasks += [
                asyncio.create_task(self._read(member)),
                asyncio.create_task(self._await_supervisor(member, future)),
            ]
            waiting = asyncio.create_task(self._within(self._until(member, member.held), member, "was not free"))
            done, _ = await asyncio.wait([waiting], timeout=_QUIET)
            if not done:
                log.warning("%s: waiting for the worker, which is busy or another pool's.", member.name)
            await waiting

    async def _all(self, stage: str, otherwise: str) -> None:
        await asyncio.gather(
            *(self._within(self._until(member, getattr(member, stage)), member, otherwise) for member in self._members)
        )

    async def _until(self, member: _Member, event: asyncio.Event) -> None:
        """Wait for something of a rank, or its end."""
        waiting = asyncio.ensure_future(event.wait())
        futures: list[asyncio.Future[Any]] = [waiting, member.over]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not event.is_set():
            raise self._error(member.over.result())

    async def _within(self, waiting: Coroutine[Any, Any, T], member: _Member, otherwise: str) -> T:
        try:
            return await asyncio.wait_for(waiting, self._settings.placement_timeout_s)
        except TimeoutError:
            raise PoolError(
                f"{member.name} {otherwise} within {self._settings.placement_timeout_s:g} s; end what runs there, or give "
                "create_settings(placement_timeout_s=...)."
            ) from None

    def _environment_of(self, where: Place) -> dict[str, str]:
        return {
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(self._settings.timeout_s))),
            **where.environment(nics=self._settings.nics),
            **self._environment,
        }

    # How it is watched

    async def _ask(self, member: _Member, **message: Any) -> Any:
        address = member.place.worker.address
        return await self._client.scheduler.proxy(msg=message, worker=address)

    async def _order(self, order: Order, members: Sequence[_Member] | None = None) -> None:
        those = self._members if members is None else members
        there = {member.place.worker.address: member for member in those if not member.over.done()}
        message = {"op": "slackring_order", "pool": self.name, "order": order}
        seconds = None if order["op"] == "call" else self._settings.timeout_s  # a call may be large
        with contextlib.suppress(OSError):  # without a scheduler all ranks are lost, which is noticed by itself
            async with asyncio.timeout(seconds):
                heard = await self._client.scheduler.broadcast(msg=message, workers=list(there), on_error="ignore")
            for address in there.keys() - heard.keys():
                there[address].lose()

    async def _read(self, member: _Member) -> None:
        """Take a rank's events until there are no more."""
        after = 0
        question = {"op": "slackring_read", "pool": self.name, "incarnation": member.place.worker.incarnation}
        try:
            while True:
                told = await self._ask(member, **question, after=after, seconds=_POLL)
                after = told["next"]
                for event in told["events"]:
                    self._take(member, event)
                if told["gone"]:
                    break
        except Exception as exc:  # of whatever kind the connection's end is
            log.debug("%s: %s", member.name, exc)
        member.lose()
        member.gone.set()

    def _take(self, member: _Member, event: Event) -> None:
        rank = member.place.rank
        match event["kind"]:
            case "held":
                member.held.set()
            case "meeting":
                member.port = event["port"]
                member.meeting.set()
            case "open":
                member.open.set()
            case "started":
                member.started.set()
            case "ready":
                member.ready.set()
            case "content":
                member.add(event["data"])
            case "saved":
                self._sink(rank, {**event, "content": member.take()})
            case "done":
                member.settle(Answer(rank, "done", member.take()))
            case "failed":
                member.settle(
                    Answer(
                        rank,
                        "raised",
                        member.take(),
                        f"raised {event['error']}",
                        f"Its own traceback:\n{event['text']}",
                        event["of_peers"],
                    )
                )
            case "ended":
                member.end(Answer(rank, "died", b"", "died: " + event["sentence"], event["text"]))
            case _:
                self._sink(rank, event)

    async def _await_supervisor(self, member: _Member, future: Any) -> None:
        """Notice a supervisor that cannot do its work."""
        try:
            await future
        except (
            Exception,
            asyncio.CancelledError,
        ) as exc:  # Dask's own for a future that was cancelled is of the latter kind
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            member.end(Answer(member.place.rank, "lost", sentence=f"cannot be supervised: {type(exc).__name__}: {exc}"))

    async def _watch(self) -> None:
        """Notice workers that are no longer there; their ranks end by themselves."""
        while True:
            await asyncio.sleep(_LOOK)
            there = await self._workers_that_are(*HOLDING)
            for member in self._members:
                if member.place.worker.address not in there:
                    member.lose()
                    member.gone.set()

    def _error(self, answer: Answer) -> RankError:
        member = self._members[answer.rank]
        details = f"\n{answer.details}" if answer.details else ""
        return RankError(f"{member.name} {answer.sentence.rstrip('.')}.{details}", answer.rank)


def _visit(dask_worker: Any) -> tuple[dict[str, Any], str | None]:
    """What a worker tells of itself, and which pool holds it."""
    return look(dask_worker), Site.of(dask_worker).holder


def _part(answer: Any, index: int) -> Any:
    return answer if isinstance(answer, BaseException) else answer[index]


async def _ping(host: str, port: int, secret: bytes) -> str | None:
    return await asyncio.to_thread(ping, host, port, secret, 5.0)


def _scope_sizes(places: Sequence[Place]) -> dict[str, int]:
    """How many ranks meet in each of Horovod's three kinds of groups."""
    sizes = {"global": len(places)}
    for where in places:
        environment = where.environment()
        sizes[f"local_{environment['HOROVOD_HOSTNAME']}"] = where.local_size
        sizes[f"cross_{where.local_rank}"] = where.cross_size
    return sizes
