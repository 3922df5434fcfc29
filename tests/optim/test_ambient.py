"""Whoever runs a rank can stop and watch it without its code knowing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping

import pytest
import torch
from tests.optim.matrix import RULES

import slackring as sr
from slackring.errors import StoppedError
from slackring.lab.config import TrainConfig
from slackring.lab.records import RunRecorder
from slackring.lab.train import train_virtual
from slackring.optim.ambient import stop_wish, watchers, watching
from slackring.optim.progress import LandedRound

CLUSTER = sr.VirtualCluster(3, straggler="persistent:ranks=2,factor=3")


class Watcher(RunRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[LandedRound] = []
        self.reported: list[dict[str, object]] = []

    def landed(self, landed: LandedRound) -> None:
        self.heard.append(landed)

    def report(self, values: Mapping[str, object]) -> None:
        self.reported.append(dict(values))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    was_set = stop_wish.is_set()
    stop_wish.clear()
    assert not was_set and not watchers


def make(rule: str, recorder: RunRecorder | None = None) -> tuple[torch.nn.Parameter, sr.RelaxedOptimizer]:
    x = torch.nn.Parameter(torch.zeros(2))
    return x, sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule, recorder=recorder)


def train(rule: str, *, heeds: bool, steps: int = 40) -> tuple[str, int, list[float]]:
    """Rank 1's process is told to stop during its step 7; `heeds` says whether the loop looks at ``progress.stop``."""
    x, optimizer = make(rule)
    outcome = "done"
    try:
        for step in range(steps):
            if sr.ring().rank == 1 and step == 7:
                stop_wish.set()
            x.grad = torch.ones(2)
            optimizer.step(samples=4)
            if heeds and optimizer.progress.stop:
                outcome = "stopped"
                break
    except StoppedError:
        outcome = "refused"
    optimizer.join()
    stop_wish.clear()
    return outcome, optimizer.progress.rounds, x.tolist()


@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_a_wish_of_one_process_stops_all_ranks_after_the_same_round(rule: str, heeds: bool) -> None:
    results = CLUSTER.run(train, rule, heeds=heeds)
    assert results == [results[0]] * 3
    assert results[0][0] == ("stopped" if heeds else "refused")


@pytest.mark.parametrize("rule", ["bsp", "losp:k_max=4"])
def test_a_wish_that_was_cleared_is_forgotten(rule: str) -> None:
    stop_wish.set()
    stop_wish.clear()
    assert CLUSTER.run(train, rule, heeds=True, steps=7)[0][0] == "done"


@pytest.mark.parametrize("rule", ["bsp", "bsp:accumulate=2", "local_sgd:steps=2", "losp:k_max=4"])
def test_a_watcher_hears_what_the_optimizers_own_recorder_hears(rule: str) -> None:
    def run() -> tuple[Watcher, Watcher]:
        watcher, own = Watcher(), Watcher()
        x, optimizer = make(rule, own)
        optimizer.on_landed(own.landed)
        with watching(watcher):
            for step in range(6):
                x.grad = torch.ones(2)
                optimizer.step(samples=4)
                sr.report(loss=1.0 / (step + 1))
            optimizer.join()
        return watcher, own

    ((watcher, own),) = sr.VirtualCluster(1).run(run)
    assert len(own.steps) == 6 and watcher.steps == own.steps
    assert own.rounds and watcher.rounds == own.rounds
    assert own.heard and watcher.heard == own.heard
    assert [values["loss"] for values in watcher.reported] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]


def test_an_optimizer_from_before_is_watched_and_holds_nothing_afterwards() -> None:
    x, optimizer = make("local_sgd:steps=2")
    watcher = Watcher()
    forgotten = weakref.ref(watcher)
    with watching(watcher):
        for _ in range(2):
            x.grad = torch.ones(2)
            optimizer.step()
    assert len(watcher.steps) == 2 and len(watcher.rounds) == len(watcher.heard) == 1
    del watcher
    gc.collect()
    assert forgotten() is None
    for _ in range(2):
        x.grad = torch.ones(2)
        optimizer.step()
    optimizer.join()


@pytest.mark.parametrize("rule", ["bsp", "bsp:accumulate=2", "local_sgd:steps=2", "losp:k_max=4"])
def test_a_landed_round_tells_the_seconds_of_a_step_by_rank(rule: str) -> None:
    def run() -> list[LandedRound]:
        heard: list[LandedRound] = []
        x, optimizer = make(rule)
        optimizer.on_landed(heard.append)
        for _ in range(6):
            x.grad = torch.ones(2)
            optimizer.step()
        optimizer.join()
        return heard

    for landed in CLUSTER.run(run)[0]:
        usual = [0.1, 0.1, 0.3]
        assert landed.step_seconds == pytest.approx([u if n else 0 for u, n in zip(usual, landed.steps, strict=True)])


def test_a_report_without_watchers_touches_nothing() -> None:
    class Untouchable:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(name)

    sr.report(loss=Untouchable())  # type: ignore[arg-type]


def test_a_training_run_reports_its_loss_and_accuracy() -> None:
    watcher = Watcher()
    with watching(watcher):
        run = train_virtual(TrainConfig(task="digits", rule="losp", lr=0.4, step_time=0.1, seconds=3.0), 2)
    names = {name for values in watcher.reported for name in values}
    assert names == {"loss", "accuracy"}
    reported = [values["accuracy"] for values in watcher.reported if "accuracy" in values]
    assert reported == run.curve["accuracy"].tolist()
    assert len(watcher.steps) == len(run.steps)
