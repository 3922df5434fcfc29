"""Runs whose training data is dealt to ranks by the local steps they take."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from tests.lab.test_checkpoint import assert_same_end

from slackring.lab import train as train_module
from slackring.lab.checkpoint import Checkpoints, Earlier
from slackring.lab.config import TrainConfig
from slackring.lab.dealt import Dealt
from slackring.lab.tasks import accuracy, load_task
from slackring.lab.train import train_virtual

LENGTH = 300
CONFIG = TrainConfig(
    task="digits",
    step_time=0.1,
    straggler="persistent:ranks=1,factor=4",
    samples=3 * LENGTH,
    batch_size=12,
    seed=3,
    lr=0.1,
    momentum=0.9,
)
COUNTING = ["bsp", "local_sgd:steps=3", "cocod:steps=3", "relaxed:payload=gradient,steps=2,staleness=2"]


class Noted(torch.utils.data.TensorDataset):
    """Notes which samples are loaded."""

    loaded: list[int]

    def __getitem__(self, index):
        self.loaded.append(index)
        return super().__getitem__(index)


@pytest.fixture
def loaded(monkeypatch):
    """A task with dealt data; the samples that were loaded."""
    digits = load_task("digits")
    batches, test = digits.loaders(LENGTH, 0, 1, 0)
    data = Noted(*next(iter(batches)))
    data.loaded = []

    def loaders(batch_size, rank, size, seed):
        return Dealt(data, batch_size, seed=seed), test

    def model():
        return torch.nn.Sequential(digits.model(), torch.nn.Dropout(0.2))

    task = dataclasses.replace(digits, loaders=loaders, model=model, metric=accuracy)
    monkeypatch.setattr(train_module, "load_task", lambda text: task)
    return data.loaded


@pytest.mark.parametrize("rule", [*COUNTING, "losp", "osp"])
def test_a_run_trains_on_each_sample_once_an_epoch(rule, loaded):
    run = train_virtual(dataclasses.replace(CONFIG, rule=rule, samples=2.2 * LENGTH), 3)
    assert len(loaded) == run.summary.samples >= 2.2 * LENGTH
    for start in range(0, len(loaded), LENGTH):
        epoch = loaded[start : start + LENGTH]
        assert len(set(epoch)) == len(epoch)
    if rule == "losp":
        shares = run.steps.groupby("rank")["samples"].sum()
        assert shares[1] < 0.6 * shares[0]


@pytest.mark.parametrize("rule", COUNTING)
def test_a_killed_run_ends_with_the_bits_of_the_undisturbed_one(rule, loaded, tmp_path):
    config = dataclasses.replace(CONFIG, rule=rule)
    undisturbed = train_virtual(config, 3, checkpoints=Checkpoints())
    kept = []
    assert_same_end(train_virtual(config, 3, checkpoints=Checkpoints(0.4, kept.append)), undisturbed)
    assert len(kept) > 1
    for killed_at in (kept[0], kept[len(kept) // 2]):
        resumed = train_virtual(config, 3, checkpoints=Checkpoints(), earlier=Earlier(tmp_path, killed_at))
        assert_same_end(resumed, undisturbed)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rule", ["bsp", "losp"])
def test_on_other_ranks_the_rest_of_the_epoch_is_dealt(rule, size, loaded, tmp_path):
    first = train_virtual(dataclasses.replace(CONFIG, rule=rule, samples=0.5 * LENGTH), 3, checkpoints=Checkpoints())
    before = int(first.summary.samples)
    assert len(loaded) == before < LENGTH
    longer = dataclasses.replace(first.config, samples=1.5 * LENGTH)
    train_virtual(longer, size, checkpoints=Checkpoints(), earlier=Earlier(tmp_path, first))
    counts = collections.Counter(loaded[:LENGTH])
    assert set(counts.values()) == {1} and len(counts) == LENGTH


@pytest.mark.parametrize("rule", ["bsp", "losp", "cocod:steps=3"])
@pytest.mark.usefixtures("loaded")
def test_ranks_that_wait_for_a_batch_put_a_checkpoint_off_and_no_more(rule):
    kept = []
    run = train_virtual(
        dataclasses.replace(CONFIG, rule=rule, batch_size=4), 3, checkpoints=Checkpoints(0.5, kept.append)
    )
    assert {int(one.summary.samples // LENGTH) for one in kept} >= {0, 1, 2}  # epochs with a checkpoint
    assert run.summary.samples >= 3 * LENGTH
