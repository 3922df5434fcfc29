"""Keeps the host from running ahead of its GPUs, whose work is queued and takes no time on a clock of the host's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Fence"]


class Fence:
    """Bounds how far the host runs ahead to one local step, so that step times and window lengths are the GPU's own.

    Without CUDA parameters it does nothing.

    Parameters
    ----------
    parameters
        Whose devices are waited for, on their current streams.

    Examples
    --------
    >>> Fence([torch.zeros(2)]).cross()
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._events = {parameter.device: torch.cuda.Event() for parameter in parameters if parameter.is_cuda}  # type: ignore[no-untyped-call]

    def cross(self) -> None:
        """Wait for what was queued when this was last called, and mark what is queued now."""
        for device, event in self._events.items():
            event.synchronize()
            event.record(torch.cuda.current_stream(device))
