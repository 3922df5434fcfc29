"""Horovod on a pool: the same training as under horovodrun, agreed stops, and ranks that fail inside a collective."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from tests.dask.conftest import until
from tests.dask.same import RULES, train
from tests.multirank.launchers import horovodrun

from slackring.dask.executor import DaskExecutor
from slackring.errors import RankError

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.multirank

UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}  # what is fused is summed in another order
CONSERVED = ("losp:k_max=8", "cocod:steps=2", "local_sgd:steps=3")


@pytest.mark.parametrize("size", [2, 4])
def test_a_pool_trains_as_horovodrun_does(
    client: Client, nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    for name, value in UNFUSED.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "found.json"
    done = horovodrun(size, str(Path(__file__).with_name("same.py")), str(file), *RULES)
    assert done.returncode == 0, done.stderr
    expected = json.loads(file.read_text())
    executor = DaskExecutor(client, size, out=tmp_path)
    executor.start(extra_env_vars=UNFUSED)
    try:
        assert executor.run(train, [RULES[:1]])[0][RULES[0]] == expected[RULES[0]]
        assert executor.run(lambda: sys.modules["horovod.torch"].is_initialized()) == [False] * size  # idle ranks rest
        found = executor.run(train, [RULES])
        for rule in RULES:
            assert all(result[rule]["model"] == found[0][rule]["model"] for result in found)
            assert found[0][rule] == expected[rule], rule
            assert len(expected[rule]["collectives"]) >= 12 / 3

        def keep() -> None:
            import horovod.torch as hvd

            from slackring.rules import parse_rule
            from slackring.testing import PROMISES

            hvd.init()
            for rule in CONSERVED:
                PROMISES["nothing_is_lost_or_counted_twice"](parse_rule(rule))

        executor.run(keep)
    finally:
        executor.shutdown()


def endless(rule: str, at: int, fail: Callable[[], Any] | None) -> tuple[int, int]:
    """Train until somebody stops it; rank 1 may fail at a step."""
    import horovod.torch as hvd
    import torch

    import slackring as sr

    hvd.init()
    x = torch.nn.Parameter(torch.zeros(4))
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule=rule)
    step = 0
    while not optimizer.progress.stop:
        if fail is not None and hvd.rank() == 1 and step == at:
            fail()
        time.sleep(0.005 * (1 + hvd.rank()))
        x.grad = torch.ones(4)
        optimizer.step()
        sr.report(loss=1.0 / (1 + step))
        step += 1
    optimizer.join()
    return step, optimizer.progress.rounds


def metrics(client: Client, worker: str) -> str:
    port = client.run(lambda dask_worker: dask_worker.http_server.port, workers=[worker])[worker]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        return str(page.read().decode())


@pytest.mark.parametrize("rule", ["losp", "bsp"])
def test_a_run_stops_in_an_agreed_round_and_shows_how_far_it_is(
    client: Client, nothing_left: None, tmp_path: Path, rule: str
) -> None:
    with DaskExecutor(client, 2, out=tmp_path) as executor:
        run = executor.run_remote(endless, [rule, 0, None])
        until(
            lambda: run.board is not None and min(row.rounds for row in run.board.rows()[0]) > 5, "there are rounds", 60
        )
        assert run.board is not None
        assert all("loss" in row.values for row in run.board.rows()[0])
        assert f'slackring_rank_steps{{rank="1",run="{run.id}"}}' in metrics(client, run.places[1].worker.address)
        run.stop()
        results = run.result(timeout=60)
        assert results[0][1] == results[1][1] > 5
        assert rule == "losp" or results[0] == results[1]
        run = executor.run_remote(endless, [rule, 0, None])
        run.stop()  # before there is anything to stop
        assert run.result(timeout=60)
    assert "slackring_rank_steps{" not in metrics(client, run.places[1].worker.address)


@pytest.mark.parametrize(
    ("fail", "told", "timeout"),
    [
        (lambda: 1 // 0, "raised ZeroDivisionError", 10.0),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died: SIGKILL", 10.0),
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), r"does not answer: .* rank 0 raised ", 5.0),
    ],
    ids=["raises", "killed", "stopped"],
)
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_a_rank_that_fails_inside_a_run_of_collectives_is_named(
    client: Client, nothing_left: None, tmp_path: Path, fail: Callable[[], Any], told: str, timeout: float, times: int
) -> None:
    def import_all() -> None:
        import horovod.torch

        import slackring as sr

        assert horovod.torch and sr.DistributedOptimizer

    settings = DaskExecutor.create_settings(timeout_s=timeout)
    with DaskExecutor(client, 2, settings=settings, out=tmp_path) as executor:
        for _ in range(times):
            executor.run(import_all)  # outside the time that counts, as the 0.3 s of 20 steps are not
            began = time.monotonic()
            with pytest.raises(RankError, match=told) as caught:
                executor.run(endless, ["bsp", 20, fail])
            assert time.monotonic() - began < 2 * timeout + 5.0
            assert caught.value.rank == 1


def test_a_rank_may_have_loaders_of_several_processes(client: Client, nothing_left: None, tmp_path: Path) -> None:
    def load() -> int:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        batches = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4, num_workers=2)
        return int(sum(x.sum() for (x,) in batches))

    with DaskExecutor(client, 2, out=tmp_path) as executor:
        assert executor.run(load) == [66, 66]
