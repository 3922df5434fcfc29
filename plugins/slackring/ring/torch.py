"""The ring that ``torch.distributed`` provides, over Gloo or NCCL."""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slackring.errors import RingError, UnsupportedError
from slackring.ring.groups import Groups, GroupsOfSome
from slackring.ring.peers import Peers
from slackring.ring.polling import PolledRing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TorchRing"]

_LETTING_GO = 0.05  # seconds that Gloo's threads get at the end of the process
_NOTICE = 0.5  # seconds that a process may take from closing its connections to its end


@dataclass(frozen=True, eq=False)
class _Under:
    """A collective under way on a channel's group."""

    group: dist.ProcessGroup
    work: dist.Work


class TorchRing(PolledRing[_Under]):
    """A rank of an initialised ``torch.distributed`` job, on the backends of its process group.

    Tensors are summed where they lie: on a GPU by NCCL, or by Gloo if that is the group's only backend. The control
    block lies on the CPU and always travels over Gloo.

    ``torch.distributed`` tells collectives apart by their order alone. So the user's own, and each optimizer's, have a process
    group each (a channel: all names that are the same up to their last dot), made when it is first used and given back with
    the optimizer. The user's groups are never touched. With NCCL, several optimizers that may launch in different orders on
    different ranks share a GPU, which NCCL does not promise to be free of deadlocks; use one, or Gloo.

    A rank of the same machine that dies is noticed in seconds, another one when its connections close, or at the latest after
    the timeout that was given to ``init_process_group``; a rank that keeps others waiting longer than that counts as dead,
    too. Under NCCL it is torch's watchdog that ends the processes.

    Parameters
    ----------
    group, whole
        The ranks of this ring, whose backends it uses, and the ring of all; None for that one itself.

    Raises
    ------
    RingError
        If ``torch.distributed.init_process_group()`` has not been called.
    """

    kind = "torch"
    stalls = "it fails at the timeout of the process group"

    def __init__(self, group: dist.ProcessGroup | None = None, whole: TorchRing | None = None) -> None:
        super().__init__(whole)
        if not (dist.is_available() and dist.is_initialized()):
            raise RingError("torch.distributed is not initialised; call torch.distributed.init_process_group() first.")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        world = dist.group.WORLD
        assert world is not None  # it is initialised
        # Weakly: destroy_process_group() ends a group's threads only if nobody holds it.
        self._world = weakref.ref(world)
        self._subsets: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchRing] = weakref.WeakKeyDictionary()
        self._groups = Groups(world) if group is None else GroupsOfSome(group)
        self._channels: dict[str, dist.ProcessGroup] = {}
        self._released: deque[str] = deque()
        self._peers: Peers | None = None
        self._missed: dict[int, int] = {}

    @property
    def current(self) -> bool:
        """Whether the job that this ring belongs to is still the process's."""
        return dist.is_initialized() and dist.group.WORLD is self._world()

    def subset(self, process_set: Any) -> TorchRing:
        """Give this rank's place on the ring of a process group of this job."""
        if process_set == dist.GroupMember.NON_GROUP_MEMBER:
            raise UnsupportedError(
                f"rank {self.rank} is not in this process group; build the optimizer only on the group's ranks."
            )
        if not isinstance(process_set, dist.ProcessGroup):
            raise UnsupportedError(
                f"process_set= is a torch.distributed.ProcessGroup under torch.distributed, not {type(process_set).__name__}."
            )
        if process_set is self._world():
            return self
        if process_set not in dist.distributed_c10d._world.pg_map:
            raise UnsupportedError("this process group has been destroyed; make one with new_group().")
        if process_set not in self._subsets:
            self._subsets[process_set] = TorchRing(process_set, self)
        return self._subsets[process_set]

    def claim(self, owner: object = None) -> int:
        """A number for whoever sends rounds here; its process group is given back once `owner` is gone."""
        number = super().claim(owner)
        if owner is not None:
            weakref.finalize(owner, self._released.append, f"slackring.{number}").atexit = False
        return number

    def reduces(self, device: torch.device) -> bool:
        """Whether the group has a backend for a device."""
        return device.type in self._groups.devices

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
        collective = functools.partial(dist.broadcast, copy, group_src=root)
        self._blocking(self._collective(collective, name), name)
        return copy

    def _allgather(self, tensor: Tensor, name: str) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._blocking(self._collective(functools.partial(dist.all_gather, gathered, tensor), name), name)
        return gathered

    def sum(self, tensor: Tensor, name: str, index: int) -> _Under:
        """Start an asynchronous sum on the channel of `name`; the order of sums tells them apart."""
        return self._collective(functools.partial(dist.all_reduce, tensor), name)

    def _collective(self, collective: Callable[..., Any], name: str) -> _Under:
        group = self._channel(name)
        return self.begin(lambda: _Under(group, collective(group=group, async_op=True)), name)

    def arrived(self, handle: _Under) -> bool:
        """Whether a collective has ended, well or not."""
        return handle.work.is_completed()

    def _result(self, handle: _Under) -> None:
        handle.work.wait()  # it has ended: this raises its error, or orders the GPU's stream after it

    def _channel(self, name: str) -> dist.ProcessGroup:
        """The channel of a name; made, by all ranks together, if it is new."""
        key = name.rpartition(".")[0]
        group = self._channels.get(key)
        if group is None:
            self._close_released()
            group = self._channels[key] = self.start(lambda: self._groups.make(key), name)
            if self._peers is None:
                self._peers = Peers(self.gather(Peers.card(), name))
        return group

    def _close_released(self) -> None:
        for _ in range(len(self._released)):
            key = self._released.popleft()
            if key in self._channels and not self._close(key):
                self._released.append(key)

    def _close(self, key: str) -> bool:
        """Give a channel back, unless that would wait for rounds that the other ranks may never launch."""
        group = self._channels[key]
        under_way = {handle for handle in self._under_way if handle.group is group}
        if not all(map(self.arrived, under_way)):
            return False
        self._under_way -= under_way
        del self._channels[key]
        if self.current:
            self._groups.close(group)
        return True

    def leave(self) -> None:
        """At the end of the process, wait for what this rank has begun, and for the threads of Gloo.

        They let go of a collective's tensors a little after it has ended, and abort the process if the interpreter is gone by
        then (torch 2.13).
        """
        super().leave()
        if self._failed is None and self._groups.close_alone:
            for key in list(self._channels):
                self._close(key)
        if self._world() is not None:  # torch or the user holds it, and its threads, which have ended otherwise
            self.clock.sleep(_LETTING_GO)

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
