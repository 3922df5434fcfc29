"""The example of a task of one's own, on virtual ranks and as its docstring starts it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slackring import cli
from slackring.lab.config import TrainConfig
from slackring.lab.train import train_virtual

ROOT = Path(__file__).resolve().parents[2]
TASK = "examples.own_task:shifted_digits"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("rule", ["bsp", "losp"])
def test_it_learns_under_any_rule(rule):
    config = TrainConfig(
        task=TASK,
        rule=rule,
        lr=0.1,
        samples=9000,
        batch_size=16,
        straggler="persistent:ranks=1,factor=4",
        eval_every=20.0,
    )
    assert train_virtual(config, 2).summary.final_accuracy > 0.8


def test_its_command_runs(monkeypatch, capsys, tmp_path):
    command = ["train", "--task", TASK, "--rule", "losp", "--samples", "600", "--virtual", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["slackring", *command])
    cli.main()
    assert "final accuracy" in capsys.readouterr().out
