"""The one seam to the network: what a rank can ask of the ring it sits on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from slackring.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["ArrivedFlight", "Clock", "Flight", "Pace", "Ring"]

T = TypeVar("T")


class Clock(Protocol):
    """Time as a rank sees it: the machine's, or a virtual one."""

    def now(self) -> float:
        """Seconds since an arbitrary origin that all ranks of one machine share."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass on this rank; zero or less returns at once."""
        ...


class Pace(Protocol):
    """What makes a local step longer than its computing: a step time to fill up, a straggler."""

    def __call__(self, rank: int, step: int, elapsed: float) -> float:
        """Say by how many seconds a local step is to be lengthened.

        Parameters
        ----------
        rank, step
            Which local step of which rank, both from 0.
        elapsed
            Seconds that the step has computed; 0 if that is not known (the first step).
        """
        ...


class Flight(ABC):
    """One round on its way: tensors are sent into it, it is sealed, and once done every tensor holds its sum over ranks."""

    @abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Start summing `tensor` over all ranks, in place.

        Every rank sends the same tensors (shape, dtype) in the same order. The ring owns the memory until the round is done.
        """

    @abstractmethod
    def seal(self) -> None:
        """Say that this rank has sent everything; this is the moment of its launch."""

    @abstractmethod
    def done(self) -> bool:
        """Whether every tensor holds its sum; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the round is done.

        Raises
        ------
        RingError
            If the round can no longer complete.
        """

    def once(self, what: str, compute: Callable[[], T]) -> T:
        """Compute something that is the same on every rank of the round; rings that hold all ranks compute it for all at once."""
        return compute()


class ArrivedFlight(Flight):
    """A round that is done already: on a ring of one, or restored from a checkpoint."""

    def send(self, tensor: Tensor) -> None:
        """Do nothing: the tensor holds its sum."""

    def seal(self) -> None:
        """Do nothing."""

    def done(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> None:
        """Return at once."""


class Ring(ABC):
    """A rank's place on a ring of `size` ranks.

    Attributes
    ----------
    rank, size : int
        As in Horovod.
    clock : Clock
        The rank's clock.
    pace : Pace or None
        What is injected into local steps; the optimizer asks it once a local step.
    kind : str
        "horovod", "torch", "virtual" or "single".
    """

    rank: int
    size: int
    clock: Clock
    pace: Pace | None = None
    kind: str

    def __init__(self) -> None:
        self._before_collective: list[Callable[[], object]] = []
        self._claims = 0

    def claim(self, owner: object = None) -> int:
        """A number for whoever sends rounds here: the first is 0, the next 1; the same on all ranks if they ask alike.

        The rounds of number 0 are called ``slackring.0.*``; what the ring keeps for them is freed when `owner` is gone.
        """
        self._claims += 1
        return self._claims - 1

    @abstractmethod
    def open(self, name: str) -> Flight:
        """Open a round; `name` is the same on all ranks and not in flight already.

        Rounds whose names are the same up to the last dot are opened in the same order on all ranks.
        """

    @abstractmethod
    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Collect every rank's bytes on every rank, by rank; blocking."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Copy of `root`'s tensor."""

    def subset(self, process_set: object) -> Ring:
        """Give this rank's place on the ring of some of the ranks: always the same object for the same set.

        Raises
        ------
        UnsupportedError
            If this ring has no process sets, or the set is not one of its own, or this rank is not in it.
        """
        raise UnsupportedError(
            f"process_set= needs ranks of Horovod or torch.distributed, and this is a {self.kind} ring; leave it out, and all "
            "its ranks take part."
        )

    def reduces(self, device: torch.device) -> bool:
        """Whether tensors on a device can be summed where they lie; else they have to be brought to the CPU."""
        return True

    def before_collective(self, callback: Callable[[], object]) -> None:
        """Have `callback` run before every collective of the user's own, so that no round is in flight beside it."""
        self._before_collective.append(callback)

    def allreduce(self, tensor: Tensor, *, average: bool = True) -> Tensor:
        """Sum or average a tensor over all ranks; rounds in flight are drained first.

        Parameters
        ----------
        tensor
            Any shape; floating for an average. Same shape and dtype on all ranks.
        average
            Divide the sum by the number of ranks.

        Returns
        -------
        Tensor
            A new tensor, the same bits on every rank.

        Raises
        ------
        UnsupportedError
            For the average of a tensor that is not floating.
        """
        if average and not tensor.is_floating_point():
            raise UnsupportedError(
                f"an average needs a floating tensor, not {tensor.dtype}; convert it, or sum with average=False."
            )
        self._drain()
        total = self._within_reach(tensor.detach().contiguous().clone())
        flight = self.open("slackring.user")
        flight.send(total)
        flight.seal()
        flight.wait()
        return (total.div_(self.size) if average else total).to(tensor.device)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Copy the tensor of rank `root` to every rank; rounds in flight are drained first.

        Raises
        ------
        UnsupportedError
            If the ring has no such rank.
        """
        if not 0 <= root < self.size:
            raise UnsupportedError(f"root={root} is no rank of this ring; its ranks are 0 to {self.size - 1}.")
        self._drain()
        return self._broadcast(self._within_reach(tensor), root).to(tensor.device)

    def barrier(self) -> None:
        """Wait for every rank; rounds in flight are drained first."""
        self._drain()
        self.gather(b"", "slackring.barrier")

    def _within_reach(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy on the CPU if the ring cannot sum where it lies."""
        return tensor if self.reduces(tensor.device) else tensor.cpu()

    def _drain(self) -> None:
        for callback in self._before_collective:
            callback()
