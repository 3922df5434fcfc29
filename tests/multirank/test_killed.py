"""Runs on real ranks that are killed and go on."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import signal
import zlib

import pandas as pd
import pytest
import torch

from slackring.lab.checkpoint import Checkpoints, RunFolder, load_earlier
from slackring.lab.config import TrainConfig
from slackring.lab.tasks import load_task
from slackring.lab.train import inject, train
from slackring.ring.ambient import ring as ambient

hvd = pytest.importorskip("horovod.torch")

CONFIG = TrainConfig(
    task="tests.multirank.test_killed:noisy",
    straggler="persistent:ranks=1,factor=2",
    step_time=0.01,
    rounds=24,
    seed=5,
    lr=0.1,
    momentum=0.9,
)
killed_at = None  # local step at which this rank dies


def noisy():
    """Digits with dropout, so that random streams count; kills this rank in the midst of a step if it is told to."""
    task, steps = load_task("digits"), 0

    def loss(output, labels):
        nonlocal steps
        if torch.is_grad_enabled():
            steps += 1
            if steps == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return task.loss(output, labels)

    return dataclasses.replace(task, model=lambda: torch.nn.Sequential(task.model(), torch.nn.Dropout(0.2)), loss=loss)


def train_until_killed(config, step, out):
    global killed_at
    killed_at = step
    folder = RunFolder(out, "killed")
    try:
        train(config, ring=inject(ambient(), config), checkpoints=Checkpoints(0.05, folder.keep))
    finally:  # the other rank was faster, and the ring is broken
        os.kill(os.getpid(), signal.SIGKILL)


def go_on(config, folder):
    """The run from `folder` to its end; the parameters that an undisturbed one ends with, by rank."""
    earlier = load_earlier(folder) if hvd.rank() == 0 else None
    resumed = train(config, ring=inject(ambient(), config), checkpoints=Checkpoints(), earlier=earlier)
    undisturbed = train(config, ring=inject(ambient(), config), checkpoints=Checkpoints())
    return None if resumed is None else (resumed, parameters(resumed), parameters(undisturbed))


def parameters(run):
    return [torch.load(io.BytesIO(content), weights_only=True)["model"] for content in run.checkpoint]


def killed_and_resumed(ranks, rule, out):
    config = dataclasses.replace(CONFIG, rule=rule)
    ranks(2).run(
        train_until_killed, config, random.Random(zlib.crc32(rule.encode())).randrange(40, 60), out, dies=(0, 1)
    )
    (folder,) = (folder for folder in out.iterdir() if not folder.name.startswith("."))
    resumed, found, expected = ranks(2).run(go_on, config, folder)[0]
    before = load_earlier(folder).run
    assert 0 < before.summary.rounds < config.rounds == resumed.summary.rounds
    assert resumed.facts["resumed"]["exact"]
    # No local step of the checkpoint is lost: each is in the rows, and in the model that all ranks end with.
    for rank, rows in resumed.steps.groupby("rank"):
        theirs = before.steps[before.steps["rank"] == rank].reset_index(drop=True)
        pd.testing.assert_frame_equal(rows.head(len(theirs)).reset_index(drop=True), theirs)
        assert rows["step"].tolist() == list(range(len(rows)))
    assert resumed.curve["samples"].iloc[-1] == resumed.steps["samples"].sum()
    return found, expected


def test_a_killed_run_ends_with_the_bits_of_the_undisturbed_one(ranks, tmp_path):
    found, expected = killed_and_resumed(ranks, "cocod:steps=3", tmp_path)  # with a round in flight
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def test_a_killed_run_of_a_rule_with_a_clock_loses_no_step_of_the_checkpoint(ranks, tmp_path):
    found, _ = killed_and_resumed(ranks, "losp:k_max=8", tmp_path)
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())
