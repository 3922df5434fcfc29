"""The ring that Horovod provides, over Gloo or NCCL."""

from __future__ import annotations

import copy
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from slackring.errors import HorovodMissingError, RingError, UnsupportedError
from slackring.ring.polling import PolledRing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HorovodRing", "import_horovod"]


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
            "build it for this torch, in a clone of the repository: python cluster_configs/horovod/build.py"
        ) from exc
    return hvd


class HorovodRing(PolledRing[int]):
    """A rank of an initialised Horovod job.

    The tensors of a round are called ``name.0``, ``name.1``, which keeps them in Horovod's response cache. Horovod keeps the
    names of different process sets apart, also where a rank is in several of them.

    Parameters
    ----------
    process_set, whole
        The ranks of this ring, and the ring of all; None for that one itself.

    Raises
    ------
    HorovodMissingError
        If Horovod cannot be imported.
    RingError
        If ``hvd.init()`` has not been called.
    """

    kind = "horovod"
    stalls = "Horovod's stall check lists the missing ranks on rank 0"

    def __init__(self, process_set: Any = None, whole: HorovodRing | None = None) -> None:
        super().__init__(whole)
        self._hvd = import_horovod()
        if not self._hvd.is_initialized():
            raise RingError("Horovod is not initialised; call hvd.init() first.")
        # A copy, so that a ring does not keep its own set among `_subsets`.
        self._set = self._hvd.global_process_set if process_set is None else copy.copy(process_set)
        self.rank, self.size = int(self._set.rank()), int(self._set.size())
        self._subsets: weakref.WeakKeyDictionary[Any, HorovodRing] = weakref.WeakKeyDictionary()

    @property
    def current(self) -> bool:
        """Whether Horovod is still initialised."""
        return bool(self._hvd.is_initialized())

    def subset(self, process_set: Any) -> HorovodRing:
        """Give this rank's place on the ring of a process set that Horovod knows."""
        if not isinstance(process_set, self._hvd.ProcessSet):
            raise UnsupportedError(
                f"process_set= is an hvd.ProcessSet under Horovod, not {type(process_set).__name__}."
            )
        number = process_set.process_set_id
        if number is None:
            raise UnsupportedError(
                f"Horovod does not know this process set {process_set.ranks}; name it in hvd.init(process_sets=[...]) or in "
                "hvd.add_process_set() on every rank."
            )
        if number == self._hvd.global_process_set.process_set_id:
            return self
        if not process_set.included():
            raise UnsupportedError(
                f"rank {self.rank} is not in this process set {process_set.ranks}; build the optimizer only on its ranks."
            )
        found = self._subsets.get(process_set)
        if found is None or found._set.process_set_id != number:
            found = self._subsets[process_set] = HorovodRing(process_set, self)
        return found

    def reduces(self, device: torch.device) -> bool:
        """Whether Horovod sums on a device: on the CPU always, on a GPU if it was built with NCCL."""
        return device.type == "cpu" or (device.type == "cuda" and bool(self._hvd.nccl_built()))

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Collect every rank's bytes on every rank."""
        lengths = self._allgather(torch.tensor([len(payload)]), f"{name}.lengths")
        # A leading byte keeps the tensor from being empty.
        body = torch.frombuffer(bytearray(b"\0" + payload), dtype=torch.uint8)
        gathered = self._allgather(body, f"{name}.bytes").numpy().tobytes()
        ends = list(itertools.accumulate(int(length) + 1 for length in lengths))
        return [gathered[start + 1 : end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        tensor, name = tensor.detach().contiguous(), "slackring.broadcast"
        sender = self._set.ranks[root]  # Horovod wants its rank among all, also within a set
        handle: int = self.begin(
            lambda: self._hvd.broadcast_async(tensor, sender, name=name, process_set=self._set), name
        )
        copy: Tensor = self._blocking(handle, name)
        return copy

    def _allgather(self, tensor: Tensor, name: str) -> Tensor:
        handle: int = self.begin(lambda: self._hvd.allgather_async(tensor, name=name, process_set=self._set), name)
        gathered: Tensor = self._blocking(handle, name)
        return gathered

    def sum(self, tensor: Tensor, name: str, index: int) -> int:
        """Start one of Horovod's asynchronous sums; returns its handle."""
        name = f"{name}.{index}"
        handle: int = self.begin(
            lambda: self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum, process_set=self._set), name
        )
        return handle

    def arrived(self, handle: int) -> bool:
        """Whether a collective has ended, well or not."""
        return bool(self._hvd.poll(handle))

    def _result(self, handle: int) -> Any:
        return self._hvd.synchronize(handle)
