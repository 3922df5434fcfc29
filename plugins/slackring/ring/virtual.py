"""A cluster of virtual ranks: the same training function as on real ones, as greenlets under a virtual clock.

Computing takes no virtual time; local steps, stragglers and rounds take exactly what they are said to. So a run of eight ranks
takes milliseconds and gives the same result every time.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import greenlet
import torch

from slackring.errors import RingError
from slackring.ring.ambient import current
from slackring.ring.base import Flight, Pace, Ring
from slackring.ring.network import Network
from slackring.ring.random_state import RandomState

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VirtualClock", "VirtualRing", "run_virtual"]

T = TypeVar("T")

_NANO = 1_000_000_000


class _Meeting:
    """A collective: it starts when the last rank has come, and ends when the network has carried it."""

    def __init__(self, name: str, size: int, combine: Callable[[list[Any]], Any], cost: Callable[[Any], float]) -> None:
        self.name, self.combine, self.cost = name, combine, cost
        self.brought: list[Any] = [None] * size
        self.missing = set(range(size))
        self.waiting: list[int] = []
        self.result: Any = None
        self.end: int | None = None  # ns, known once all have come
        self.memo: dict[object, Any] = {}


class _Hub:
    """Runs the ranks in the order of their virtual times; the only code that switches greenlets."""

    def __init__(self, size: int, network: Network) -> None:
        self.size, self.network = size, network
        self.now = 0
        self.last_end = 0
        self.order = itertools.count()
        self.due: list[tuple[int, int, int]] = []  # (ns, tie-break, rank)
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.parked: dict[int, _Meeting] = {}
        self.greenlets: list[greenlet.greenlet] = []
        self.main = greenlet.getcurrent()

    def wake(self, rank: int, at: int) -> None:
        heapq.heappush(self.due, (at, next(self.order), rank))

    def sleep_until(self, rank: int, at: int) -> None:
        self.wake(rank, at)
        self.main.switch()

    def join(self, meeting_key: tuple[str, int], rank: int, brought: Any, make: Callable[[], _Meeting]) -> _Meeting:
        meeting = self.meetings.get(meeting_key)
        if meeting is None:
            meeting = self.meetings[meeting_key] = make()
        meeting.brought[rank] = brought
        meeting.missing.discard(rank)
        if not meeting.missing:
            del self.meetings[meeting_key]
            meeting.result = meeting.combine(meeting.brought)
            meeting.end = max(self.now, self.last_end) + round(meeting.cost(meeting.brought[0]) * _NANO)
            self.last_end = meeting.end
            for waiter in meeting.waiting:
                del self.parked[waiter]
                self.wake(waiter, meeting.end)
            meeting.waiting.clear()
        return meeting

    def wait(self, meeting: _Meeting, rank: int) -> None:
        if meeting.end is None:
            meeting.waiting.append(rank)
            self.parked[rank] = meeting
            self.main.switch()
        elif meeting.end > self.now:
            self.sleep_until(rank, meeting.end)

    def loop(self, states: list[RandomState]) -> None:
        """Switch to whoever is due until all are done.

        Raises
        ------
        RingError
            When every unfinished rank waits for another.
        """
        running: int | None = None
        while self.due:
            at, _, rank = heapq.heappop(self.due)
            self.now = max(self.now, at)
            if rank != running:
                if running is not None:
                    states[running].capture()
                states[rank].restore()
                running = rank
            self.greenlets[rank].switch()
        if self.parked:
            waits = "; ".join(
                f"rank {rank} waits for {meeting.name!r}, which lacks rank {', '.join(map(str, sorted(meeting.missing)))}"
                for rank, meeting in sorted(self.parked.items())
            )
            raise RingError(f"all ranks wait for each other at {self.now / _NANO:.3f} virtual seconds: {waits}.")


class VirtualClock:
    """A rank's virtual clock, in integer nanoseconds inside."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._debt = 0

    def now(self) -> float:
        """Virtual seconds since the cluster started."""
        return self._hub.now / _NANO

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass; inside a backward pass it is owed until after it, since autograd cannot be left."""
        self._debt += max(round(seconds * _NANO), 0)
        if self._debt and torch._C._current_graph_task_id() == -1:
            debt, self._debt = self._debt, 0
            self._hub.sleep_until(self._rank, self._hub.now + debt)


def _sum_over_ranks(brought: list[list[Tensor]]) -> None:
    layouts = [[(tuple(tensor.shape), tensor.dtype) for tensor in tensors] for tensors in brought]
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise RingError(f"rank {rank} sent {layout} into a round in which rank 0 sent {layouts[0]}.")
    with torch.no_grad():
        for tensors in zip(*brought, strict=True):
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total.add_(tensor)
            for tensor in tensors:
                tensor.copy_(total)


class _VirtualFlight(Flight):
    def __init__(self, ring: VirtualRing, name: str) -> None:
        self._ring, self._name = ring, name
        self._sent: list[Tensor] = []
        self._meeting: _Meeting | None = None

    def send(self, tensor: Tensor) -> None:
        self._sent.append(tensor)

    def seal(self) -> None:
        self._meeting = self._ring.meet(
            self._name, self._sent, _sum_over_ranks, lambda sent: sum(t.nbytes for t in sent)
        )

    def done(self) -> bool:
        end = self._meeting.end if self._meeting else None
        return end is not None and end <= self._ring.hub.now

    def wait(self) -> None:
        if self._meeting is None:
            raise RingError(f"rank {self._ring.rank} waits for round {self._name!r}, which it has not sealed.")
        self._ring.hub.wait(self._meeting, self._ring.rank)

    def once(self, what: str, compute: Callable[[], T]) -> T:
        """Compute once for all ranks what is the same on all of them."""
        memo = self._meeting.memo if self._meeting else {}
        if what not in memo:
            memo[what] = compute()
        result: T = memo[what]
        return result


class VirtualRing(Ring):
    """A virtual rank's place on the ring; made by :class:`slackring.VirtualCluster`."""

    kind = "virtual"

    def __init__(self, hub: _Hub, rank: int, pace: Pace | None) -> None:
        super().__init__()
        self.hub, self.rank, self.size, self.pace = hub, rank, hub.size, pace
        self.clock = VirtualClock(hub, rank)
        self._uses: Counter[str] = Counter()

    def meet(
        self, name: str, brought: Any, combine: Callable[[list[Any]], Any], nbytes: Callable[[Any], int]
    ) -> _Meeting:
        """Bring something to the next collective of this name."""
        key = (name, self._uses[name])
        self._uses[name] += 1
        network = self.hub.network

        def make() -> _Meeting:
            return _Meeting(name, self.size, combine, lambda sent: network.seconds(nbytes(sent), self.size))

        return self.hub.join(key, self.rank, brought, make)

    def open(self, name: str) -> Flight:
        """Open a round."""
        return _VirtualFlight(self, name)

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Collect every rank's bytes on every rank."""
        meeting = self.meet(name, payload, list, lambda _: 0)
        self.hub.wait(meeting, self.rank)
        gathered: list[bytes] = meeting.result
        return gathered

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        meeting = self.meet(
            "slackring.broadcast", tensor.detach(), lambda brought: brought[root].clone(), lambda t: t.nbytes
        )
        self.hub.wait(meeting, self.rank)
        copy: Tensor = meeting.result.clone()
        return copy


def run_virtual(
    paces: Sequence[Pace | None],
    network: Network,
    seed: int,
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[T]:
    """Run `fn` on as many virtual ranks as there are paces, and return its results by rank."""
    hub = _Hub(len(paces), network)
    results: list[Any] = [None] * hub.size
    caller, states, threads = RandomState(), [], torch.get_num_threads()
    try:
        # The order of sums, and so a run's result, depends on the threads; small models are fastest on one anyway.
        torch.set_num_threads(1)
        for rank, pace in enumerate(paces):

            def run_rank(rank: int = rank, pace: Pace | None = pace) -> None:
                current.set(VirtualRing(hub, rank, pace))
                try:
                    results[rank] = fn(*args, **kwargs)
                except BaseException as exc:
                    if not isinstance(exc, greenlet.GreenletExit):
                        exc.add_note(
                            f"raised on virtual rank {rank} of {hub.size}, at {hub.now / _NANO:.3f} virtual seconds"
                        )
                    raise

            task = greenlet.greenlet(run_rank, parent=hub.main)
            task.gr_context = contextvars.copy_context()
            hub.greenlets.append(task)
            states.append(RandomState.seeded(seed, rank))
            hub.wake(rank, 0)
        hub.loop(states)
    finally:
        for task in hub.greenlets:
            if task:
                task.throw(greenlet.GreenletExit)
        caller.restore()
        torch.set_num_threads(threads)
    return results
