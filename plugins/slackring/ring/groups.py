"""Process groups of one's own in ``torch.distributed``, whose collectives cannot be taken for those of another."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from slackring.errors import UnsupportedError

__all__ = ["Groups", "GroupsOfSome"]


class Groups:
    """Makes and closes process groups of all ranks.

    Parameters
    ----------
    group
        The default group, whose backends and timeout they have; the CPU's backend is always Gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        devices = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._timeout: timedelta = group._get_backend(torch.device(next(iter(devices)))).options._timeout
        self._backends = {**devices, "cpu": "gloo"}

    @property
    def devices(self) -> frozenset[str]:
        """Types of the devices that there is a backend for."""
        return frozenset(self._backends)

    @property
    def close_alone(self) -> bool:
        """Whether a rank can close a group without the other ranks, as NCCL's cannot be relied on."""
        return set(self._backends.values()) == {"gloo"}

    def make(self, name: str) -> dist.ProcessGroup:
        """Make a group; on all its ranks, in the same order."""
        backends = ",".join(f"{device}:{backend}" for device, backend in self._backends.items())
        group: dist.ProcessGroup = dist.new_group(backend=backends, timeout=self._timeout)
        return group

    def close(self, group: dist.ProcessGroup) -> None:
        """Give a group's connections and threads back."""
        dist.destroy_process_group(group)


class GroupsOfSome(Groups):
    """Makes and closes process groups of the ranks of another one, without the rest of the job.

    ``new_group`` wants all ranks of the job, or else names the group by how many each rank has made, which differs between
    members of several sets. So these are put together from their backends, and meet under a name in the set's own store.

    Parameters
    ----------
    group
        Whose ranks, backends and timeout they have; the CPU's backend is always Gloo.

    Raises
    ------
    UnsupportedError
        For a backend that is neither Gloo nor NCCL.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        strange = sorted(set(self._backends.values()) - {"gloo", "nccl"})
        if strange:
            raise UnsupportedError(
                f"process_set= works over gloo and nccl, not over {', '.join(strange)}; name one of these to new_group(backend=)."
            )
        self._store, self._rank, self._size = group.get_group_store(), group.rank(), group.size()

    def make(self, name: str) -> dist.ProcessGroup:
        """Make a group; on all its ranks, with a `name` that is new."""
        store = PrefixStore(f"{name}/", self._store)
        group = dist.ProcessGroup(store, self._rank, self._size)
        made: dict[str, Any] = {}
        for device, backend in self._backends.items():
            if backend not in made:
                made[backend] = self._backend(backend, PrefixStore(f"{backend}/", store))
            group._register_backend(torch.device(device), dist.Backend.backend_type_map[backend], made[backend])
        return group

    def _backend(self, backend: str, store: Store) -> Any:
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, self._rank, self._size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, self._rank, self._size, options)

    def close(self, group: dist.ProcessGroup) -> None:
        """Give a group's connections and threads back."""
        group.shutdown()
