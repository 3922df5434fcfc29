"""Training on what the sampler deals: each epoch is the data set once, on any rule, speeds, batch sizes and world size."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import slackring as sr
from slackring.errors import AgreementError, DataError

RULES = [
    "bsp",
    "bsp:accumulate=3",
    "local_sgd:steps=4",
    "losp",
    "cocod:steps=2",
    "relaxed:payload=gradient,staleness=2",
]
STRAGGLER = "persistent:ranks=0,factor=4"


@dataclass
class Report:
    """What one rank did: samples in local steps, by epoch."""

    trained: list[list[int]] = field(default_factory=list)
    steps: int = 0
    last_joiner: int = -1
    finished: list[float] = field(default_factory=list)
    model: list[float] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[tuple[list[float], dict[str, Any]]] = field(default_factory=list)


def numbers(length: int) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(length))


def make(rule: str) -> tuple[torch.nn.Parameter, sr.RelaxedOptimizer]:
    x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return x, sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.01, momentum=0.9), rule)


def step(x: torch.nn.Parameter, optimizer: sr.RelaxedOptimizer, samples: Sequence[int]) -> None:
    """A gradient that depends on the samples and on the model, so that another deal is another result."""
    optimizer.zero_grad()
    x.grad = x.detach() - torch.tensor([float(sum(samples)), float(len(samples))], dtype=torch.float64)
    optimizer.step(samples=len(samples))


def train(
    rule: str,
    length: int,
    batch_sizes: Sequence[int],
    *,
    epochs: int = 1,
    workers: int = 0,
    join: bool = True,
    stop_after: Sequence[int] | None = None,
    load: Callable[[int], dict[str, Any]] | None = None,
    load_optimizer: Callable[[int], tuple[list[float], dict[str, Any]]] | None = None,
    save_every_step: bool = False,
    budget: sr.Budget | None = None,
    straggler: str | None = None,
    network: sr.Network | None = None,
) -> list[Report]:
    def rank() -> Report:
        ring, report = sr.ring(), Report()
        x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.01, momentum=0.9), rule, budget=budget)
        data = numbers(length)
        sampler = sr.data.RoundSampler(
            data, batch_size=batch_sizes[ring.rank], optimizer=optimizer, seed=3, prefetch=2 * workers
        )
        if load is not None:
            sampler.load_state_dict(load(ring.rank))
        if load_optimizer is not None:
            values, state = load_optimizer(ring.rank)
            x.data.copy_(torch.tensor(values, dtype=torch.float64))
            optimizer.load_state_dict(state)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            report.trained.append([])
            for (batch,) in loader:
                step(x, optimizer, batch.tolist())
                report.trained[-1] += batch.tolist()
                report.steps += 1
                if save_every_step:
                    report.states.append(json.loads(json.dumps(sampler.state_dict())))
                    report.optimizers.append((x.tolist(), copy.deepcopy(optimizer.state_dict())))
                if optimizer.progress.stop or (stop_after is not None and report.steps == stop_after[ring.rank]):
                    break
            report.finished.append(ring.clock.now())
            if join:
                report.last_joiner = optimizer.join()
        if not join:
            optimizer.join()
        report.model = x.tolist()
        report.states.append(sampler.state_dict())
        return report

    return sr.VirtualCluster(len(batch_sizes), straggler=straggler, network=network).run(rank)


def union(reports: list[Report], epoch: int = 0) -> list[int]:
    return sorted(sample for report in reports for sample in report.trained[epoch])


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_each_epoch_is_the_data_set_once(rule: str, join: bool) -> None:
    """A straggler, uneven batches and a slow network; with and without joining between epochs."""
    reports = train(rule, 401, [4, 4, 7], epochs=3, join=join, straggler=STRAGGLER, network=sr.Network(latency=0.15))
    for epoch in range(3):
        assert union(reports, epoch) == list(range(401))
    assert reports[0].model == reports[1].model == reports[2].model
    assert [report.states[-1]["epoch"] for report in reports] == [3] * 3


@pytest.mark.parametrize("rule", ["losp", "losp:k_max=8", "osp"])
def test_a_straggler_gets_fewer_samples_and_ends_with_the_others(rule: str) -> None:
    reports = train(rule, 2000, [4] * 4, epochs=2, straggler=STRAGGLER)
    for epoch in range(2):
        shares = [len(report.trained[epoch]) for report in reports]
        assert shares[0] < 0.4 * min(shares[1:])
    ends = [report.finished[-1] for report in reports]
    # That fast ranks only helped in the last rounds of an epoch says nothing of their speed in the next.
    steps = [sum(column) for column in zip(*reports[0].states[-1]["history"], strict=True)]
    assert steps[0] < 0.4 * min(steps[1:])
    assert max(ends) - min(ends) < 4 * 0.4  # at most four of the straggler's steps


@pytest.mark.parametrize("rule", ["bsp", "local_sgd:steps=4"])
def test_with_fixed_windows_all_ranks_get_as_much_and_a_run_is_the_same_every_time(rule: str) -> None:
    """Nobody is faster in a rule in which all wait for the straggler."""
    slow, even = train(rule, 400, [4] * 4, straggler=STRAGGLER), train(rule, 400, [4] * 4)
    assert [len(report.trained[0]) for report in slow] == [100] * 4
    assert [report.trained for report in slow] == [report.trained for report in even]


def test_horovod_elastic_sampler_loses_no_sample_after_uneven_batches() -> None:
    """https://github.com/horovod/horovod/blob/master/horovod/torch/elastic/sampler.py: 4 and 2 of 12 done, the other 6 follow.

    Horovod counts what one rank did for all ranks, and never trains on samples 5 and 7.
    """
    first = train("losp", 12, [4, 2], stop_after=[1, 1])
    assert [len(report.trained[0]) for report in first] == [4, 2]
    state = first[0].states[-1]
    for batch_sizes in ([2], [4, 2], [2, 2, 2]):
        rest = train("losp", 12, batch_sizes, load=lambda rank: state)
        assert sorted(union(first) + union(rest)) == list(range(12))


def test_horovod_832_ranks_with_uneven_work_complete() -> None:
    """https://github.com/horovod/horovod/issues/832: 210 samples, 20 epochs: 21 batches do not divide by two ranks."""
    reports = train("bsp", 210, [10, 10], epochs=20)
    for epoch in range(20):
        assert union(reports, epoch) == list(range(210))
    assert sorted(report.steps for report in reports) == [200, 220]


def test_horovod_1060_batch_sizes_differ_by_rank() -> None:
    """https://github.com/horovod/horovod/issues/1060: of 480 samples, batches of 1, 3 and 8 get 40, 120 and 320."""
    reports = train("bsp", 480, [1, 3, 8])
    assert [len(report.trained[0]) for report in reports] == [40, 120, 320]


def test_horovod_2958_join_returns_the_last_rank() -> None:
    """https://github.com/horovod/horovod/issues/2958: the one that was dealt the odd batch."""
    reports = train("bsp", 210, [10, 10])
    last = max((0, 1), key=lambda rank: reports[rank].steps)
    assert [report.last_joiner for report in reports] == [last] * 2


@pytest.mark.parametrize("rule", ["bsp", "losp"])
def test_horovod_3399_nothing_comes_again_after_a_graceful_leave(rule: str) -> None:
    """https://github.com/horovod/horovod/issues/3399: three ranks stop at any time, two go on, then four: 0..99 once."""
    first = train(rule, 100, [2] * 3, budget=sr.Budget(samples=37), straggler=STRAGGLER)
    state = first[0].states[-1]
    assert all(report.states[-1] == state for report in first)
    second = train(rule, 100, [2] * 2, budget=sr.Budget(samples=20), load=lambda rank: state)
    third = train(rule, 100, [2] * 4, load=lambda rank: second[1].states[-1])
    assert sorted(union(first) + union(second) + union(third)) == list(range(100))
    assert 37 <= len(union(first)) < 60


@pytest.mark.parametrize("rule", ["bsp", "losp"])
def test_horovod_2844_the_epoch_is_right_after_each_change_of_size(rule: str) -> None:
    """https://github.com/horovod/horovod/issues/2844: 4 and 5 ranks share epoch 0, 7 and 8 epoch 1, and 2 is next."""
    state: dict[str, Any] = {}
    epochs, trained = [], []
    for size, samples in ((4, 40), (5, None), (7, 60), (8, None)):
        reports = train(
            rule,
            100,
            [2] * size,
            epochs=state.get("epoch", 0) + 1,
            budget=sr.Budget(samples=samples) if samples else None,
            load=(lambda rank, state=state: state) if state else None,
        )
        state = reports[0].states[-1]
        assert all(report.states[-1] == state for report in reports)
        epochs.append(state["epoch"])
        trained.append(union(reports))
    assert epochs == [0, 1, 1, 2]
    assert sorted(trained[0] + trained[1]) == sorted(trained[2] + trained[3]) == list(range(100))


@pytest.mark.parametrize("rule", ["bsp", "losp", "local_sgd:steps=4"])
def test_horovod_3143_what_a_lost_rank_had_not_landed_is_left(rule: str) -> None:
    """https://github.com/horovod/horovod/issues/3143: rank 0's state in mid-epoch: the anchor's samples are done, others left."""
    reports = train(rule, 120, [2] * 3, save_every_step=True, straggler=STRAGGLER)
    for taken in (4, 9):
        state = reports[0].states[taken]
        landed = 120 - sr.data.Dealer.from_state_dict(state, sr.data.Windows()).remainder().samples
        rest = train(rule, 120, [2] * 2, load=lambda rank, state=state: state)
        assert len(union(rest)) == len(set(union(rest))) == 120 - landed
        assert 0 < landed < 120


@pytest.mark.parametrize("rule", RULES)
def test_all_ranks_own_states_go_on_to_the_bit(rule: str) -> None:
    """Saved after any step, with open windows and rounds in flight, and loaded with the optimizer's states."""
    whole = train(rule, 60, [2, 3], epochs=2, save_every_step=True)
    fixed = rule != "losp"  # when the ring is free depends on the clock, which starts anew
    for taken in (1, 4, 8):
        rest = train(
            rule,
            60,
            [2, 3],
            epochs=2,
            load=lambda rank, taken=taken: whole[rank].states[taken - 1],
            load_optimizer=lambda rank, taken=taken: whole[rank].optimizers[taken - 1],
        )
        done = [report.trained[0][: taken * size] for report, size in zip(whole, (2, 3), strict=True)]
        assert sorted(sum(done, union(rest))) == list(range(60))
        assert union(rest, 1) == list(range(60))
        if fixed:
            assert [d + report.trained[0] for d, report in zip(done, rest, strict=True)] == [
                report.trained[0] for report in whole
            ]
            assert rest[0].model == whole[0].model


def test_own_states_with_other_batch_sizes_go_on_once_all_has_landed() -> None:
    """What was in flight lands first, and counts; then all is dealt anew."""
    whole = train("local_sgd:steps=4", 60, [2, 3], save_every_step=True)
    rest = train(
        "local_sgd:steps=4",
        60,
        [5, 1],
        load=lambda rank: whole[rank].states[5],
        load_optimizer=lambda rank: whole[rank].optimizers[5],
    )
    done = [report.trained[0][: 6 * size] for report, size in zip(whole, (2, 3), strict=True)]
    assert sorted(sum(done, union(rest))) == list(range(60))


def test_rounds_in_which_a_rank_only_helps_tell_no_speed() -> None:
    reports = train("losp", 300, [2, 2], stop_after=[40, 3])
    history = reports[0].states[-1]["history"]
    assert history and all(steps[1] > 0 for steps in history)


def test_ranks_that_choose_different_epochs_are_refused() -> None:
    def rank() -> None:
        x, optimizer = make("bsp")
        sampler = sr.data.RoundSampler(range(8), 2, optimizer)
        for epoch in (0, 5 + sr.ring().rank):
            sampler.set_epoch(epoch)
            for samples in sampler:
                step(x, optimizer, samples)

    with pytest.raises(AgreementError, match="RoundSampler's epoch"):
        sr.VirtualCluster(2).run(rank)


def test_leaving_the_loop_early_goes_on_with_what_is_left() -> None:
    def rank() -> list[list[int]]:
        x, optimizer = make("losp")
        sampler = sr.data.RoundSampler(range(50), batch_size=3, optimizer=optimizer)
        turns = []
        for limit in (2, 4, 99):
            turns.append([])
            for number, samples in enumerate(sampler, 1):
                step(x, optimizer, samples)
                turns[-1] += samples
                if number == limit:
                    break
            assert sampler.epoch == 0
            optimizer.join()
        assert sampler.epoch == 1
        return turns

    results = sr.VirtualCluster(2).run(rank)
    assert sorted(sample for turns in results for turn in turns for sample in turn) == list(range(50))


def test_more_ranks_than_samples() -> None:
    """Ranks without a batch go on to the next epoch with the others."""
    for join in (True, False):
        reports = train("losp", 3, [2] * 4, epochs=3, join=join)
        for epoch in range(3):
            assert union(reports, epoch) == [0, 1, 2]


def test_a_rank_that_becomes_faster_sits_out_until_it_is_dealt_more() -> None:
    """A slow network makes long windows, which nobody can know at first."""
    reports = train("losp", 1000, [2] * 2, network=sr.Network(latency=2.0))
    assert union(reports) == list(range(1000))
    assert [len(report.trained[0]) for report in reports] == pytest.approx([500, 500], abs=8)


@settings(max_examples=60, print_blob=True)
@given(
    rule=st.sampled_from(RULES),
    length=st.integers(1, 150),
    batch_sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    join=st.booleans(),
    seed=st.integers(0, 2**32),
    latency=st.sampled_from([0.0, 0.03, 0.7]),
    leave=st.integers(1, 20),
)
def test_any_interleaving(
    rule: str, length: int, batch_sizes: list[int], join: bool, seed: int, latency: float, leave: int
) -> None:
    """Step times drawn anew at every step, an epoch that is left early, and the rest on other ranks."""
    straggler, network = f"shifted_exponential:mean=2,shift=0.1,seed={seed}", sr.Network(latency=latency)
    reports = train(rule, length, batch_sizes, epochs=2, join=join, straggler=straggler, network=network)
    for epoch in range(2):
        assert union(reports, epoch) == list(range(length))
    first = train(rule, length, batch_sizes, stop_after=[leave + rank for rank in range(4)], straggler=straggler)
    state = first[0].states[-1]
    if state["epoch"] == 0:
        rest = train(rule, length, [*batch_sizes[::-1], 2], load=lambda rank: state, network=network)
        assert sorted(union(first) + union(rest)) == list(range(length))
    else:
        assert union(first) == list(range(length))


@pytest.mark.parametrize("rule", ["bsp", "losp"])
def test_loader_workers_take_batches_ahead(rule: str) -> None:
    reports = train(rule, 120, [4, 4], epochs=2, workers=2, straggler=STRAGGLER)
    for epoch in range(2):
        assert union(reports, epoch) == list(range(120))


def test_a_loader_that_runs_ahead_unannounced_is_refused() -> None:
    def rank() -> None:
        _, optimizer = make("bsp")
        batches = iter(sr.data.RoundSampler(range(50), batch_size=3, optimizer=optimizer))
        next(batches)
        next(batches)

    with pytest.raises(DataError, match=r"1 batches ahead.*prefetch=0"):
        sr.VirtualCluster(1).run(rank)


def test_more_steps_than_batches_are_refused() -> None:
    x, optimizer = make("bsp")
    for samples in sr.data.RoundSampler(range(50), batch_size=3, optimizer=optimizer):
        step(x, optimizer, samples)
        with pytest.raises(DataError, match="one step for each batch"):
            step(x, optimizer, samples)
        break


def test_two_loaders_at_a_time_are_refused() -> None:
    _, optimizer = make("losp")
    sampler = sr.data.RoundSampler(range(50), batch_size=3, optimizer=optimizer)
    first, second = iter(sampler), iter(sampler)
    next(first), next(second)
    with pytest.raises(DataError, match="one loader at a time"):
        next(first)


@pytest.mark.parametrize("what", ["seed", "length"])
def test_ranks_that_would_deal_differently_are_refused(what: str) -> None:
    def rank() -> None:
        mine = sr.ring().rank
        _, optimizer = make("bsp")
        data = range(50 + mine) if what == "length" else range(50)
        next(iter(sr.data.RoundSampler(data, 3, optimizer, seed=mine if what == "seed" else 0)))

    with pytest.raises(AgreementError, match=f"RoundSampler's {what}"):
        sr.VirtualCluster(2).run(rank)


def test_what_cannot_be_is_refused() -> None:
    x, optimizer = make("bsp")
    for wrong in ({"batch_size": 0}, {"seed": -1}, {"prefetch": -1}, {"dataset": []}):
        with pytest.raises(DataError):
            sr.data.RoundSampler(**{"dataset": range(9), "batch_size": 1, "optimizer": optimizer, **wrong})
    with pytest.raises(DataError, match="DistributedOptimizer"):
        sr.data.RoundSampler(range(9), 1, torch.optim.SGD([x], lr=0.1))
    sampler = sr.data.RoundSampler(range(9), 1, optimizer)
    with pytest.raises(DataError, match="epoch"):
        sampler.set_epoch(-1)
    other = sr.data.RoundSampler(range(10), 1, optimizer).state_dict()
    with pytest.raises(DataError, match="10 samples"):
        sampler.load_state_dict(other)
    with pytest.raises(DataError, match="no state"):
        sampler.load_state_dict({})


def test_a_chosen_epoch_is_the_same_every_time() -> None:
    def epochs(*chosen: int) -> list[list[int]]:
        x, optimizer = make("bsp")
        sampler, found = sr.data.RoundSampler(range(20), 6, optimizer), []
        for epoch in chosen:
            sampler.set_epoch(epoch)
            assert sampler.epoch == sampler.state_dict()["epoch"] == epoch
            found.append([])
            for samples in sampler:
                step(x, optimizer, samples)
                found[-1] += samples
        return found

    first = epochs(0, 1, 5, 1)
    assert first[1] == first[3] != first[0]
    assert epochs(5) == [first[2]]
