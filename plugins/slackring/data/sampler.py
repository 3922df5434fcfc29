"""The sampler that a script hands to its loader: it deals anew whenever a round lands."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from slackring.data.dealer import Dealer, Remainder, Windows
from slackring.errors import DataError
from slackring.optim.agreement import agree
from slackring.optim.optimizer import RelaxedOptimizer
from slackring.optim.progress import LandedRound
from slackring.rules import Every, Rule, WhenFree

__all__ = ["RoundSampler"]


class RoundSampler(Sampler[list[int]]):
    """Deal samples to ranks by the local steps they take, so that fast ranks train on more of them.

    Within an epoch every sample is dealt once over all ranks: none is lost, none comes twice, and no rank has a shard of its
    own. An epoch ends on all ranks at about the same time, whatever their speeds and batch sizes; only the very last batch of
    it may be smaller. With a rule that fixes the number of local steps in a window, the same samples go to the same ranks in
    every run; with one that does not, that depends on the ranks' speeds.

    It is a batch sampler: ``DataLoader(dataset, batch_sampler=sampler)``. Take one local step of `optimizer` for each batch,
    and end every epoch with ``optimizer.join()``. A rank that runs out of batches although the epoch goes on, because it has
    become faster, sits rounds out until it is dealt more. How many batches a rank will get is not known ahead, so there
    is no ``len()``.

    Iterating is collective. Iterating again after leaving the loop early goes on with what no landed round has consumed, and
    so does a sampler that has loaded a state, also on another number of ranks. An epoch that is complete is followed by the next.

    Parameters
    ----------
    dataset
        Anything with a length.
    batch_size
        Samples in this rank's local step; may differ by rank.
    optimizer
        Whose landed rounds tell what has been consumed.
    seed
        Of the order of samples, which differs by epoch.
    prefetch
        Batches that the loader takes ahead of the local steps: its ``num_workers * prefetch_factor``, where the factor is 2
        if not given.

    Raises
    ------
    DataError
        For an empty data set or values that cannot be; while iterating, if batches and local steps do not go together.

    Examples
    --------
    >>> import torch, slackring as sr
    >>> x = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule="bsp")
    >>> sampler = RoundSampler(range(10), batch_size=4, optimizer=optimizer)
    >>> trained = []
    >>> for samples in sampler:
    ...     x.grad = torch.ones(1)
    ...     optimizer.step(samples=len(samples))
    ...     trained.append(samples)
    >>> [len(samples) for samples in trained], sorted(sum(trained, [])) == list(range(10))
    ([4, 4, 2], True)
    >>> sampler.epoch
    1
    """

    def __init__(
        self, dataset: Sized, batch_size: int, optimizer: RelaxedOptimizer, *, seed: int = 0, prefetch: int = 0
    ) -> None:
        if not isinstance(optimizer, RelaxedOptimizer):
            raise DataError(
                f"optimizer= is what slackring.DistributedOptimizer() returned, not {type(optimizer).__name__}."
            )
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("prefetch", prefetch, 0)):
            if value < least:
                raise DataError(f"RoundSampler: {name} is {least} or more, not {value}.")
        if not len(dataset):
            raise DataError("RoundSampler: the data set is empty.")
        self._batch_size, self._prefetch = batch_size, prefetch
        self._optimizer, self._engine = optimizer, optimizer._engine
        self._ring = self._engine.ring
        self._name = f"slackring.{self._ring.claim(self)}"
        self._windows = _windows(optimizer.rule)
        self._remainder = Remainder(len(dataset), seed)
        self._dealer: Dealer | None = None
        self._wanted: int | None = None  # of set_epoch(), until all ranks have landed the epoch before
        self._agreed = False
        self._loaded = self._exact = False  # a state, and not iterated since; with the optimizer's of every rank
        self._unlanded = 0  # this rank's local steps in the loaded state that had not landed
        self._batch_sizes: tuple[int, ...] = ()
        self._prefetches: tuple[int, ...] = ()
        self._handed = self._began = 0  # batches, and the optimizer's local steps before them, of the dealer
        self._heard = True  # whether a round has landed since it was made
        myself = weakref.ref(self)

        def tell(landed: LandedRound) -> None:
            sampler = myself()
            if sampler is not None:
                sampler._land(landed)

        optimizer.on_landed(tell)

    @property
    def epoch(self) -> int:
        """The epoch under way, or the one that comes next; as far as rounds have landed."""
        return self._current().epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration deals, the same one on every rank; if it is under way, it goes on."""
        if epoch < 0:
            raise DataError(f"set_epoch(): an epoch is 0 or more, not {epoch}.")
        self._wanted = epoch

    def state_dict(self) -> dict[str, Any]:
        """What is left of the epoch, as far as rounds have landed; local, never collective.

        It goes with the optimizer's state of the same moment. Rank 0's states of both, loaded on every rank of any number, go
        on from the anchor: work that is in no landed round is left to do. All ranks' own states go on exactly, and
        differ only in ``"unlanded"``, the rank's own local steps that have not landed.
        """
        dealer = self._dealer
        if dealer is None or dealer.consumed or self._current().epoch != self._remainder.epoch:
            return self._current().state_dict()
        return {**dealer.state_dict(), "unlanded": self._steps() - self._landed(dealer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; ranks and batch sizes may have changed since.

        Raises
        ------
        DataError
            For something else, or the state of a data set of another length.
        """
        remainder = Remainder.from_state_dict(state)
        if remainder.length != self._remainder.length:
            raise DataError(
                f"this state belongs to a data set of {remainder.length} samples, and this one has "
                f"{self._remainder.length}; load it with the same data."
            )
        self._dealer = Dealer.from_state_dict(state, self._windows) if "held" in state else None
        self._unlanded = int(state.get("unlanded", 0))
        self._remainder, self._wanted, self._agreed, self._loaded = remainder, None, False, True

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out this rank's batches of samples; collective."""
        engine, rank = self._engine, self._ring.rank
        resuming = engine.resuming
        if resuming:
            engine.start()
        # Every rank goes on from its own checkpoint, its open window and rounds in flight included, or nothing is in flight.
        exact = not (engine.settled and self._unlanded)
        self._exact = resuming and self._loaded and exact and self._dealer is not None
        if not (self._exact and self._go_on()):
            # Alike on all ranks: one that neither took a step nor heard of one since it last began must drain too.
            if not engine.settled or not self._heard:
                self._optimizer.drain()
            if engine.progress.stop:
                return
            self._begin()
        self._loaded = self._exact = False
        dealer = self._dealer
        while dealer is not None:
            while self._handed == len(dealer.batches[rank]):
                if dealer.closed(rank):
                    return
                self._check_pace()
                engine.sit_out()
                if engine.progress.stop:
                    return
            self._handed += 1
            yield dealer.samples(rank, self._handed - 1)
            if self._dealer is not dealer:
                raise DataError("a RoundSampler can be iterated by one loader at a time; make one for each.")

    def _go_on(self) -> bool:
        """Hand out what follows this rank's own steps, if the deal is as it was when they were taken."""
        dealer = self._dealer
        if dealer is None or self._wanted not in (None, self._remainder.epoch):
            return False
        self._agree()
        if dealer.batch_sizes != self._batch_sizes:
            return False
        self._dealer = Dealer.from_state_dict(dealer.state_dict(), self._windows, self._prefetches)
        self._began, self._handed = self._engine.local_steps - self._unlanded, self._unlanded
        self._wanted = None
        return True

    def _begin(self) -> None:
        """Deal what is left, now that nothing is in flight."""
        self._remainder, self._dealer = self._current(), None
        if self._wanted is not None:
            self._agreed = False
            self._wanted = None
        if not self._agreed:
            self._ring.barrier()  # no other optimizer's round is in flight then
            self._agree()
        self._dealer = Dealer(self._remainder, self._batch_sizes, self._windows, self._prefetches)
        self._began, self._handed, self._heard = self._engine.local_steps, 0, False

    def _current(self) -> Remainder:
        remainder = self._remainder if self._dealer is None else self._dealer.remainder()
        if self._wanted is not None and self._wanted != remainder.epoch:
            return remainder.anew(self._wanted)
        return remainder

    def _agree(self) -> None:
        """Learn the ranks' batch sizes, and check that they deal the same; collective."""
        state = self._current().state_dict() if self._dealer is None else self._dealer.state_dict()
        agree(self._ring, {f"RoundSampler's {key}": value for key, value in state.items()}, f"{self._name}.agree")
        mine = self._batch_size.to_bytes(8, "little") + self._prefetch.to_bytes(8, "little")
        everyone = self._ring.gather(mine, f"{self._name}.batches")
        self._batch_sizes = tuple(int.from_bytes(told[:8], "little") for told in everyone)
        self._prefetches = tuple(int.from_bytes(told[8:], "little") for told in everyone)
        self._agreed = True

    def _land(self, landed: LandedRound) -> None:
        self._heard = True
        dealer, rank = self._dealer, self._ring.rank
        if dealer is None or dealer.consumed or (self._loaded and not self._exact):
            return
        dealer.land(landed.steps, steady=not any(landed.helping))
        if self._landed(dealer) > self._handed and not self._loaded:
            raise DataError(
                f"rank {rank} took more local steps than the {self._handed} batches it was handed; take one step for each "
                "batch, and leave the loop over the loader before other steps."
            )

    def _landed(self, dealer: Dealer) -> int:
        rank = self._ring.rank
        return len(dealer.batches[rank]) - dealer.held(rank)

    def _steps(self) -> int:
        """Local steps of this rank since the dealer was made."""
        return self._unlanded if self._loaded else self._engine.local_steps - self._began

    def _check_pace(self) -> None:
        """Tell a loader that runs ahead from a rank that has become faster."""
        ahead = self._handed - self._steps()
        if ahead > self._prefetch:
            raise DataError(
                f"rank {self._ring.rank}'s loader is {ahead} batches ahead of the local steps, and prefetch={self._prefetch} "
                "was given; pass RoundSampler(..., prefetch=num_workers * prefetch_factor), and call optimizer.step() once "
                "for each batch (to accumulate gradients: rule='bsp:accumulate=k')."
            )


def _windows(rule: Rule) -> Windows:
    trigger = rule.trigger
    if isinstance(trigger, Every):
        return Windows(rule.most_in_flight, trigger.steps, trigger.steps)
    if isinstance(trigger, WhenFree):
        return Windows(rule.most_in_flight, trigger.k_min, trigger.k_max)
    return Windows(rule.most_in_flight, 1, None)
