"""Training data that all ranks share, dealt by the local steps they take: no rank has a shard of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from slackring.data import RoundSampler
from slackring.optim.optimizer import RelaxedOptimizer

__all__ = ["Dealt", "DealtBatches"]


@dataclass(frozen=True)
class Dealt:
    """What a task's `loaders` return for a data set of which each epoch is to be trained on once over all ranks.

    Fast ranks get more batches, by :class:`slackring.data.RoundSampler`, epoch after epoch until the run ends. At the end of
    an epoch ranks wait for each other, so epochs should last many local steps of the slowest rank.

    Parameters
    ----------
    dataset
        Pairs of an input and a label; all of it, and the same on every rank.
    batch_size
        Samples in this rank's micro-batch.
    seed
        Of the order of samples.
    num_workers
        Processes that load this rank's batches ahead; none loads them between local steps.
    """

    dataset: Dataset[Any]
    batch_size: int
    seed: int = 0
    num_workers: int = 0


class DealtBatches:
    """Batches of what is dealt to this rank, endless; their state is the sampler's.

    Parameters
    ----------
    dealt
        What to deal.
    optimizer
        Takes a local step for each batch.

    Examples
    --------
    >>> import torch, slackring as sr
    >>> data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(10, 1), torch.arange(10))
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), "bsp")
    >>> seen = []
    >>> for x, y in DealtBatches(Dealt(data, batch_size=4), optimizer):
    ...     model(x).mean().backward()
    ...     optimizer.step(samples=len(y))
    ...     seen += y.tolist()
    ...     if len(seen) == 20:
    ...         break
    >>> sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    True
    """

    def __init__(self, dealt: Dealt, optimizer: RelaxedOptimizer) -> None:
        self._progress = optimizer.progress
        # A loader takes two batches a worker ahead.
        self._sampler = RoundSampler(
            dealt.dataset,  # type: ignore[arg-type]  # torch's class of data sets has no length
            dealt.batch_size,
            optimizer,
            seed=dealt.seed,
            prefetch=2 * dealt.num_workers,
        )
        # Without a generator the loader draws from the random stream that the model's noise comes from.
        word = np.random.SeedSequence((dealt.seed, optimizer._engine.ring.rank)).generate_state(1)[0]
        self._loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            dealt.dataset,
            batch_sampler=self._sampler,
            num_workers=dealt.num_workers,
            generator=torch.Generator().manual_seed(int(word)),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Hand out the batches; collective."""
        while not self._progress.stop:
            yield from self._loader

    def state_dict(self) -> dict[str, Any]:
        """What is left of the epoch, and what this rank holds of it."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same data; see :meth:`slackring.data.RoundSampler.state_dict`."""
        self._sampler.load_state_dict(state)
