"""How samples are dealt to ranks: a pure function of how many local steps each rank took in each landed round.

Every rank holds the same dealer and tells it of the same rounds in the same order, so all of them deal alike and nothing
needs to be exchanged. What is dealt is never taken back: so each sample is dealt once whatever the ranks then do, and a rank
holds only little more than it may need until the next round lands.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from slackring.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Dealer", "Remainder", "Windows"]

_REMEMBERED = 8
"""Landed rounds from which a rank's speed is told; a rank that becomes slow is noticed after as many."""


@dataclass(frozen=True)
class Windows:
    """How many local steps a rank may take before it hears of the next round.

    Parameters
    ----------
    staleness
        Rounds in flight while a rank computes.
    least, most
        Local steps in a window; `most` is None if nothing bounds it.

    Examples
    --------
    >>> Windows(staleness=1, least=4, most=4).ahead(recent=1)
    8
    """

    staleness: int = 0
    least: int = 1
    most: int | None = 1

    def ahead(self, recent: int) -> int:
        """Local steps to be ready for, if recent windows had at most `recent`: half a window's more, within the bounds."""
        rounds = self.staleness + 1
        steps = max(rounds * recent + recent // 2 + 1, rounds * self.least)
        return steps if self.most is None else min(steps, rounds * self.most)


@dataclass(frozen=True)
class Remainder:
    """What is left of an epoch, whatever the number of ranks that go on with it.

    The epoch's order is a permutation that follows from `seed` and `epoch` alone.

    Parameters
    ----------
    length
        Samples in the data set.
    seed, epoch
        Of the order.
    next
        All places of the order from here on are left ...
    left
        ... and these places before it, ascending.
    history
        Local steps by rank in the last landed rounds, from which speeds are told; kept if the number of ranks stays.

    Examples
    --------
    >>> rest = Remainder(length=10, seed=0, next=8, left=(3,))
    >>> rest.samples
    3
    >>> sorted(rest.order) == list(range(10))
    True
    """

    length: int
    seed: int = 0
    epoch: int = 0
    next: int = 0
    left: tuple[int, ...] = ()
    history: tuple[tuple[int, ...], ...] = ()

    @property
    def samples(self) -> int:
        """How many samples are left."""
        return len(self.left) + self.length - self.next

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """``(length,)``: the sample at each place of the epoch."""
        # Raw bits, since what NumPy draws from them may change with its version, and a resumed run would lose samples.
        bits = np.random.PCG64(np.random.SeedSequence((self.seed, self.epoch)))
        return np.argsort(bits.random_raw(self.length), kind="stable").astype(np.int64)

    def anew(self, epoch: int) -> Remainder:
        """The whole of another epoch."""
        return replace(self, epoch=epoch, next=0, left=())

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists that JSON can carry."""
        state = asdict(self)
        return {**state, "left": list(self.left), "history": [list(steps) for steps in self.history]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Remainder:
        """Read what :meth:`state_dict` wrote.

        Raises
        ------
        DataError
            For anything else.
        """
        try:
            left = tuple(int(place) for place in state["left"])
            history = tuple(tuple(int(steps) for steps in row) for row in state["history"])
            numbers = {name: int(state[name]) for name in ("length", "seed", "epoch", "next")}
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(f"this is no state of a RoundSampler ({exc!r}); load what its state_dict() gave.") from exc
        rest = cls(**numbers, left=left, history=history)
        ascending = all(a < b for a, b in zip((-1, *left), (*left, rest.next), strict=True))
        if not (rest.length > 0 <= min(rest.seed, rest.epoch) and ascending and rest.next <= rest.length):
            raise DataError("this state of a RoundSampler is damaged: what is left is not a part of the data set.")
        return rest


class Dealer:
    """Deals the rest of an epoch to ranks in batches, a little at a time.

    Whenever a round lands, each rank is dealt what it may need until the next one, in the order in which ranks will run out at
    their recent speed. A rank that holds its fair share of all that is left is closed: it is dealt nothing more, and all
    ranks finish at about the same time if they go on as they did.

    Parameters
    ----------
    remainder
        What is left to deal.
    batch_sizes
        Samples in a local step, by rank. The last batch of all may be smaller.
    windows
        How far ranks may run ahead of landed rounds.
    prefetch
        Batches that are taken from the dealt ones ahead of their local step, by rank; none by default.

    Attributes
    ----------
    batches : list of list of (int, int)
        By rank, what it has been dealt so far: places in the epoch's rest, from and up to. Only ever appended to.

    Examples
    --------
    Rank 1 took a step for each two of rank 0, which is therefore dealt twice as much:

    >>> dealer = Dealer(Remainder(length=60), batch_sizes=(1, 1), windows=Windows(staleness=0, least=1, most=None))
    >>> while not dealer.finished:
    ...     dealer.land([min(2, dealer.held(0)), min(1, dealer.held(1))])
    >>> [sum(stop - start for start, stop in batches) for batches in dealer.batches]
    [40, 20]
    """

    def __init__(
        self, remainder: Remainder, batch_sizes: Sequence[int], windows: Windows, prefetch: Sequence[int] | None = None
    ) -> None:
        size = len(batch_sizes)
        self._remainder, self._batch_sizes, self._windows = remainder, tuple(batch_sizes), windows
        self._prefetch = tuple(prefetch or (0,) * size)
        self._places = np.concatenate([np.array(remainder.left, np.int64), np.arange(remainder.next, remainder.length)])
        self._dealt = 0
        self.batches: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self._consumed = [0] * size
        self._closed = [False] * size
        kept = [steps for steps in remainder.history if len(steps) == size]
        self._history = deque(kept, maxlen=_REMEMBERED)
        self._deal()

    def state_dict(self) -> dict[str, Any]:
        """What the same ranks need to go on exactly: the epoch's rest when the dealer was made, and what ranks hold of it."""
        return {
            **self._remainder.state_dict(),
            "history": [list(steps) for steps in self._history],
            "dealt": self._dealt,
            "held": [
                [list(batch) for batch in batches[consumed:]]
                for batches, consumed in zip(self.batches, self._consumed, strict=True)
            ],
            "closed": list(self._closed),
            "batch_sizes": list(self._batch_sizes),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], windows: Windows, prefetch: Sequence[int] | None = None) -> Dealer:
        """Go on from what :meth:`state_dict` gave.

        Raises
        ------
        DataError
            For anything else.
        """
        try:
            held = [[(int(start), int(stop)) for start, stop in batches] for batches in state["held"]]
            closed = [bool(closed) for closed in state["closed"]]
            dealt, batch_sizes = int(state["dealt"]), [int(size) for size in state["batch_sizes"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(f"this is no state of a RoundSampler ({exc!r}); load what its state_dict() gave.") from exc
        remainder = Remainder.from_state_dict(state)
        ends = [0, *(end for batch in sorted(batch for batches in held for batch in batches) for end in batch), dealt]
        whole = ends == sorted(ends) and dealt <= remainder.samples and len(held) == len(closed) == len(batch_sizes) > 0
        if not whole or min(batch_sizes) < 1:
            raise DataError("this state of a RoundSampler is damaged: what ranks hold is not a part of what is left.")
        dealer = cls(remainder, batch_sizes, windows, prefetch)
        dealer.batches, dealer._dealt, dealer._closed = held, dealt, closed
        return dealer

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples in a local step, by rank."""
        return self._batch_sizes

    @property
    def finished(self) -> bool:
        """Whether everything has been dealt."""
        return self._dealt == len(self._places)

    @property
    def consumed(self) -> bool:
        """Whether everything has been trained on in landed rounds."""
        return self.finished and not any(self.held(rank) for rank in range(len(self.batches)))

    def held(self, rank: int) -> int:
        """Batches that a rank has been dealt and not consumed in landed rounds."""
        return len(self.batches[rank]) - self._consumed[rank]

    def closed(self, rank: int) -> bool:
        """Whether a rank will be dealt nothing more."""
        return self._closed[rank] or self.finished

    def samples(self, rank: int, batch: int) -> list[int]:
        """The samples of a batch, as numbers in the data set."""
        start, stop = self.batches[rank][batch]
        samples: list[int] = self._remainder.order[self._places[start:stop]].tolist()
        return samples

    def land(self, steps: Sequence[int], *, steady: bool = True) -> None:
        """Hear of the next landed round, and deal.

        Parameters
        ----------
        steps
            Local steps in it by rank, a batch each.
        steady
            Whether the round tells how fast the ranks are; not if some only helped others to drain or join.
        """
        for rank, number in enumerate(steps):
            self._consumed[rank] = min(self._consumed[rank] + number, len(self.batches[rank]))
        if steady:
            self._history.append(tuple(steps))
        self._deal()

    def remainder(self) -> Remainder:
        """What is left to train on, as far as rounds have landed; the next epoch's whole if nothing is."""
        before = self._remainder
        history = tuple(self._history)
        if self.consumed:
            return replace(before.anew(before.epoch + 1), history=history)
        held = [
            self._places[start:stop]
            for batches, consumed in zip(self.batches, self._consumed, strict=True)
            for start, stop in batches[consumed:]
        ]
        old = len(before.left)  # these were dealt first
        left = np.sort(np.concatenate([*held, self._places[self._dealt : old]]).astype(np.int64))
        return replace(before, next=before.next + max(self._dealt - old, 0), left=tuple(left.tolist()), history=history)

    def _deal(self) -> None:
        pool = len(self._places) - self._dealt
        ranks = [rank for rank, closed in enumerate(self._closed) if not closed]
        columns = list(zip(*self._history, strict=True)) or [()] * len(self.batches)
        # Steps in as many rounds, so only their ratios mean something.
        rates = [max(sum(column), 1) for column in columns]
        work = {rank: rates[rank] * self._batch_sizes[rank] for rank in ranks}
        total, speed = pool + sum(map(self._held_samples, ranks)), sum(work.values())
        due = []
        for rank in ranks:
            fair = -(-total * rates[rank] // speed)  # batches that keep the rank busy as long as the others
            recent = max(columns[rank], default=self._windows.least)
            target = min(self._prefetch[rank] + self._windows.ahead(recent), fair)
            if self.held(rank) < target:
                due.append((self.held(rank) / rates[rank], rank, target))
        heapq.heapify(due)
        while due and not self.finished:
            _, rank, target = heapq.heappop(due)
            stop = min(self._dealt + self._batch_sizes[rank], len(self._places))
            self.batches[rank].append((self._dealt, stop))
            self._dealt = stop
            if self.held(rank) < target:
                heapq.heappush(due, (self.held(rank) / rates[rank], rank, target))
        for rank in ranks:
            # Their shares sum to all that is left, so at least one stays open until everything is dealt.
            self._closed[rank] = self._held_samples(rank) * speed >= total * work[rank]

    def _held_samples(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.batches[rank][self._consumed[rank] :])
