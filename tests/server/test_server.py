"""The parameter server with real gradients: hand-computed traces, plain optimizers, the ring, and what ends a run."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import slackring as sr
from slackring.errors import DivergedError, RuleError, SpecError, StragglerError
from slackring.server import POLICIES

STRAGGLER = "persistent:ranks=2+3,factor=1.3+4"


def batches_of(workers, count, size=4, seed=0):
    """Mini-batches by worker, of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(size + worker, 3, generator=generator), torch.randn(size + worker, 2, generator=generator))
         for _ in range(count)]
        for worker in range(workers)
    ]  # fmt: skip


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sgd(model, lr=0.05, momentum=0.0):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def served(policy, batches, *, momentum=0.0, budget=None, on_update=None, **cluster):
    model = model_of()
    server = sr.ParameterServer(len(batches), **cluster)
    told = {} if on_update is None else {"on_update": on_update}
    run = server.run(policy, model, sgd(model, momentum=momentum), mse_loss, batches, budget=budget, **told)
    return run, model


# -- equal to what it must equal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_is_the_plain_optimizer_to_the_bit(policy):
    batches = batches_of(1, 9)
    run, model = served(policy, batches, momentum=0.9)
    plain = model_of()
    optimizer = sgd(plain, momentum=0.9)
    for x, y in batches[0]:
        optimizer.zero_grad()
        mse_loss(plain(x), y).backward()
        optimizer.step()
    assert torch.equal(weights(model), weights(plain))
    assert {push.staleness for push in run.pushes} == {0}
    assert run.updates == run.progress.steps == 9


def test_bsp_is_the_plain_optimizer_on_the_union_batch():
    batches = batches_of(4, 6)
    run, model = served("bsp", batches, momentum=0.9, straggler=STRAGGLER)
    plain = model_of()
    optimizer = sgd(plain, momentum=0.9)
    for parts in zip(*batches, strict=True):
        optimizer.zero_grad()
        mse_loss(plain(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(plain))
    assert run.updates == run.progress.rounds == 6
    assert {push.staleness for push in run.pushes} == {0}


def test_bsp_is_bsp_on_the_virtual_ring():
    batches = batches_of(4, 6)
    run, model = served("bsp", batches, momentum=0.9, straggler=STRAGGLER)

    def train():
        ring, replica = sr.ring(), model_of()
        optimizer = sr.DistributedOptimizer(sgd(replica, momentum=0.9), rule="bsp")
        for x, y in batches[ring.rank]:
            optimizer.set_samples(len(y))
            optimizer.zero_grad()
            mse_loss(replica(x), y).backward()
            optimizer.step(samples=len(y))
        optimizer.join()
        return weights(replica), ring.clock.now()

    on_ring = sr.VirtualCluster(4, straggler=STRAGGLER).run(train)
    torch.testing.assert_close(weights(model), on_ring[0][0])
    assert max(push.received for push in run.pushes) == pytest.approx(on_ring[0][1])


def test_random_streams_belong_to_the_worker_as_on_the_virtual_ring():
    def draws(size):
        for _ in range(3):
            drawn.append((torch.rand(1).item(), np.random.random(), random.random()))
            yield torch.zeros(1, 3), torch.zeros(1, 2)

    drawn = []
    served("asp", [draws(0), draws(1)], straggler="persistent:ranks=1,factor=2.5", seed=7)

    def rank():
        return [(torch.rand(1).item(), np.random.random(), random.random()) for _ in range(3)]

    one, two = sr.VirtualCluster(2, seed=7).run(rank)
    assert drawn == [one[0], two[0], one[1], one[2], two[1], two[2]]


def test_gradients_that_arrive_together_are_as_good_as_one_after_the_other():
    together, model = served("asp", batches_of(2, 1))
    apart, other = served("asp", batches_of(2, 1), straggler="constant:ranks=1,seconds=1e-9")
    assert (together.updates, apart.updates) == (1, 2)
    torch.testing.assert_close(weights(model), weights(other))


# -- traces by hand --------------------------------------------------------------------------------------------------------


def test_asp_is_stale_by_what_others_pushed_meanwhile():
    """Worker 1 takes 2.5 steps of worker 0: pushes at 1, 2, 2.5, 3, 4, 5 (both), ..."""
    run, _ = served("asp", batches_of(2, 5), step_time=1.0, straggler="persistent:ranks=1,factor=2.5")
    seen = [(push.worker, push.arrived, push.staleness, push.lead) for push in run.pushes[:7]]
    assert seen == [
        (0, 1.0, 0, 1),
        (0, 2.0, 0, 2),
        (1, 2.5, 2, 0),
        (0, 3.0, 1, 2),
        (0, 4.0, 0, 3),
        (0, 5.0, 0, 3),
        (1, 5.0, 2, 0),
    ]
    assert [push.round for push in run.pushes[:7]] == [0, 1, 2, 3, 4, 5, 5]
    assert {push.answered - push.arrived for push in run.pushes} == {0.0}


def test_a_delayed_gradient_is_applied_to_the_newer_weights():
    """Worker 1's gradient is of the first weights, and meets those after two updates of worker 0."""
    batches = batches_of(2, 2)
    _, model = served("asp", [batches[0], batches[1][:1]], straggler="persistent:ranks=1,factor=2.5")
    plain, first = model_of(), model_of()
    optimizer = sgd(plain)
    for (x, y), at in ((batches[0][0], plain), (batches[0][1], plain), (batches[1][0], first)):
        gradient = torch.autograd.grad(mse_loss(at(x), y), list(at.parameters()))
        for parameter, one in zip(plain.parameters(), gradient, strict=True):
            parameter.grad = one
        optimizer.step()
    assert torch.equal(weights(model), weights(plain))


def test_ssp_holds_the_fast_worker_until_the_slow_one_pushes():
    run, _ = served("ssp:staleness=1", batches_of(2, 3), step_time=1.0, straggler="persistent:ranks=1,factor=4")
    seen = [(push.worker, push.arrived, push.answered, push.lead) for push in run.pushes]
    # At 4, worker 0 begins its third and last step; once it has left, worker 1 is the slowest itself.
    assert seen == [
        (0, 1.0, 1.0, 1),
        (0, 2.0, 4.0, 2),
        (1, 4.0, 4.0, 0),
        (0, 5.0, 8.0, 2),
        (1, 8.0, 8.0, 0),
        (1, 12.0, 12.0, 0),
    ]


def test_elastic_bsp_applies_pushes_inside_a_superstep_and_pools_the_last_ones():
    """Section 4: 100, 100, 200, 200 take 6, 6, 3 and 3 steps a superstep, and nobody waits."""
    run, _ = served(
        "elastic_bsp", batches_of(4, 12), straggler="persistent:ranks=2+3,factor=2", budget=sr.Budget(seconds=0.6)
    )
    assert [sum(push.worker == worker for push in run.pushes) for worker in range(4)] == [6, 6, 3, 3]
    assert {push.answered - push.arrived for push in run.pushes} == {0.0}
    # Five moments with asynchronous pushes, summed as they arrive, and one barrier.
    assert run.updates == run.progress.rounds == 6
    assert [push.staleness for push in run.pushes if push.answered == pytest.approx(0.6)] == [0, 0, 1, 1]


def test_messages_cost_latency_and_queue_for_the_servers_link():
    model = model_of()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    network = sr.Network(latency=0.5, bandwidth=nbytes / 2.0)
    run, _ = served("bsp", batches_of(2, 2), step_time=1.0, network=network)
    first, second = run.pushes[:2]
    # Both send at 1; the second push queues behind the first, and so do the answers.
    assert (first.sent, first.arrived, first.answered, first.received) == (1.0, 3.5, 5.5, 8.0)
    assert (second.sent, second.arrived, second.answered, second.received) == (1.0, 5.5, 5.5, 10.0)
    assert [push.started for push in run.pushes[2:]] == [8.0, 10.0]


# -- for all policies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_is_the_same_every_time(policy):
    (first, model), (again, twin) = (
        served(policy, batches_of(3, 8), straggler="shifted_exponential:mean=0.5", network="latency=0.01", seed=5)
        for _ in range(2)
    )
    assert first == again
    assert torch.equal(weights(model), weights(twin))


def test_a_run_leaves_the_callers_random_streams_and_threads_alone():
    model, batches = model_of(), batches_of(2, 3)
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    sr.ParameterServer(2).run("asp", model, sgd(model), mse_loss, batches)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads()) == before[1:]


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 2**16))
def test_every_gradient_is_applied_once_and_workers_without_data_hold_nobody_up(policy, counts, seed):
    batches = [batches_of(1, count, seed=seed)[0] for count in counts]
    run, _ = served(policy, batches, straggler="shifted_exponential:mean=1", seed=seed)
    assert [sum(push.worker == worker for push in run.pushes) for worker in range(len(counts))] == counts
    assert run.progress.steps == sum(counts)
    assert run.progress.samples == sum(push.samples for push in run.pushes)
    for push in run.pushes:
        assert push.started < push.sent <= push.arrived <= push.answered <= push.received
        assert 0 <= push.staleness < max(run.updates, 1)
    by_round = {}
    for push in run.pushes:
        by_round.setdefault(push.round, set()).add(push.answered)
    assert sorted(by_round) == list(range(run.progress.rounds))
    assert all(len(moments) == 1 for moments in by_round.values())


@hypothesis_settings(max_examples=25)
@given(st.integers(0, 2**16), st.integers(0, 3), st.integers(0, 5))
def test_bounds_hold_in_a_run(seed, lower, extra):
    cluster = {"straggler": "shifted_exponential:mean=2", "network": "latency=0.05", "seed": seed}
    ssp, _ = served(f"ssp:staleness={lower}", batches_of(3, 10), **cluster)
    assert max(push.lead for push in ssp.pushes) <= lower + 1
    # So nobody can have missed more updates than the others may push meanwhile.
    assert max(push.staleness for push in ssp.pushes) <= 2 * (2 * lower + 1)
    dssp, _ = served(f"dssp:lower={lower},upper={lower + extra}", batches_of(3, 10), **cluster)
    assert max(push.lead for push in dssp.pushes) <= lower + extra + 1


# -- what ends a run -------------------------------------------------------------------------------------------------------


def endless(worker):
    while True:
        yield batches_of(1, 1, seed=worker)[0][0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [sr.Budget(seconds=2.0), sr.Budget(samples=100), sr.Budget(rounds=20)], ids=str)
def test_a_budget_ends_training_and_what_is_on_its_way_still_arrives(policy, budget):
    told = []
    run, _ = served(
        policy,
        [endless(worker) for worker in range(4)],
        straggler=STRAGGLER,
        budget=budget,
        on_update=lambda seconds, progress: told.append((seconds, progress.steps)) and None,
    )
    ended = run.pushes[-1].answered
    if budget.seconds is not None:
        assert 2.0 <= ended <= 2.4
        assert max(push.started for push in run.pushes) < 2.0
    if budget.samples is not None:
        assert 100 <= run.progress.samples <= 100 + 8 * 4
    if budget.rounds is not None:
        assert 20 <= run.progress.rounds <= 20 + 4
    assert run.progress.stop
    assert len(told) == run.updates
    assert told[-1][1] == run.progress.steps == len(run.pushes)


def test_bsp_takes_exactly_the_rounds_it_was_given():
    run, _ = served("bsp", [endless(worker) for worker in range(3)], budget=sr.Budget(rounds=7))
    assert (run.progress.rounds, run.updates, run.progress.steps) == (7, 7, 21)


def test_whoever_watches_may_end_it():
    run, _ = served("asp", [endless(0), endless(1)], on_update=lambda seconds, progress: seconds >= 0.5)
    assert run.pushes[-1].answered == 0.5


def test_a_loss_that_is_no_number_ends_it_with_worker_and_step():
    batches = batches_of(2, 3)
    batches[1][2] = (batches[1][2][0] * float("nan"), batches[1][2][1])
    with pytest.raises(DivergedError, match="the loss of worker 1 was not a finite number at its local step 2"):
        served("asp", batches)


def test_parameters_without_a_gradient_stay_as_they_are():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    model = Two()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    sr.ParameterServer(2).run("bsp", model, optimizer, mse_loss, batches_of(2, 3))
    assert torch.equal(weights(model.unused), weights(before.unused))
    assert not torch.equal(weights(model.used), weights(before.used))


def test_mistakes_are_named():
    with pytest.raises(SpecError, match="at least one worker, not 0"):
        sr.ParameterServer(0)
    with pytest.raises(StragglerError, match="names rank 5"):
        sr.ParameterServer(2, straggler="persistent:ranks=5,factor=2")
    with pytest.raises(SpecError, match="of 2 workers needs as many batches, not 3"):
        sr.ParameterServer(2).run("asp", model_of(), sgd(model_of()), mse_loss, batches_of(3, 1))
    with pytest.raises(RuleError, match="did you mean 'server/asp'"):
        served("asb", batches_of(1, 1))
