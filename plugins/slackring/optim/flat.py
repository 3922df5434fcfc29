"""Tensors laid out in flat buffers, one a dtype and device, so that a round sends few large tensors.

Tensors of 16 bits lie in buffers of float32: Horovod sums no bfloat16, and an anchor of 16 bits would swallow small averages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

__all__ = ["DTYPES", "FlatBuffers", "FlatSpace", "digest", "scale_into"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What a tensor in flat buffers may be."""

_DIGEST_ELEMENTS = 1 << 16
_DIGEST_MASK = (1 << 52) - 1  # what a double can carry exactly
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class FlatSpace:
    """Where each tensor of a list lies in flat buffers.

    Parameters
    ----------
    tensors
        The tensors whose shapes, dtypes and devices decide the layout; they lie in the buffers in this order.
    device
        Where the buffers lie; None is beside the tensors. Away from a GPU they lie in pinned memory.

    Attributes
    ----------
    away : bool
        Whether some buffers lie on another device than their tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> None:
        self.away = device is not None and any(tensor.device != device for tensor in tensors)
        self._streams = {tensor.device for tensor in tensors if self.away and tensor.is_cuda}
        self._shapes = [tensor.shape for tensor in tensors]
        self._members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            self._members.setdefault((dtype, device or tensor.device), []).append(index)

    @property
    def nbytes(self) -> int:
        """Bytes of one set of buffers."""
        return sum(
            dtype.itemsize * sum(self._shapes[i].numel() for i in members)
            for (dtype, _), members in self._members.items()
        )

    def new(self) -> FlatBuffers:
        """Make a set of buffers, filled with zeros."""
        flats, views = [], [torch.empty(0)] * len(self._shapes)
        for (dtype, device), members in self._members.items():
            sizes = [self._shapes[i].numel() for i in members]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device, pin_memory=bool(self._streams))
            flats.append(flat)
            for index, part in zip(members, torch.split(flat, sizes), strict=True):
                views[index] = part.view(self._shapes[index])
        return FlatBuffers(flats, views, self._streams)

    def slices(self, limit: int) -> list[tuple[int, int, int, list[int]]]:
        """Cut the buffers into buckets of at most `limit` bytes (a tensor is never cut).

        Returns
        -------
        list of (int, int, int, list of int)
            Which buffer, first and past-the-last element in it, and the indices of the tensors inside.
        """
        buckets: list[tuple[int, int, int, list[int]]] = []
        for which, ((dtype, _), members) in enumerate(self._members.items()):
            start = stop = 0
            inside: list[int] = []
            for index in members:
                size = self._shapes[index].numel()
                if inside and (stop + size - start) * dtype.itemsize > limit:
                    buckets.append((which, start, stop, inside))
                    start, inside = stop, []
                stop += size
                inside.append(index)
            if inside:
                buckets.append((which, start, stop, inside))
        return buckets


class FlatBuffers:
    """One set of flat buffers, and a view of each tensor's place in them.

    Attributes
    ----------
    flats : list of Tensor
        1-d, one a dtype (float32 or float64) and device.
    views : list of Tensor
        In the order and with the shapes of the tensors.
    """

    def __init__(self, flats: list[Tensor], views: list[Tensor], streams: Collection[torch.device] = ()) -> None:
        self.flats, self.views, self._streams = flats, views, streams

    def transfer(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy between views and the tensors they are for; on return the CPU may read and write its side."""
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=bool(self._streams))
        for device in self._streams:
            torch.cuda.current_stream(device).synchronize()

    def gather(self, places: Sequence[int], tensors: list[Tensor], scale: float) -> None:
        """Add `scale` times the tensors of some places."""
        views = [self.views[place] for place in places]
        if not views:
            return
        if tensors[0].device != views[0].device:
            tensors = [tensor.to(view.device) for tensor, view in zip(tensors, views, strict=True)]
        torch._foreach_add_(views, tensors, alpha=scale)

    def load(self, tensors: list[Tensor]) -> None:
        """Copy the tensors in."""
        self.transfer(self.views, tensors)

    def store(self, tensors: list[Tensor]) -> None:
        """Copy into the tensors, rounded where they are narrower."""
        self.transfer(tensors, self.views)

    def copy_(self, other: FlatBuffers) -> None:
        """Copy another set."""
        for mine, theirs in zip(self.flats, other.flats, strict=True):
            mine.copy_(theirs)

    def add_(self, other: FlatBuffers, scale: float = 1.0) -> None:
        """Add `scale` times another set."""
        for mine, theirs in zip(self.flats, other.flats, strict=True):
            mine.add_(theirs, alpha=scale)

    def save(self) -> list[Tensor]:
        """Copies of the buffers, on the CPU."""
        return [flat.to("cpu", copy=True) for flat in self.flats]

    def restore(self, saved: list[Tensor]) -> None:
        """Copy what :meth:`save` gave."""
        for mine, theirs in zip(self.flats, saved, strict=True):
            mine.copy_(theirs)

    def mul_(self, factor: float) -> None:
        """Multiply by a number; by 1 it costs nothing."""
        if factor != 1:
            for flat in self.flats:
                flat.mul_(factor)

    def div_(self, divisor: float) -> None:
        """Divide by a number; by 1 it costs nothing."""
        if divisor != 1:
            for flat in self.flats:
                flat.div_(divisor)

    def zero_(self) -> None:
        """Fill with zeros."""
        for flat in self.flats:
            flat.zero_()

    def dot(self, other: FlatBuffers) -> float:
        """Inner product of two sets."""
        return sum(float(torch.dot(mine, theirs)) for mine, theirs in zip(self.flats, other.flats, strict=True))

    def not_finite(self) -> int | None:
        """Index of the first tensor with an element that is not a finite number; None if there is none."""
        if all(_is_finite(flat) for flat in self.flats):
            return None
        return next(index for index, view in enumerate(self.views) if not _is_finite(view))


def _is_finite(tensor: Tensor) -> bool:
    # A sum is finite only if all elements are, and takes a thirtieth of the time; it may overflow without them.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(torch.linalg.vector_norm(tensor, torch.inf)))


def scale_into(out: Tensor, tensor: Tensor, factor: float) -> None:
    """Put `factor` times a tensor into `out`, in the precision of `out`."""
    if tensor.dtype == out.dtype:
        torch.mul(tensor, factor, out=out)
    else:  # torch would multiply in the tensor's own precision
        out.copy_(tensor).mul_(factor)


def digest(tensors: Sequence[Tensor], turn: int | None = None) -> float:
    """Sum of the tensors' bits, as a whole number that a double carries exactly.

    Parameters
    ----------
    tensors
        Floating tensors.
    turn
        Look only at the turn-th piece of 65,536 elements, counted cyclically over all tensors, which bounds the cost; None looks
        at everything.

    Examples
    --------
    >>> digest([torch.zeros(3)]), digest([torch.zeros(3)]) == digest([torch.full((3,), 1e-30)])
    (0.0, False)
    """
    pieces = [(tensor, at) for tensor in tensors for at in range(0, tensor.numel(), _DIGEST_ELEMENTS)]
    if turn is not None and pieces:
        pieces = [pieces[turn % len(pieces)]]
    total = 0
    for tensor, at in pieces:
        flat = tensor.detach().reshape(-1)[at : at + _DIGEST_ELEMENTS].contiguous()
        total += int(flat.view(_BITS[flat.itemsize]).sum(dtype=torch.int64))
    return float(total & _DIGEST_MASK)
