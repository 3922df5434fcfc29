"""Dealing samples to real ranks of uneven speeds, with loaders that work ahead, and to another number of ranks."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import slackring as sr
from slackring.ring.ambient import ring as ambient

pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")

LENGTH = 203
STEP = 0.002  # seconds, times the rank's number and one


def train(rule, workers, state, stop_after, epochs):
    """Train until `epochs` are over, or all ranks have agreed to stop after `stop_after` samples; tell what was trained on."""
    ring = ambient()
    x = torch.nn.Parameter(torch.zeros(1))
    budget = None if stop_after is None else sr.Budget(samples=stop_after)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule, budget=budget)
    data = TensorDataset(torch.arange(LENGTH))
    sampler = sr.data.RoundSampler(
        data, batch_size=2 + ring.rank % 2, optimizer=optimizer, seed=1, prefetch=2 * workers
    )
    if state is not None:
        sampler.load_state_dict(state)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    trained = []
    while sampler.epoch < epochs and not optimizer.progress.stop:
        for (samples,) in loader:
            time.sleep(STEP * (1 + ring.rank))
            optimizer.zero_grad()
            (x * samples.sum()).sum().backward()
            optimizer.step(samples=len(samples))
            trained += samples.tolist()
            if optimizer.progress.stop:
                break
        optimizer.join()
    return trained, sampler.state_dict(), x.tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rule", ["bsp", "local_sgd:steps=3", "losp"])
def test_each_epoch_is_the_data_set_once(ranks, size, rule, workers):
    results = ranks(size).run(train, rule, workers, None, None, 2)
    counts = torch.bincount(torch.tensor([sample for trained, _, _ in results for sample in trained]), minlength=LENGTH)
    assert counts.tolist() == [2] * LENGTH
    assert all((state, model) == results[0][1:] for _, state, model in results)
    assert results[0][1]["epoch"] == 2


def test_ranks_of_another_number_train_on_what_is_left(ranks, size):
    first = ranks(6 - size).run(train, "losp", 0, None, 80, 1)
    state = first[0][1]
    assert all(theirs == state for _, theirs, _ in first)
    rest = ranks(size).run(train, "losp", 0, state, None, 1)
    done, left = ([sample for trained, _, _ in results for sample in trained] for results in (first, rest))
    assert 80 <= len(done) < LENGTH
    assert sorted(done + left) == list(range(LENGTH))
