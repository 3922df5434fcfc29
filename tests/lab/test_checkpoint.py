"""A run that is cut short goes on: exactly from checkpoints on the way, from the anchor on other ranks."""

from __future__ import annotations

import dataclasses
import io
import logging
import random
import signal
import zlib

import numpy as np
import pandas as pd
import pytest
import torch

import slackring as sr
from slackring.errors import AgreementError, DataError
from slackring.lab import train as train_module
from slackring.lab.checkpoint import Checkpoints, Earlier, RunFolder, load_earlier
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.tasks import load_task
from slackring.lab.train import train, train_virtual

CONFIG = TrainConfig(
    task="digits",
    step_time=0.1,
    straggler="shifted_exponential:mean=0.5",
    rounds=30,
    seed=3,
    lr=0.1,
    momentum=0.9,
    eval_every=0.7,
)
COUNTING = ["bsp", "local_sgd:steps=3", "cocod:steps=3", "relaxed:payload=gradient,steps=2,staleness=2"]


@pytest.fixture
def noisy_task(request, monkeypatch):
    """A task whose training draws from torch's, NumPy's and Python's random streams; the parameter names its batches."""
    task = load_task("digits")

    def model():
        return torch.nn.Sequential(task.model(), torch.nn.Dropout(0.2))

    def loss(output, labels):
        # Only in training: how often a run is evaluated depends on its clock, which checkpoints shift.
        noise = random.random() + np.random.random() if torch.is_grad_enabled() else 0.0
        return task.loss(output, labels) * (1 + 0.3 * noise)

    def loaders(*arguments):
        batches, test = task.loaders(*arguments)
        return (batches if request.param == "stateful batches" else (batch for batch in batches)), test

    noisy = dataclasses.replace(task, model=model, loss=loss, loaders=loaders)
    monkeypatch.setattr(train_module, "load_task", lambda text: noisy)


def states(run):
    return [torch.load(io.BytesIO(content), weights_only=True) for content in run.checkpoint]


def assert_same_end(found, expected):
    for mine, theirs in zip(states(found), states(expected), strict=True):
        for name, tensor in theirs["model"].items():
            assert torch.equal(mine["model"][name], tensor)
    columns = ["rank", "step", "round", "compute", "samples", "loss"]
    pd.testing.assert_frame_equal(found.steps[columns], expected.steps[columns])
    columns = ["rank", "round", "local_steps", "steps", "samples", "nbytes"]
    pd.testing.assert_frame_equal(found.rounds[columns], expected.rounds[columns])


def earlier(run, folder):
    return Earlier(folder, run)


@pytest.mark.parametrize(
    ("rule", "noisy_task"),
    [*((rule, "stateful batches") for rule in COUNTING), (COUNTING[-1], "batches without state")],
    indirect=["noisy_task"],
)
@pytest.mark.usefixtures("noisy_task")
def test_a_killed_run_ends_with_the_bits_of_the_undisturbed_one(rule, tmp_path):
    config = dataclasses.replace(CONFIG, rule=rule)
    undisturbed = train_virtual(config, 3, checkpoints=Checkpoints())
    kept = []
    with_checkpoints = train_virtual(config, 3, checkpoints=Checkpoints(0.4, kept.append))
    assert_same_end(with_checkpoints, undisturbed)
    assert len(kept) > 3
    killed_at = random.Random(zlib.crc32(rule.encode())).choice(kept[:-1])
    assert 0 < killed_at.summary.rounds < 30
    resumed = train_virtual(config, 3, checkpoints=Checkpoints(), earlier=earlier(killed_at, tmp_path))
    assert_same_end(resumed, undisturbed)
    assert not resumed.summary.interrupted
    assert resumed.facts["resumed"] == {
        "run": str(tmp_path),
        "ranks": 3,
        "exact": True,
        "seconds": killed_at.summary.seconds,
        "rounds": killed_at.summary.rounds,
    }
    assert resumed.steps["start"].groupby(resumed.steps["rank"]).is_monotonic_increasing.all()
    assert resumed.curve["seconds"].is_monotonic_increasing


@pytest.mark.parametrize("rule", ["cocod:steps=3", "losp"])
def test_a_run_killed_near_its_end_goes_on_to_whatever_end_is_given(rule, tmp_path):
    kept = []
    train_virtual(dataclasses.replace(CONFIG, rule=rule), 3, checkpoints=Checkpoints(0.01, kept.append))
    assert kept[-1].summary.rounds < 30
    for rounds in (30, 33):
        config = dataclasses.replace(CONFIG, rule=rule, rounds=rounds)
        resumed = train_virtual(config, 3, checkpoints=Checkpoints(), earlier=earlier(kept[-1], tmp_path))
        assert resumed.summary.rounds == rounds


def interrupted_virtually(config, size, monkeypatch, after=1.5):
    """Run until a signal comes in the midst of an evaluation."""
    interrupt, task = Interrupt(), load_task(config.task)

    def metric(model, batches):
        if sr.ring().clock.now() > after:
            interrupt.signal = signal.SIGUSR1
        return task.metric(model, batches)

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "load_task", lambda text: dataclasses.replace(task, metric=metric))
        run = train_virtual(config, size, interrupt=interrupt, checkpoints=Checkpoints())
    assert run.summary.interrupted
    return run


@pytest.mark.parametrize("rule", ["bsp", "local_sgd:steps=3"])
def test_an_interrupt_changes_nothing_where_nothing_is_in_flight(rule, tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, rule=rule)
    run = interrupted_virtually(config, 3, monkeypatch)
    assert 0 < run.summary.rounds < 30
    resumed = train_virtual(config, 3, checkpoints=Checkpoints(), earlier=earlier(run, tmp_path))
    assert_same_end(resumed, train_virtual(config, 3, checkpoints=Checkpoints()))


@pytest.mark.parametrize("rule", ["osp", "losp", "cocod:steps=3"])
def test_an_interrupted_run_keeps_its_clock_and_its_rows(rule, tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, rule=rule, rounds=None, seconds=6.0)
    run = interrupted_virtually(config, 3, monkeypatch)
    resumed = train_virtual(config, 3, checkpoints=Checkpoints(), earlier=earlier(run, tmp_path))
    assert 1.5 < run.summary.seconds < 5
    assert 5.5 < resumed.summary.seconds < 8
    assert resumed.curve["samples"].iloc[-1] == resumed.steps["samples"].sum() > run.steps["samples"].sum()
    pd.testing.assert_frame_equal(resumed.curve.head(len(run.curve)), run.curve)
    for rank, rows in resumed.steps.groupby("rank"):
        before = run.steps[run.steps["rank"] == rank].reset_index(drop=True)
        pd.testing.assert_frame_equal(rows.head(len(before)).reset_index(drop=True), before)
        assert rows["step"].tolist() == list(range(len(rows)))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("rule", ["bsp", "losp"])
def test_another_number_of_ranks_goes_on_from_the_anchor(rule, size, tmp_path):
    config = dataclasses.replace(CONFIG, rule=rule)
    run = train_virtual(config, 3, checkpoints=Checkpoints())
    longer = dataclasses.replace(run.config, rounds=34)
    resumed = train_virtual(longer, size, checkpoints=Checkpoints(), earlier=earlier(run, tmp_path))
    assert not resumed.facts["resumed"]["exact"]
    assert resumed.summary.rounds == 34
    assert len(resumed.checkpoint) == size
    # What it first evaluates has learned what the run before had.
    first = resumed.curve.iloc[len(run.curve)]
    assert first["loss"] < (run.curve["loss"].iloc[0] + run.curve["loss"].iloc[-1]) / 2


@pytest.mark.parametrize("rule", ["bsp", "cocod:steps=2", "losp"])
def test_checkpoints_end_where_a_rank_has_no_more_batches(rule, monkeypatch):
    task, kept = load_task("digits"), []

    def loaders(batch_size, rank, size, seed):
        batches, test = task.loaders(batch_size, rank, size, seed)
        return (batch for batch, _ in zip(batches, range(7 + 6 * rank), strict=False)), test

    monkeypatch.setattr(train_module, "load_task", lambda text: dataclasses.replace(task, loaders=loaders))
    run = train_virtual(dataclasses.replace(CONFIG, rule=rule), 3, checkpoints=Checkpoints(0.15, kept.append))
    assert run.steps.groupby("rank").size().tolist() == [7, 13, 19]
    assert kept
    assert all(one.steps.groupby("rank").size()[0] <= 7 for one in kept)


def test_time_in_a_checkpoint_is_no_step_time():
    kept = []
    config = dataclasses.replace(CONFIG, rule="losp", straggler="persistent:ranks=2,factor=4")
    run = train_virtual(config, 3, checkpoints=Checkpoints(0.5, kept.append))
    assert len(kept) > 3
    fast = run.steps[run.steps["rank"] == 0]
    assert fast["compute"].to_numpy() == pytest.approx(0.1)


def test_ranks_with_different_times_between_checkpoints_learn_so():
    def run():
        return train(CONFIG, checkpoints=Checkpoints(1.0 + sr.ring().rank))

    with pytest.raises(AgreementError, match="checkpoint_every"):
        sr.VirtualCluster(2).run(run)


@pytest.fixture(scope="module")
def small_run():
    return train_virtual(dataclasses.replace(CONFIG, rule="losp", rounds=3), 2, checkpoints=Checkpoints())


def test_one_checkpoint_replaces_another_and_the_run_all(small_run, tmp_path):
    folder = RunFolder(tmp_path, "one")
    folder.keep(small_run)
    assert [file.name for file in tmp_path.iterdir()] == ["one-round3"]
    assert load_earlier(tmp_path / "one-round3").run.checkpoint == small_run.checkpoint
    later = dataclasses.replace(small_run, summary=dataclasses.replace(small_run.summary, rounds=4))
    folder.keep(later)
    assert [file.name for file in tmp_path.iterdir()] == ["one-round4"]
    assert folder.finish(small_run) == tmp_path / "one"
    assert [file.name for file in tmp_path.iterdir()] == ["one"]


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(small_run, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "slackring"):
        RunFolder(tmp_path / "file", "one").keep(small_run)
    assert "no checkpoint after round 3" in caplog.text


def test_a_checkpoint_that_cannot_be_read_is_told(small_run, tmp_path):
    folder = RunFolder(tmp_path, "one").finish(small_run)
    (folder / "checkpoint" / "rank-0.pt").unlink()
    with pytest.raises(DataError, match="lacks the file of a rank"):
        load_earlier(folder)
    (folder / "checkpoint" / "rank-1.pt").unlink()
    with pytest.raises(DataError, match="has no checkpoint"):
        load_earlier(folder)
    damaged = dataclasses.replace(small_run, checkpoint=(small_run.checkpoint[0], b"damaged"))
    longer = dataclasses.replace(small_run.config, rounds=5)
    with pytest.raises(DataError, match=r"rank 1: the checkpoint's file 'rank-1.pt' cannot be read"):
        train_virtual(longer, 2, earlier=earlier(damaged, folder))
