from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from tests.multirank.pool import Pool, RankFailure, job_name, processes_of_pools

hvd = pytest.importorskip("horovod.torch")
pytestmark = pytest.mark.parametrize("size", [2], indirect=True)


def who_am_i(greeting, *, mark):
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    return f"{greeting}{mark} {hvd.rank()} of {hvd.size()}", int(total), os.getpid()


def raise_on_rank_1():
    if hvd.rank() == 1:
        raise KeyError("the reason")
    return "fine"


def hang_on_rank_1():
    if hvd.rank() == 1:
        time.sleep(3600)


def die_on_rank_1():
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def cannot_be_pickled():
    return lambda: None


def test_results_come_by_rank_and_ranks_are_shared(ranks, size):
    first = ranks(2).run(who_am_i, "I am", mark=":")
    second = ranks(2).run(who_am_i, "I am", mark=":")
    assert [answer[:2] for answer in first] == [("I am: 0 of 2", 2), ("I am: 1 of 2", 2)]
    assert second == first, "the second job met other processes"


def test_a_failure_shows_the_traceback_and_the_next_test_gets_new_ranks(ranks, size):
    pool = ranks(2)
    with pytest.raises(RankFailure, match=r"failed on rank 1:(?s:.*)--- rank 1 of 2(?s:.*)KeyError: 'the reason'"):
        pool.run(raise_on_rank_1)
    assert not pool.processes()
    with pytest.raises(RankFailure, match="lambda"):
        ranks(2).run(cannot_be_pickled)
    assert ranks(2).run(who_am_i, "", mark="")[1][0] == " 1 of 2"


def test_a_hanging_rank_is_named_with_its_stack(ranks, size):
    pool = ranks(2)
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of 2 did not return within 1 s(?s:.*)in hang_on_rank_1"):
        pool.run(hang_on_rank_1, timeout=1.0)
    assert time.monotonic() - started < 20
    assert not pool.processes()


def test_a_dead_rank_is_named(ranks, size):
    pool = ranks(2)
    with pytest.raises(RankFailure, match="died with exit code -9"):
        pool.run(die_on_rank_1)
    assert not pool.alive
    assert not pool.processes()


def test_ranks_that_cannot_start_are_reported(size):
    with pytest.raises(RankFailure, match="did not start"):
        Pool(2, {"HOROVOD_GLOO_IFACE": "no_such_interface"})
    assert not processes_of_pools()


def test_only_top_level_functions_are_jobs(size):
    assert job_name(who_am_i) == ("tests.multirank.test_pool", "who_am_i")
    with pytest.raises(ValueError, match="top-level"):
        job_name(lambda: None)
