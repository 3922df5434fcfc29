"""The ring that ``torch.distributed`` provides, over Gloo or NCCL."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slackring.errors import RingError
from slackring.ring.peers import Peers
from slackring.ring.polling import PolledRing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TorchRing"]

_NOTICE = 0.5  # seconds that a process may take from closing its connections to its end


@dataclass
class _Channel:
    """A process group of one's own: its collectives cannot be taken for those of another."""

    group: dist.ProcessGroup
    under_way: set[dist.Work] = field(default_factory=set)


@dataclass(frozen=True)
class _Under:
    """A collective under way on a channel."""

    channel: _Channel
    work: dist.Work


class TorchRing(PolledRing[_Under]):
    """A rank of an initialised ``torch.distributed`` job, on the backends of its default group.

    Tensors are summed where they lie: on a GPU by NCCL, or by Gloo if that is the default group's only backend. The control
    block lies on the CPU and always travels over Gloo.

    ``torch.distributed`` tells collectives apart by their order alone. So the user's own, and each optimizer's, have a process
    group each (a channel: all names that are the same up to their last dot), made when it is first used and given back with
    the optimizer. The default group is never touched. With NCCL, several optimizers that may launch in different orders on
    different ranks share a GPU, which NCCL does not promise to be free of deadlocks; use one, or Gloo.

    A rank of the same machine that dies is noticed in seconds, another one when its connections close, or at the latest after
    the timeout that was given to ``init_process_group``; a rank that keeps others waiting longer than that counts as dead,
    too. Under NCCL it is torch's watchdog that ends the processes.

    Raises
    ------
    RingError
        If ``torch.distributed.init_process_group()`` has not been called.
    """

    kind = "torch"
    stalls = "it fails at the timeout of the process group"

    def __init__(self) -> None:
        super().__init__()
        if not (dist.is_available() and dist.is_initialized()):
            raise RingError("torch.distributed is not initialised; call torch.distributed.init_process_group() first.")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._world = world = dist.group.WORLD
        assert world is not None  # it is initialised
        devices = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        self._backends = ",".join(f"{device}:{backend}" for device, backend in {**devices, "cpu": "gloo"}.items())
        self._timeout = world._get_backend(torch.device(next(iter(devices)))).options._timeout
        self._channels: dict[str, _Channel] = {}
        self._released: deque[str] = deque()
        self._peers: Peers | None = None
        self._missed: dict[int, int] = {}

    @property
    def current(self) -> bool:
        """Whether the job that this ring belongs to is still the process's."""
        return dist.is_initialized() and dist.group.WORLD is self._world

    def claim(self, owner: object = None) -> int:
        """A number for whoever sends rounds here; its process group is given back once `owner` is gone."""
        number = super().claim(owner)
        if owner is not None:
            weakref.finalize(owner, self._released.append, f"slackring.{number}").atexit = False
        return number

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Collect every rank's bytes on every rank."""
        mine = torch.tensor([len(payload)], device="cpu")
        lengths = [int(length) for length in self._allgather(mine, name)]
        # Gloo gathers tensors of one size, which must not be zero.
        body = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device="cpu")
        body.numpy()[: len(payload)] = np.frombuffer(payload, np.uint8)
        gathered = self._allgather(body, name)
        return [body[:length].numpy().tobytes() for body, length in zip(gathered, lengths, strict=True)]

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        copy, name = tensor.detach().contiguous().clone(), "slackring.broadcast"
        group = self._channel(name).group
        self._blocking(self._begin(name, lambda: dist.broadcast(copy, src=root, group=group, async_op=True)), name)
        return copy

    def _allgather(self, tensor: Tensor, name: str) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        group = self._channel(name).group
        self._blocking(self._begin(name, lambda: dist.all_gather(gathered, tensor, group=group, async_op=True)), name)
        return gathered

    def sum(self, tensor: Tensor, name: str, index: int) -> _Under:
        """Start an asynchronous sum on the channel of `name`; the order of sums tells them apart."""
        group = self._channel(name).group
        return self._begin(name, lambda: dist.all_reduce(tensor, group=group, async_op=True))

    def _begin(self, name: str, collective: Callable[[], Any]) -> _Under:
        work = self.start(collective, name)
        channel = self._channel(name)
        channel.under_way.add(work)
        return _Under(channel, work)

    def arrived(self, handle: _Under) -> bool:
        """Whether a collective has ended, well or not."""
        return handle.work.is_completed()

    def _result(self, handle: _Under) -> None:
        handle.channel.under_way.discard(handle.work)
        handle.work.wait()  # it has ended: this raises its error, or orders the GPU's stream after it

    def _channel(self, name: str) -> _Channel:
        """The channel of a name; made, by all ranks together, if it is new."""
        key = name.rpartition(".")[0]
        channel = self._channels.get(key)
        if channel is None:
            self._close_released()
            group = self.start(lambda: dist.new_group(backend=self._backends, timeout=self._timeout), name)
            channel = self._channels[key] = _Channel(group)
            if self._peers is None:
                self._peers = Peers(self.gather(Peers.card(), name))
        return channel

    def _close_released(self) -> None:
        for _ in range(len(self._released)):
            key = self._released.popleft()
            channel = self._channels.get(key)
            if channel is None:
                continue
            if all(work.is_completed() for work in channel.under_way):
                dist.destroy_process_group(self._channels.pop(key).group)
            else:
                self._released.append(key)  # closing it would wait for rounds that the other ranks may never launch

    def _dead(self) -> dict[int, int]:
        return {} if self._peers is None else self._peers.dead()

    def _watch(self, name: str) -> None:
        """Fail if a rank has been dead for two looks: what a rank sends before it ends properly arrives earlier."""
        missed, self._missed = self._missed, self._dead()
        if missed.keys() & self._missed.keys():
            raise self._failure(name, "it will not enter any more.")

    def _cause(self) -> str:
        dead, deadline = self._dead(), time.monotonic() + _NOTICE
        while not dead and time.monotonic() < deadline:
            self.clock.sleep(0.02)
            dead = self._dead()
        if not dead:
            return super()._cause()
        return "because another rank died: " + ", ".join(f"rank {rank} (process {pid})" for rank, pid in dead.items())
