"""What operators see of ranks on a worker's ``/metrics``."""

from __future__ import annotations

import sys
import urllib.request

import pytest
from prometheus_client import REGISTRY, generate_latest

from slackring.dask import metrics


def shown(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line.startswith("slackring_")]
    return {name: float(number) for name, number in (line.rsplit(" ", 1) for line in lines)}


def exported() -> dict[str, float]:
    return shown(generate_latest(REGISTRY).decode())


def snapshot(steps=4, **more):
    work = {"samples": 32.0 * steps, "compute": 0.3 * steps, "blocked": 0.1 * steps, "bookkeeping": 0.0}
    return {"rounds": steps // 2, "steps": steps, "step_seconds": 0.3, **work, **more}


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not exported()


def test_ranks_are_shown_until_their_run_ends():
    metrics.update("run1", 0, snapshot(**{"reported.loss": 0.5, "reported.accuracy": 0.9}))
    metrics.update("run1", 1, snapshot(8))
    labels = '{rank="0",run="run1"}'
    assert (
        exported().items()
        >= {
            f"slackring_rank_rounds{labels}": 2,
            f"slackring_rank_steps{labels}": 4,
            f"slackring_rank_samples{labels}": 128,
            f"slackring_rank_step_seconds{labels}": 0.3,
            f"slackring_rank_wait_share{labels}": 0.25,
            f"slackring_rank_loss{labels}": 0.5,
        }.items()
    )
    assert len(exported()) == 6 + 5  # rank 1 has reported no loss
    metrics.forget("run1", 0)
    assert len(exported()) == 5 and all('rank="1"' in name for name in exported())
    metrics.forget("run1", 1)
    metrics.forget("run1", 1)
    assert not exported()


def test_the_share_of_waiting_is_that_since_the_update_before():
    metrics.update("run1", 0, snapshot())
    metrics.update("run1", 0, {**snapshot(), "blocked": 3.4, "compute": 2.2})
    assert exported()['slackring_rank_wait_share{rank="0",run="run1"}'] == pytest.approx(0.75)
    metrics.forget("run1", 0)


def test_a_loss_that_is_no_number_is_left_out():
    metrics.update("run1", 0, snapshot(**{"reported.loss": "unknown"}))
    assert not any("loss" in name for name in exported())
    metrics.forget("run1", 0)


def test_without_prometheus_nothing_happens(monkeypatch):
    monkeypatch.setattr(metrics, "_gauges", None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics.update("run1", 0, snapshot())
    metrics.forget("run1", 0)


def test_a_dask_worker_shows_them():
    distributed = pytest.importorskip("distributed")

    def update(dask_worker):
        metrics.update("run1", 3, snapshot())
        return dask_worker.http_server.port

    def forget():
        metrics.forget("run1", 3)

    def scrape(port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
            return shown(page.read().decode())

    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        (port,) = client.run(update).values()
        assert scrape(port)['slackring_rank_steps{rank="3",run="run1"}'] == 4
        client.run(forget)
        assert not scrape(port)
