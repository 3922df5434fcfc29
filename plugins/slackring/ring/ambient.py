"""Which ring this code runs on."""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar

from slackring.errors import RingError
from slackring.ring.base import Ring
from slackring.ring.single import SingleRing

__all__ = ["current", "launcher", "ring"]

current: ContextVar[Ring | None] = ContextVar("slackring_ring", default=None)
_process_ring: Ring | None = None


def launcher() -> str | None:
    """What started this process as one of several ranks: "horovodrun" or "torchrun" (or one like it), None if nothing did."""
    if int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
        return "horovodrun"
    if {"RANK", "MASTER_ADDR"} <= os.environ.keys() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "torchrun"
    return None


def ring(process_set: object = None) -> Ring:
    """Return the ambient ring, so that a script can be written once for all.

    Parameters
    ----------
    process_set
        Some of the ranks: an ``hvd.ProcessSet`` under Horovod, a ``torch.distributed.ProcessGroup`` under
        ``torch.distributed``; all ranks if None. The ring's rank and size are those in the set.

    Returns
    -------
    Ring
        The virtual one inside :meth:`VirtualCluster.run`, Horovod's when ``hvd`` is initialised, that of
        ``torch.distributed`` when its default group is initialised, else a ring of one.

    Raises
    ------
    RingError
        In one of several processes of a launcher before ``hvd.init()`` or ``init_process_group()``, where a ring of one would
        train alone in silence.
    UnsupportedError
        For a process set that this rank is not in, or that is none of the ring's.

    Notes
    -----
    A collective over all ranks drains the optimizers of all sets first, one over a set those of that set alone.

    Examples
    --------
    >>> ring().size
    1
    """
    whole = _whole()
    return whole if process_set is None else whole.subset(process_set)


def _whole() -> Ring:
    """The ring of all ranks."""
    global _process_ring
    ambient = current.get()
    if ambient is not None:
        return ambient
    found = _process_ring
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        from slackring.ring.horovod import HorovodRing  # needs torch and Horovod

        if not isinstance(found, HorovodRing) or (found.rank, found.size) != (hvd.rank(), hvd.size()):
            found = _process_ring = HorovodRing()
        return found
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        from slackring.ring.torch import TorchRing  # needs torch

        if not isinstance(found, TorchRing) or not found.current:
            found = _process_ring = TorchRing()
        return found
    if launcher() == "horovodrun":
        raise RingError(
            "this process is one of several Horovod ranks, but Horovod is not initialised; call hvd.init() first."
        )
    if launcher() == "torchrun":
        raise RingError(
            "this process is one of several ranks that torchrun started, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first."
        )
    if not isinstance(found, SingleRing):
        found = _process_ring = SingleRing()
    return found
