"""A run, on virtual ranks and on one."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Iterator

import pandas as pd
import pytest
import torch

import slackring as sr
from slackring.errors import AgreementError, DataError, DivergedError, SlackringError, StragglerError
from slackring.lab import train as train_module
from slackring.lab.agree import on_every_rank
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.report import describe_compression
from slackring.lab.tasks import load_task
from slackring.lab.train import inject, train, train_virtual
from slackring.ring.injected import InjectedNetwork
from slackring.ring.single import SingleRing

RULES = ["bsp", "local_sgd", "elastic_bsp", "osp", "losp", "cocod", "relaxed:steps=2,staleness=2,compensation=1"]
CONFIG = TrainConfig(
    task="digits",
    step_time=0.1,
    straggler="persistent:ranks=2+3,factor=1.3+4",
    seconds=8.0,
    seed=3,
    lr=0.4,
    momentum=0.0,
)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains_and_accounts_for_its_time(rule):
    run = train_virtual(dataclasses.replace(CONFIG, rule=rule), 4)
    steps, rounds, curve, summary = run.steps, run.rounds, run.curve, run.summary
    assert summary.final_accuracy == curve["accuracy"].iloc[-1] > 0.5
    assert curve["loss"].iloc[-1] < 0.7 * math.log(10)  # of guessing
    wall = (steps["end"] - steps["start"]).to_numpy()
    parts = steps[["compute", "blocked", "bookkeeping"]].sum(axis=1).to_numpy()
    assert wall == pytest.approx(parts, abs=1e-9)
    # What the curve ends with is what all ranks did.
    assert curve["steps"].iloc[-1] == len(steps) == summary.steps
    assert curve["samples"].iloc[-1] == steps["samples"].sum()
    assert rounds.groupby("round").size().eq(4).all()
    assert rounds["round"].nunique() == curve["rounds"].iloc[-1]
    assert steps["loss"].notna().all()
    assert curve["seconds"].is_monotonic_increasing


def test_compressed_rounds_have_half_the_bytes_and_train_as_well():
    plain, compressed = (
        train_virtual(dataclasses.replace(CONFIG, rule="losp", compression=how), 4) for how in ("none", "fp16")
    )
    assert compressed.rounds["nbytes"].max() == plain.rounds["nbytes"].max()  # of the first rounds
    assert compressed.rounds["nbytes"].min() < 0.6 * plain.rounds["nbytes"].min()
    assert compressed.summary.final_accuracy == pytest.approx(plain.summary.final_accuracy, abs=0.02)
    assert "compressed" not in describe_compression(plain.config)
    assert "fp16" in describe_compression(compressed.config)


def test_a_relaxed_rule_comes_near_the_no_wait_limit_and_bsp_cannot():
    assert train_virtual(dataclasses.replace(CONFIG, rule="bsp"), 4).summary.limit_share == pytest.approx(
        0.331, abs=0.002
    )
    losp = train_virtual(dataclasses.replace(CONFIG, rule="losp"), 4).summary
    assert losp.limit_share > 0.93
    assert losp.longest_window <= 4
    assert max(losp.wait_share) < 0.06


def test_a_virtual_run_is_the_same_every_time():
    first, second = (train_virtual(dataclasses.replace(CONFIG, rule="losp"), 4) for _ in range(2))
    pd.testing.assert_frame_equal(first.steps, second.steps)
    pd.testing.assert_frame_equal(first.curve, second.curve)


def test_a_seed_changes_model_and_batches():
    first, second = (train_virtual(dataclasses.replace(CONFIG, seed=seed), 2 + 2) for seed in (0, 1))
    assert first.steps["loss"].iloc[0] != second.steps["loss"].iloc[0]


def test_a_run_on_one_rank_is_plain_training():
    config = TrainConfig(task="digits", rule="bsp", lr=0.1, momentum=0.9, rounds=20, seed=1)
    run = train(config, ring=SingleRing())
    torch.manual_seed(1)
    task = load_task("digits")
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches, _ = task.loaders(32, 0, 1, 1)
    losses = []
    for (x, y), _ in zip(batches, range(20), strict=False):
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert run.steps["loss"].tolist() == losses
    assert run.facts["ring"] == "single"


def test_the_limits_end_a_run():
    for limits in ({"rounds": 7}, {"samples": 2000.0}):
        summary = train_virtual(dataclasses.replace(CONFIG, seconds=None, **limits), 4).summary
        assert summary.rounds == limits.get("rounds", math.ceil(2000 / 128))


def test_a_run_can_stop_at_its_target():
    config = dataclasses.replace(CONFIG, rule="losp", seconds=60.0, target=0.8)
    run = train_virtual(dataclasses.replace(config, stop_at_target=True), 4)
    assert run.summary.seconds_to_target < run.summary.seconds < 20


@pytest.mark.parametrize("rule", RULES)
def test_a_loss_that_is_not_finite_ends_the_run_on_all_ranks(rule, monkeypatch):
    monkeypatch.setattr(train_module, "load_task", lambda text: _poisoned(rank=1, step=5))
    with pytest.raises(
        DivergedError, match=r"the loss of rank 1 was not a finite number at its local step 5 .*use a lower --lr"
    ):
        train_virtual(dataclasses.replace(CONFIG, rule=rule), 4)


def _poisoned(rank, step):
    task = load_task("digits")
    calls = 0

    def loss(output, labels):
        nonlocal calls
        value = task.loss(output, labels)
        if torch.is_grad_enabled() and sr.ring().rank == rank:
            calls += 1
            if calls > step:
                return value * float("nan")
        return value

    return dataclasses.replace(task, loss=loss)


@pytest.mark.parametrize("rule", RULES)
def test_ranks_may_run_out_of_data_at_different_times(rule, monkeypatch):
    task = load_task("digits")

    def loaders(batch_size, rank, size, seed):
        batches, test = task.loaders(batch_size, rank, size, seed)
        return (batch for batch, _ in zip(batches, range(3 + 4 * rank), strict=False)), test

    monkeypatch.setattr(train_module, "load_task", lambda text: dataclasses.replace(task, loaders=loaders))
    run = train_virtual(dataclasses.replace(CONFIG, rule=rule, seconds=100.0), 4)
    assert run.steps.groupby("rank").size().tolist() == [3, 7, 11, 15]


@pytest.mark.parametrize("rule", ["bsp", "losp"])
def test_an_interrupt_ends_the_run_and_keeps_what_was_measured(rule, monkeypatch):
    interrupt = Interrupt()
    task = load_task("digits")

    def metric(model, batches):
        if sr.ring().clock.now() > 3:
            interrupt.signal = signal.SIGINT
        return task.metric(model, batches)

    monkeypatch.setattr(train_module, "load_task", lambda text: dataclasses.replace(task, metric=metric))
    run = train_virtual(dataclasses.replace(CONFIG, rule=rule), 4, interrupt=interrupt)
    assert run.summary.interrupted
    assert 3 < run.summary.seconds < 5


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which a job that a shell put into the background starts without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_one_signal_is_a_wish_and_the_second_is_an_order(ctrl_c):
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ranks_with_different_settings_learn_so():
    def run():
        rank = sr.ring().rank
        return train(dataclasses.replace(CONFIG, rule="losp" if rank == 2 else "bsp"))

    with pytest.raises(AgreementError, match='rule: rank 2 has "losp"'):
        sr.VirtualCluster(4).run(run)


def test_one_ranks_failure_is_everyones():
    def run():
        def load():
            if sr.ring().rank == 1:
                raise DataError("no data here.")
            return "data"

        with pytest.raises(DataError, match=r"^rank 1: no data here\.$"):
            on_every_rank(sr.ring(), load)
        return True

    assert sr.VirtualCluster(3).run(run) == [True] * 3


def _failing(what, rank):
    """A task of which one part fails on one rank, or is another there."""
    task = load_task("digits")

    def model():
        if sr.ring().rank == rank:
            if what == "model":
                raise ValueError("no weights here")
            if what == "other model":
                return torch.nn.Sequential(*task.model(), torch.nn.Linear(10, 10))
        return task.model()

    def loaders(batch_size, mine, size, seed):
        if what == "loaders" and mine == rank:
            raise FileNotFoundError("no shard here")
        return task.loaders(batch_size, mine, size, seed)

    return dataclasses.replace(task, model=model, loaders=loaders)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("model", r"^rank 1: ValueError: no weights here \(the traceback"),
        ("loaders", r"^rank 1: FileNotFoundError: no shard here \(the traceback"),
        ("other model", "ranks differ in model: rank 1 has "),
    ],
)
def test_a_task_that_fails_on_one_rank_ends_all_with_its_sentence(what, told, monkeypatch, caplog):
    monkeypatch.setattr(train_module, "load_task", lambda text: _failing(what, rank=1))

    def run():
        with pytest.raises(SlackringError, match=told):
            train(dataclasses.replace(CONFIG, straggler="none"))
        return True

    assert sr.VirtualCluster(3).run(run) == [True] * 3
    assert ("Traceback" in caplog.text) == (what != "other model")


def test_a_failure_of_all_ranks_names_none():
    def fail():
        raise DataError("no data anywhere.")

    with pytest.raises(DataError) as caught:
        sr.VirtualCluster(2).run(lambda: on_every_rank(sr.ring(), fail))
    assert str(caught.value) == "no data anywhere."


def test_a_straggler_on_a_rank_that_is_not_there_is_refused():
    with pytest.raises(StragglerError, match="names rank 2, but the last rank is 1"):
        train_virtual(CONFIG, 2)


def test_only_what_is_asked_for_is_injected():
    plain = SingleRing()
    assert inject(plain, TrainConfig(seconds=1.0)) is plain
    assert plain.pace is None
    slow = inject(SingleRing(), TrainConfig(seconds=1.0, network="latency=0.01", straggler="constant:seconds=0.1"))
    assert isinstance(slow, InjectedNetwork)
    assert slow.pace is not None


def test_batch_norm_statistics_are_evaluated(monkeypatch):
    task = load_task("digits")

    def model():
        plain = task.model()
        return torch.nn.Sequential(torch.nn.BatchNorm1d(64), *plain)

    monkeypatch.setattr(train_module, "load_task", lambda text: dataclasses.replace(task, model=model))
    assert train_virtual(dataclasses.replace(CONFIG, rule="losp"), 4).summary.final_accuracy > 0.8


@pytest.mark.parametrize(("straggler", "watched"), [("none", True), ("constant:seconds=0.001", False)])
def test_ranks_are_watched_unless_a_straggler_is_injected(straggler, watched, monkeypatch):
    heard = []
    monkeypatch.setattr(train_module, "StragglerWatch", lambda: heard.append)
    config = TrainConfig(task="digits", rule="bsp", lr=0.4, rounds=5, straggler=straggler)
    train(config, ring=inject(SingleRing(), config))
    assert bool(heard) == watched
    train_virtual(dataclasses.replace(config, straggler="none", step_time=0.1), 2)
    assert bool(heard) == watched
