"""Which ring this code runs on."""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar

from slackring.errors import RingError
from slackring.ring.base import Ring
from slackring.ring.single import SingleRing

__all__ = ["current", "launched_by_horovodrun", "ring"]

current: ContextVar[Ring | None] = ContextVar("slackring_ring", default=None)
_process_ring: Ring | None = None


def launched_by_horovodrun() -> bool:
    """Whether this process is one of several ranks that a Horovod launcher started."""
    return int(os.environ.get("HOROVOD_SIZE", "1")) > 1


def ring() -> Ring:
    """Return the ambient ring, so that a script can be written once for all.

    Returns
    -------
    Ring
        The virtual one inside :meth:`VirtualCluster.run`, Horovod's when ``hvd`` is initialised, else a ring of one.

    Raises
    ------
    RingError
        In one of several Horovod processes before ``hvd.init()``, where a ring of one would train alone in silence.

    Examples
    --------
    >>> ring().size
    1
    """
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
    if launched_by_horovodrun():
        raise RingError(
            "this process is one of several Horovod ranks, but Horovod is not initialised; call hvd.init() first."
        )
    if not isinstance(found, SingleRing):
        found = _process_ring = SingleRing()
    return found
