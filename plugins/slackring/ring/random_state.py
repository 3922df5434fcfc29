"""Modes and random streams that belong to a virtual rank, though torch, NumPy and Python keep them globally."""

from __future__ import annotations

import random
from typing import Self

import numpy as np
import torch

__all__ = ["RandomState"]


class RandomState:
    """Grad mode, autocast and the random streams of torch, NumPy and Python, as they are when it is made.

    Examples
    --------
    >>> before = RandomState()
    >>> drawn = random.random()
    >>> before.restore()
    >>> random.random() == drawn
    True
    """

    def __init__(self) -> None:
        self.capture()

    @classmethod
    def seeded(cls, seed: int, rank: int) -> Self:
        """Start a rank's own streams, the same in every run; they are the current ones then."""
        word = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
        torch.manual_seed(word)
        np.random.seed(word)
        random.seed(word)
        return cls()

    def capture(self) -> None:
        """Keep the current ones."""
        self.grad = torch.is_grad_enabled()
        self.autocast = torch.is_autocast_enabled("cpu")
        self.autocast_dtype = torch.get_autocast_dtype("cpu")
        self.torch, self.numpy, self.python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def restore(self) -> None:
        """Make these the current ones."""
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_enabled("cpu", self.autocast)
        torch.set_autocast_dtype("cpu", self.autocast_dtype)
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
