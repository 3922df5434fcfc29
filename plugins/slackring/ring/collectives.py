"""Collectives of the user's own on the ambient ring, safe beside a rule's rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slackring.ring.ambient import ring

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["allreduce", "barrier", "broadcast"]


def allreduce(tensor: Tensor, *, average: bool = True) -> Tensor:
    """Average (or sum) a tensor over all ranks; see :meth:`slackring.ring.base.Ring.allreduce`."""
    return ring().allreduce(tensor, average=average)


def broadcast(tensor: Tensor, root: int = 0) -> Tensor:
    """Copy a rank's tensor to all; see :meth:`slackring.ring.base.Ring.broadcast`."""
    return ring().broadcast(tensor, root)


def barrier() -> None:
    """Wait for all ranks; see :meth:`slackring.ring.base.Ring.barrier`."""
    ring().barrier()
