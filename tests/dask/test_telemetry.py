"""What a rank tells of itself: all of it, seldom, and without being in the way."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

import slackring as sr
from slackring.dask.snapshots import reported, wait_share
from slackring.dask.telemetry import Telemetry
from slackring.optim import ambient
from slackring.optim.progress import LandedRound
from slackring.optim.records import RoundRecord, StepRecord

STEP = StepRecord(0, 0, 0.0, 1.0, 0.7, 0.0, 0.2, 0.1, 32.0)
ROUND = RoundRecord(0, 0.0, 1.0, 0.2, 1, 32.0, 2, 64.0, 2, 2, 1.0, 400)


class Events(list):
    """What was emitted; also takes note of the threads that did, and of two at once."""

    def __init__(self):
        super().__init__()
        self.came = threading.Condition()
        self.busy = threading.Lock()

    def __call__(self, event):
        assert self.busy.acquire(blocking=False), "two threads emit at once"
        with self.came:
            self.append(json.loads(json.dumps(event)))
            self.came.notify_all()
        self.busy.release()

    def wait_for(self, condition, timeout=20.0):
        with self.came:
            assert self.came.wait_for(lambda: condition(self), timeout), list(self)

    def of(self, kind):
        return [event for event in self if event["kind"] == kind]


def test_it_adds_up_what_an_optimizer_does():
    events = Events()
    with Telemetry(0, events) as telemetry:
        x = torch.nn.Parameter(torch.zeros(2))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "local_sgd:steps=2")
        for _ in range(6):
            x.grad = torch.ones(2)
            optimizer.step(samples=8)
        optimizer.join()
    assert events[-1]["kind"] == "progress"
    last = events[-1]
    assert (last["steps"], last["samples"], last["rounds"]) == (6, 48.0, optimizer.progress.rounds)
    assert 0 < last["compute"] + last["blocked"] + last["bookkeeping"] <= last["seconds"]
    assert 0 < last["step_seconds"] < last["compute"]
    assert telemetry.snapshot().keys() == last.keys() - {"kind"}


def test_a_rank_that_does_nothing_tells_so_about_once_a_second():
    events = Events()
    began = time.monotonic()
    with Telemetry(1, events):
        events.wait_for(lambda events: len(events) == 3)
    assert len(events) == 4
    assert [event["steps"] for event in events] == [0] * 4
    assert events[2]["seconds"] > 2.0
    assert time.monotonic() - began >= 2.0
    assert events[0]["step_seconds"] is None


def test_samples_are_few_and_the_last_one_is_whole():
    events = Events()
    began = time.monotonic()
    with Telemetry(0, events) as telemetry:
        for number in range(20_000):
            telemetry.step(STEP)
            telemetry.round(ROUND)
            telemetry.report({"loss": float(number)})
        events.wait_for(len)
    most = 1 + (time.monotonic() - began) / 0.25
    assert len(events.of("progress")) <= most and len(events.of("report")) <= most
    last = events.of("progress")[-1]
    assert (last["steps"], last["rounds"], last["samples"]) == (20_000, 20_000, 640_000.0)
    assert wait_share({}, last) == pytest.approx(0.2)
    assert events.of("report")[-1]["values"] == {"loss": 19_999.0} and reported(last) == {"loss": 19_999.0}
    assert events.of("report")[-1]["step"] == 20_000


def test_reports_carry_what_is_new():
    events = Events()
    with Telemetry(0, events) as telemetry:
        sr.report(loss=1.0, phase="one")
        events.wait_for(lambda events: events.of("report"))
        telemetry.step(STEP)
        sr.report(accuracy=0.5)
        events.wait_for(lambda events: len(events.of("report")) == 2)
    assert [(event["values"], event["step"]) for event in events.of("report")] == [
        ({"loss": 1.0, "phase": "one"}, 0),
        ({"accuracy": 0.5}, 1),
    ]
    assert reported(events[-1]) == {"loss": 1.0, "phase": "one", "accuracy": 0.5}


def test_whatever_is_reported_becomes_plain():
    x = torch.ones(2, requires_grad=True)
    loss = (x**2).sum()
    telemetry = Telemetry(0, lambda event: None)
    telemetry.report(
        {
            "loss": loss,
            "whole": torch.tensor(3),
            "count": 7,
            "nan": float("nan"),
            "odd": torch.ones(2),
            "text": "x" * 1000,
        }
    )
    values = reported(telemetry.snapshot())
    assert (values["loss"], values["whole"], values["count"]) == (2.0, 3.0, 7)
    assert values["nan"] != values["nan"]
    assert values["odd"] == "tensor([1., 1.])" and values["text"] == "x" * 200
    assert not telemetry._values["loss"].requires_grad  # its graph is not kept alive


def test_the_number_of_names_is_bounded():
    telemetry = Telemetry(0, lambda event: None)
    telemetry.report({f"name{number}": 0.0 for number in range(1000)})
    telemetry.report({"name0": 1.0})
    values = reported(telemetry.snapshot())
    assert len(values) == 32 and values["name0"] == 1.0


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_tells_of_a_straggler_once(rank):
    events = Events()
    with Telemetry(rank, events) as telemetry:
        for index in range(100):
            telemetry.landed(LandedRound(index, (1, 1), (1.0, 1.0), (False, False), (0.4, 0.1)))
    texts = [event["text"] for event in events.of("warning")]
    assert len(texts) == (1 if rank == 0 else 0)
    assert all("rank 0 takes 0.4 s a local step" in text for text in texts)


def test_of_ranks_that_are_slowed_on_purpose_nobody_is_warned():
    events = Events()
    ambient.slowed.set()
    try:
        with Telemetry(0, events) as telemetry:
            for index in range(100):
                telemetry.landed(LandedRound(index, (1, 1), (1.0, 1.0), (False, False), (0.4, 0.1)))
    finally:
        ambient.slowed.clear()
    assert not events.of("warning")


def test_the_end_is_told_also_of_a_run_that_failed():
    events = Events()
    with pytest.raises(ZeroDivisionError), Telemetry(0, events) as telemetry:
        events.wait_for(len)
        telemetry.step(STEP)
        raise ZeroDivisionError
    assert events[-1]["steps"] == 1
    assert not any(thread.name == "slackring-telemetry" for thread in threading.enumerate())
