"""Optimizers over some of the ranks: Horovod's process sets, and groups of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from functools import partial

import pytest
import torch
from tests.multirank.scripts import flat, make_model
from torch import nn

import slackring as sr
from slackring.errors import UnsupportedError

HALVES = ([0, 1], [2, 3])
OVERLAPPING = ([0, 1, 2], [1, 2, 3])


@pytest.fixture(scope="module", params=["horovod_sets", "torch"])
def four_ranks(request, pools):
    """Give the pool of four ranks of a library."""
    if request.param != "torch":
        pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")
    return partial(pools, 4, request.param)


@contextlib.contextmanager
def sets_of(*ranks):
    """Process sets of the library that this rank belongs to."""
    kind = sr.ring().kind
    if kind == "horovod":
        import horovod.torch as hvd

        sets = [hvd.add_process_set(some) for some in ranks]
        yield sets
        for each in sets:
            hvd.remove_process_set(each)
    else:
        import torch.distributed as dist

        sets = [dist.new_group(some) for some in ranks]
        yield sets
        for each in sets:
            dist.destroy_process_group(each)


def train(rule, steps, seed, process_set=None, seconds=0.0):
    """Train a model on this rank's data; the second rank gets one sample more a step, and may be slower."""
    ring = sr.ring(process_set)
    model = make_model(seed, torch.float64)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = sr.DistributedOptimizer(plain, rule, process_set=process_set)
    generator = torch.Generator().manual_seed(100 * seed + ring.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4 + ring.rank, 8, generator=generator, dtype=torch.float64)
        nn.functional.cross_entropy(model(x), x.sum(1).gt(0).long()).backward()
        time.sleep(seconds * ring.rank)
        optimizer.step(samples=len(x))
    optimizer.join()
    return flat(model), optimizer.progress.rounds, optimizer.progress.samples


def train_in_halves(rules):
    """The second half is slower, takes more steps, and follows another rule on another model."""
    with sets_of(*HALVES) as sets:
        half = sr.ring().rank // 2
        return train(rules[half], (9, 14)[half], half, sets[half], 0.004 * half)


def same(one, two, tolerance=0.0):
    torch.testing.assert_close(one[0], two[0], rtol=tolerance, atol=tolerance)
    assert one[1:] == two[1:]


@pytest.mark.parametrize("rules", [("cocod:steps=2", "bsp"), ("bsp:accumulate=2", "local_sgd:steps=3")])
def test_a_set_trains_as_if_there_were_no_other_ranks(four_ranks, rules):
    """To the bit, since two summands have one order."""
    found = four_ranks().run(train_in_halves, rules)
    for half in range(2):
        alone = sr.VirtualCluster(2).run(train, rules[half], (9, 14)[half], half)
        for place, rank in enumerate(HALVES[half]):
            same(found[rank], alone[place])
    assert not torch.equal(found[0][0], found[2][0])


def test_sets_that_take_rounds_by_the_clock(four_ranks):
    found = four_ranks().run(train_in_halves, ("losp:k_max=4", "osp:k_max=3"))
    same(found[0], found[1])
    same(found[2], found[3])
    assert [samples for _, _, samples in found] == [9 * (4 + 5)] * 2 + [14 * (4 + 5)] * 2
    assert not torch.equal(found[0][0], found[2][0])


def train_in_overlapping_sets():
    """Ranks 1 and 2 train two models, whose rounds have the same names in both sets."""
    with sets_of(*OVERLAPPING) as sets:
        mine = [place for place, ranks in enumerate(OVERLAPPING) if sr.ring().rank in ranks]
        return {place: train(("local_sgd:steps=2", "bsp")[place], 6, place, sets[place]) for place in mine}


def test_a_rank_can_be_in_several_sets(four_ranks):
    found = four_ranks().run(train_in_overlapping_sets)
    for place, ranks in enumerate(OVERLAPPING):
        alone = sr.VirtualCluster(3).run(train, ("local_sgd:steps=2", "bsp")[place], 6, place)
        for rank in ranks:
            same(found[rank][place], found[ranks[0]][place])
            same(found[rank][place], alone[0], tolerance=1e-12)


def train_together(steps):
    """One model of all ranks and one of this rank's half, in turn in one loop; a metric of the half's, then one of all."""
    with sets_of(*HALVES) as sets:
        rank, half = sr.ring().rank, sr.ring().rank // 2
        shared, own = make_model(dtype=torch.float64), make_model(1 + half, torch.float64)
        optimizers = [
            sr.DistributedOptimizer(torch.optim.SGD(shared.parameters(), lr=0.1), "bsp"),
            sr.DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=0.1), "losp:k_max=2", process_set=sets[half]),
        ]
        told = []
        for step in range(steps):
            for model, optimizer in zip((shared, own), optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.full((2, 8), float(rank + step), dtype=torch.float64)).square().mean().backward()
                time.sleep(0.001 * rank)
                optimizer.step(samples=2)
            if step == steps // 2:
                told.append(sr.ring(sets[half]).allreduce(torch.tensor([1.0 + rank])).item())
                told.append(optimizers[1].progress.steps)
        told.append(sr.allreduce(torch.tensor([1.0 + rank])).item())
        told.append(optimizers[1].progress.steps)
        for optimizer in optimizers:
            optimizer.join()
        return flat(shared), flat(own), told


def test_an_optimizer_of_all_ranks_and_one_of_a_set(four_ranks):
    found = four_ranks().run(train_together, 8)
    for rank, (shared, own, told) in enumerate(found):
        assert torch.equal(shared, found[0][0])
        assert torch.equal(own, found[rank // 2 * 2][1])
        # All five steps of both ranks of the half have landed when its metric comes back, then all eight.
        assert told == [(1.5, 3.5)[rank // 2], 2 * 5, 2.5, 2 * 8]
    assert not torch.equal(found[0][1], found[2][1])


def collectives_of_a_half():
    with sets_of(*HALVES) as sets:
        rank, half = sr.ring().rank, sr.ring().rank // 2
        ring = sr.ring(sets[half])
        assert ring is sr.ring(sets[half])
        assert ring is not sr.ring()
        ring.barrier()
        received = ring.broadcast(torch.tensor([float(rank)]), root=1).item()
        with pytest.raises(UnsupportedError, match="root=2 is no rank of this ring; its ranks are 0 to 1"):
            ring.broadcast(torch.ones(1), root=2)
        gathered = ring.gather(bytes([65 + rank]) * (1 + rank), "mine.0")
        total = ring.allreduce(torch.tensor([rank]), average=False).item()
        gone = weakref.ref(ring)
    del ring, sets
    gc.collect()
    return (rank % 2, 2), received, gathered, total, gone() is None


def test_collectives_of_a_set(four_ranks):
    found = four_ranks().run(collectives_of_a_half)
    for rank, ((place, size), received, gathered, total, gone) in enumerate(found):
        ranks = HALVES[rank // 2]
        assert (place, size) == (rank % 2, 2)
        assert received == ranks[1]
        assert gathered == [bytes([65 + each]) * (1 + each) for each in ranks]
        assert total == sum(ranks)
        assert gone, "a set that is gone is kept alive"


def refusals():
    """What a rank is told that builds an optimizer over what is no set of its own."""
    told = []

    def build(process_set, **options):
        with pytest.raises(UnsupportedError) as caught:
            sr.DistributedOptimizer(
                torch.optim.SGD(make_model().parameters(), lr=0.1), "bsp", process_set=process_set, **options
            )
        told.append(str(caught.value))

    with sets_of(*HALVES) as sets:
        build(sets[1 - sr.ring().rank // 2])
        build([0, 1])
        build(sets[sr.ring().rank // 2], ring=sr.ring())
        kept = sets[sr.ring().rank // 2]
    build(kept)
    return sr.ring().kind, told


def test_what_is_no_set_of_this_rank_is_refused(four_ranks):
    for rank, (kind, (other, wrong, both, gone)) in enumerate(four_ranks().run(refusals)):
        if kind == "horovod":
            assert other == (
                f"rank {rank} is not in this process set {HALVES[1 - rank // 2]}; build the optimizer only on its ranks."
            )
            assert wrong == "process_set= is an hvd.ProcessSet under Horovod, not list."
            assert gone.startswith(f"Horovod does not know this process set {HALVES[rank // 2]}; name it in hvd.init(")
        else:
            assert other == f"rank {rank} is not in this process group; build the optimizer only on the group's ranks."
            assert wrong == "process_set= is a torch.distributed.ProcessGroup under torch.distributed, not list."
            assert gone == "this process group has been destroyed; make one with new_group()."
        assert both == "process_set= chooses among the ranks of the ambient ring; leave ring= out."


def the_whole_set():
    if sr.ring().kind == "horovod":
        import horovod.torch as hvd

        return sr.ring(hvd.global_process_set) is sr.ring()
    import torch.distributed as dist

    return sr.ring(dist.group.WORLD) is sr.ring()


def test_the_set_of_all_ranks_is_the_ambient_ring(four_ranks):
    assert four_ranks().run(the_whole_set) == [True] * 4
