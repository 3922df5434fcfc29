"""The ring of ``torch.distributed``: the promises on it, its collectives, its errors, and torchrun."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.multirank.launchers import alone, torchrun
from tests.multirank.scripts import (
    batches,
    check_collectives,
    check_gpu,
    check_injected_network,
    check_that_a_killed_rank_is_an_error,
    check_that_waiting_sleeps,
    collectives,
    flat,
    make_model,
)
from tests.multirank.test_promises import SHARED, keep
from torch import nn

import slackring as sr
from slackring.errors import RingError
from slackring.ring.ambient import ring as ambient
from slackring.ring.torch import TorchRing

# One of each kind: what is left of the rules is the same code above the ring.
ON_TWO = (
    "bsp",
    "local_sgd:steps=3",
    "elastic_bsp",
    "losp:k_max=8,compensation=auto",
    "anytime:compute_time=0.003,staleness=auto,communication_time=0.005",
    "relaxed:steps=2,staleness=3,compensation=0.5,weighting=ranks",
)
ON_FOUR = ("bsp", "losp:k_max=8,compensation=0.75")
TIMEOUT = 5  # seconds, of the process group


def test_collectives(torch_ranks):
    check_collectives(torch_ranks(2))


@pytest.mark.parametrize("promise", SHARED)
@pytest.mark.parametrize("rule", ON_TWO)
def test_promise(torch_ranks, rule, promise):
    torch_ranks(2).run(keep, rule, promise)


def rounds_beside_the_users_own():
    """Three rounds of one name and two of another in flight, in different orders, beside sums on the default group."""
    ring = ambient()
    sums = {}

    def launch(name):
        sums[name] = ring.open(name), torch.full((3,), float(int(name[-1]) + ring.rank), dtype=torch.float64)
        flight, tensor = sums[name]
        flight.send(tensor)
        flight.seal()

    ones, others = ["one.0", "one.1", "one.2"], ["other.7", "other.8"]
    for name in ones + others if ring.rank == 0 else others + ones:
        launch(name)
    own = torch.full((3,), 1000.0, dtype=torch.float64)
    dist.all_reduce(own)
    for flight, _ in sums.values():
        flight.wait()
        assert flight.done()
    return own.tolist(), {name: float(tensor.unique()) for name, (_, tensor) in sums.items()}


def test_rounds_do_not_mix_with_each_other_or_the_users_own(torch_ranks):
    expected = {name: 2.0 * int(name[-1]) + 1 for name in ("one.0", "one.1", "one.2", "other.7", "other.8")}
    torch_ranks(2).run(collectives)  # both channels of this test are new, whatever ran before
    assert torch_ranks(2).run(warm_up, ["one.0", "other.0"]) == [None, None]
    assert torch_ranks(2).run(rounds_beside_the_users_own) == [([2000.0] * 3, expected)] * 2


def warm_up(names):
    for name in names:
        ambient().gather(b"", name)


def test_waiting_sleeps(torch_ranks):
    check_that_waiting_sleeps(torch_ranks(2))


def train(wrap, steps):
    """A script of DistributedDataParallel's, and the same one with a rule."""
    ring, model = ambient(), make_model(dtype=torch.float64)
    net = nn.parallel.DistributedDataParallel(model) if wrap == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if wrap != "ddp":
        optimizer = sr.DistributedOptimizer(optimizer, rule=wrap, named_parameters=model.named_parameters())
    for x, y in batches(ring.rank, steps, dtype=torch.float64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    if wrap != "ddp":
        optimizer.join()
    return flat(model)


def test_bsp_is_distributed_data_parallel(torch_ranks):
    ours, theirs = (torch_ranks(2).run(train, wrap, 10) for wrap in ("bsp", "ddp"))
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["local_sgd:steps=3", "cocod:steps=2", "relaxed:payload=gradient,steps=1,staleness=1"])
def test_the_virtual_ring_gives_the_same_model(torch_ranks, rule):
    real, virtual = torch_ranks(2).run(train, rule, 12), sr.VirtualCluster(2).run(train, rule, 12)
    assert torch.equal(real[0], real[1])
    assert torch.equal(real[0], virtual[0])


def test_injected_network(torch_ranks):
    check_injected_network(torch_ranks(2))


def groups_after(optimizers):
    """Process groups of this rank after as many optimizers have come and gone, and its threads."""
    counts = []
    for _ in range(optimizers):
        train("losp:k_max=4", 3)
        gc.collect()
        counts.append((len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))))
    return counts


def test_process_groups_go_with_their_optimizers(torch_ranks):
    for counts in torch_ranks(2).run(groups_after, 6):
        assert counts[-1] == counts[1], counts


def test_a_killed_rank_is_named_by_the_other(torch_ranks):
    check_that_a_killed_rank_is_an_error(torch_ranks(2), "because another rank died: rank 1 (process", within=10)


def stay_away(store):
    """What rank 0 is told that waits, in another default group, for a rank that is alive, but never enters."""
    rank, before = dist.get_rank(), ambient()
    dist.barrier()
    dist.destroy_process_group()
    group = {"rank": rank, "world_size": before.size, "timeout": timedelta(seconds=TIMEOUT)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **group)
    assert ambient() is not before
    sr.barrier()
    if rank == 1:
        time.sleep(TIMEOUT + 2)
        return None
    started = time.monotonic()
    with pytest.raises(RingError) as failure:
        sr.allreduce(torch.ones(1))
    return str(failure.value), time.monotonic() - started


def test_a_rank_that_stays_away_is_an_error_after_the_timeout_of_the_users_group(torch_ranks, tmp_path):
    pool = torch_ranks(2)
    message, seconds = pool.run(stay_away, tmp_path / "store")[0]
    pool.close()  # its default group is another one now
    assert message.startswith("rank 0: 'slackring.user' failed, most likely because another rank died: ")
    assert TIMEOUT - 1 < seconds < TIMEOUT + 2


def test_collectives_on_four_ranks(torch_ranks):
    check_collectives(torch_ranks(4))


@pytest.mark.parametrize("promise", SHARED)
@pytest.mark.parametrize("rule", ON_FOUR)
def test_promise_on_four_ranks(torch_ranks, rule, promise):
    torch_ranks(4).run(keep, rule, promise)


def test_a_killed_rank_is_named_by_all_three_others(torch_ranks):
    check_that_a_killed_rank_is_an_error(torch_ranks(4), "because another rank died: rank 3 (process", within=10)


def on_backend(backend, store, function, *args):
    """Call a function in a default group of another backend; `store` is a new file."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    return function(*args)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("backend", "size"), [("nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("gloo", 2)])
def test_a_gpu(pools, backend, size, tmp_path):
    """NCCL refuses two ranks on one GPU, so it is tried with one."""
    pool = pools(size, "torch")
    stores = itertools.count()
    try:
        check_gpu(pool, lambda *job: pool.run(on_backend, backend, tmp_path / f"store{next(stores)}", *job))
    finally:
        pool.close()


def test_torchrun_trains(tmp_path):
    options = ["--task", "digits", "--rule", "losp:k_max=8", "--samples", "20000", "--out", str(tmp_path), "--json"]
    done = torchrun(2, "-m", "slackring", "train", *options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["ring"], told["ranks"], told["rule"]) == ("torch", 2, "losp:k_max=8")
    assert told["final_accuracy"] > 0.8
    assert Path(told["run"]).parent == tmp_path
    assert [folder.name for folder in tmp_path.iterdir()] == [Path(told["run"]).name], "one rank writes the run"


END = """
import atexit, weakref, torch, torch.distributed as dist

x = torch.nn.Parameter(torch.zeros(4))
sgd = torch.optim.SGD([x], lr=0.1)  # the first one imports more of torch, which then holds a group that is there already
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = weakref.ref(dist.group.WORLD)
atexit.register(lambda: print(world() is None, own() is None))  # after what the ring does at the end

import slackring as sr

optimizer = sr.DistributedOptimizer(sgd, "local_sgd:steps=2")
for _ in range(3):
    x.grad = torch.ones(4)
    optimizer.step()
optimizer.join()
own = weakref.ref(optimizer._engine.ring._channels["slackring.0"])
dist.destroy_process_group()
print(world() is None)
"""


def test_no_thread_of_gloo_outlives_the_interpreter(tmp_path):
    """One aborts the process (torch 2.13) when it lets go of a tensor; a group ends its threads when nobody holds it."""
    (tmp_path / "end.py").write_text(END)
    done = alone(1, str(tmp_path / "end.py"))
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 3), done.stderr


def test_a_mistake_under_torchrun_is_told_once():
    done = torchrun(2, "-m", "slackring", "train", "--rule", "lsop")
    assert done.returncode != 0
    assert done.stderr.count("slackring: error:") == 1
    assert "there is no rule named 'lsop'" in done.stderr


def test_a_rank_that_has_not_called_init_does_not_train_alone(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RingError, match=r"torchrun started.*call torch.distributed.init_process_group\(\) first"):
        sr.ring()
    with pytest.raises(RingError, match=r"not initialised; call torch.distributed.init_process_group\(\) first"):
        TorchRing()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert sr.ring().size == 1
