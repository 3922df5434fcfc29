"""The ring that Horovod provides, over Gloo or NCCL."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from slackring.errors import HorovodMissingError, RingError
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

    The tensors of a round are called ``name.0``, ``name.1``, which keeps them in Horovod's response cache.

    Raises
    ------
    HorovodMissingError
        If Horovod cannot be imported.
    RingError
        If ``hvd.init()`` has not been called.
    """

    kind = "horovod"
    stalls = "Horovod's stall check lists the missing ranks on rank 0"

    def __init__(self) -> None:
        super().__init__()
        self._hvd = import_horovod()
        if not self._hvd.is_initialized():
            raise RingError("Horovod is not initialised; call hvd.init() first.")
        self.rank, self.size = int(self._hvd.rank()), int(self._hvd.size())

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
        handle: int = self.start(lambda: self._hvd.broadcast_async(tensor, root, name=name), name)
        copy: Tensor = self._blocking(handle, name)
        return copy

    def _allgather(self, tensor: Tensor, name: str) -> Tensor:
        handle: int = self.start(lambda: self._hvd.allgather_async(tensor, name=name), name)
        gathered: Tensor = self._blocking(handle, name)
        return gathered

    def sum(self, tensor: Tensor, name: str, index: int) -> int:
        """Start one of Horovod's asynchronous sums; returns its handle."""
        name = f"{name}.{index}"
        handle: int = self.start(lambda: self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum), name)
        return handle

    def arrived(self, handle: int) -> bool:
        """Whether a collective has ended, well or not."""
        return bool(self._hvd.poll(handle))

    def _result(self, handle: int) -> Any:
        return self._hvd.synchronize(handle)
