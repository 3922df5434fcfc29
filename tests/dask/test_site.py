"""What a worker keeps for its ranks: mailboxes that lose nothing, and who holds the worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from slackring.dask.answers import Answer, culprit
from slackring.dask.site import Mailbox, Site


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def box(loop: asyncio.AbstractEventLoop) -> Iterator[Mailbox]:
    made = Mailbox(loop)
    yield made
    made.close()


def test_what_was_not_received_is_given_again(loop: asyncio.AbstractEventLoop, box: Mailbox) -> None:
    for number in range(3):
        box.put({"kind": "log", "text": str(number)})
    events, following = loop.run_until_complete(box.read(0, 1.0))
    assert [event["text"] for event in events] == ["0", "1", "2"] and following == 3
    assert loop.run_until_complete(box.read(1, 1.0))[0] == events[1:]  # the answer was lost on its way
    assert loop.run_until_complete(box.read(3, 0.01)) == ([], 3)
    assert box.empty


def test_an_answer_is_bounded_and_the_rest_follows(loop: asyncio.AbstractEventLoop, box: Mailbox) -> None:
    for number in range(12):
        box.put({"kind": "result", "data": bytes([number]) * (1 << 19)})
    assert box.full
    got: list[dict[str, Any]] = []
    while not box.empty:
        events, _ = loop.run_until_complete(box.read(len(got), 0.01))
        assert len(events) <= 2
        got += events
    assert [event["data"][0] for event in got] == list(range(12))
    assert not box.full


def test_a_reader_is_woken_by_another_thread(loop: asyncio.AbstractEventLoop, box: Mailbox) -> None:
    threading.Timer(0.05, box.put, [{"kind": "started"}]).start()
    assert loop.run_until_complete(box.read(0, 30.0)) == ([{"kind": "started"}], 1)


def test_orders_come_in_order_and_ring_the_bell(box: Mailbox) -> None:
    assert list(box.orders()) == []
    box.order({"op": "call"})
    box.order({"op": "quit"})
    assert [order["op"] for order in box.orders()] == ["call", "quit"]
    assert list(box.orders()) == []


def test_a_worker_is_held_by_one_pool_at_a_time() -> None:
    worker = SimpleNamespace(handlers={}, extensions={}, id="worker-1")
    site = Site.of(worker)
    assert Site.of(worker) is site
    inside = threading.Event()
    held_by: list[str | None] = []

    def second() -> None:
        with site.held("b", lambda: True) as held:
            assert held
            held_by.append(site.holder)
            inside.set()

    with site.held("a", lambda: True) as held:
        assert held and site.holder == "a"
        thread = threading.Thread(target=second)
        thread.start()
        with site.held("c", lambda: False) as refused:  # no longer wanted
            assert not refused
        assert not inside.is_set()
    thread.join(10.0)
    assert held_by == ["b"] and site.holder is None


def test_who_is_to_blame_is_who_failed_by_itself() -> None:
    suffers = Answer(0, "raised", of_peers=True)
    died, done = Answer(3, "died"), Answer(1, "done")
    assert culprit([done]) is None
    assert culprit([suffers, done, died]) is died
    assert culprit([suffers, done]) is suffers
    assert culprit([Answer(2, "raised"), died]) == Answer(2, "raised")
