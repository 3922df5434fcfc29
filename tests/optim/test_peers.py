"""What users report of other packages, and what comes out here; each test is named after its source."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.optim.harness import Trace, Vector, sgd, train
from tests.optim.matrix import RULES
from torch.nn import Parameter
from torch.optim import lr_scheduler

import slackring as sr
from slackring.errors import UnsupportedError
from slackring.testing.scenario import WatchedRing

GRADIENT_RULES = [rule for rule in RULES if sr.parse_rule(rule).payload == "gradient"]
DELTA_RULES = [rule for rule in RULES if sr.parse_rule(rule).payload == "delta"]


def slope(*slopes: float) -> Callable[[int, int, Vector], Vector]:
    """Gradient of a linear loss, by rank."""
    return lambda rank, step, x: np.array([slopes[rank]])


def models(trace: Trace) -> list[float]:
    return [model.item() for model in trace.model]


def vector(*values: float) -> Parameter:
    return Parameter(torch.tensor(values, dtype=torch.float64))


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, **told: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step(**told)  # type: ignore[arg-type]


# -- Local SGD: when ranks average, and what becomes of local steps --------------------------------------------------------


def test_horovod_2699_the_first_average_comes_after_h_completed_steps() -> None:
    """https://github.com/horovod/horovod/pull/2699: after steps 4 and 8; torch's PeriodicModelAverager: after 1, 5 and 9."""
    one, two = train("local_sgd:steps=4", slope(-1, -2), [8, 8], optimizer=sgd(1.0))
    assert models(one) == [1, 2, 3, 6, 7, 8, 9, 12]
    assert models(two) == [2, 4, 6, 6, 8, 10, 12, 12]


def test_horovod_631_staleness_bounds_the_rounds_in_flight() -> None:
    """https://github.com/horovod/horovod/issues/631: at most 3 rounds of 2 steps that the straggler has not sent yet."""
    fast, slow = train("relaxed:steps=2,staleness=3,compensation=1", slope(-1, -1), [24, 24], speeds=[0.1, 1.0])
    in_flight = [
        1 + sum(later.launched < round.landed for later in fast.rounds[round.round + 1 :]) for round in fast.rounds
    ]
    assert max(in_flight) == 3
    # It launches its last round when the straggler has launched the third before that one.
    assert fast.steps[-1].end == pytest.approx(slow.steps[17].end)


@pytest.mark.parametrize("groups", [1, 6])
def test_pytorch_74157_the_counter_advances_once_a_step(groups: int) -> None:
    """https://github.com/pytorch/pytorch/issues/74157 (76.97 % -> 69.62 %): a round every 4 steps, for any number of groups."""

    def rank() -> tuple[int, list[float]]:
        xs = [vector(0.0, 0.0) for _ in range(6)]
        share = 6 // groups
        plain = torch.optim.SGD([{"params": xs[at : at + share]} for at in range(0, 6, share)], lr=1.0)
        optimizer = sr.DistributedOptimizer(plain, "local_sgd:steps=4")
        places = []
        for _ in range(8):
            step(optimizer, -(1.0 + sr.ring().rank) * sum(x.sum() for x in xs))  # type: ignore[arg-type]
            places.append(xs[-1][0].item())
        return optimizer.progress.rounds, places

    assert sr.VirtualCluster(2).run(rank) == [
        (2, [1, 2, 3, 6, 7, 8, 9, 12]),
        (2, [2, 4, 6, 6, 8, 10, 12, 12]),
    ]


def test_pytorch_78988_the_count_of_an_open_window_is_in_the_state_dict() -> None:
    """https://github.com/pytorch/pytorch/pull/78988: saved after step 6 of windows of 4, the next average is after step 8."""

    def rank(saved: list[dict[str, Any]] | None, steps: int) -> tuple[list[float], dict[str, Any]]:
        x = vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "local_sgd:steps=4")
        if saved is not None:
            optimizer.load_state_dict(saved[sr.ring().rank])
        places = []
        for _ in range(steps):
            step(optimizer, -(1.0 + sr.ring().rank) * x.sum())
            places.append(x.item())
        return places, copy.deepcopy(optimizer.state_dict())

    cluster = sr.VirtualCluster(2)
    first = cluster.run(rank, None, 6)
    assert [places[-1] for places, _ in first] == [8, 10]
    rest = cluster.run(rank, [state for _, state in first], 3)
    assert [places for places, _ in rest] == [[9, 12, 13], [12, 12, 14]]


@pytest.mark.parametrize("rule", RULES)
def test_torchft_233_a_pseudo_gradient_has_the_right_sign(rule: str) -> None:
    """https://github.com/meta-pytorch/torchft/pull/233: the loss of a quadratic falls at every averaged model."""
    for trace in train(rule, lambda rank, step, x: x, [12, 12], start=[4.0], optimizer=sgd(0.1), end="drain"):
        losses = [float(anchor.item() ** 2) for anchor in trace.anchor] + [float(trace.last.item() ** 2)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.5 * 4.0**2


@pytest.mark.parametrize(
    "rule", ["cocod:steps=4", "losp:compensation=1,k_min=2", "relaxed:steps=1,staleness=3,compensation=1"]
)
def test_torchft_overlap_loses_no_step(rule: str) -> None:
    """https://github.com/meta-pytorch/torchft/blob/main/torchft/local_sgd.py: 1, 2, ..., 8, not 1, 2, 3, 2, 3, 4, 5, 4."""
    (trace,) = train(rule, slope(-1), [8], optimizer=sgd(1.0), network=sr.Network(latency=0.25))
    assert models(trace) == list(range(1, 9))


@pytest.mark.parametrize("rule", DELTA_RULES)
def test_torchft_overlap_loses_no_step_whatever_the_compensation(rule: str) -> None:
    """As above: a step that a rank does not continue from is in the anchor all the same, which ends at 8."""
    for speeds in ([0.1], [0.1, 0.1], [0.1, 0.3]):
        pulls = slope(*[-1.0] * len(speeds))
        steps = [8] * len(speeds)
        for trace in train(rule, pulls, steps, optimizer=sgd(1.0), speeds=speeds, network=sr.Network(latency=0.25)):
            assert sum(round.steps for round in trace.rounds) == 8 * len(speeds)
            if len(set(speeds)) == 1:
                assert trace.last.item() == 8


@pytest.mark.parametrize("sizes", [(3, 3), (5,), (3, 5, 1, 4, 2)])
@pytest.mark.parametrize("rule", RULES)
def test_torchft_buckets_drop_no_tensor(rule: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/meta-pytorch/torchft/blob/main/torchft/local_sgd.py: with room for 4 floats, (3, 3) and 5 arrive."""
    monkeypatch.setattr("slackring.optim.gradient._BUCKET_BYTES", 4 * 4)

    def rank() -> list[list[float]]:
        xs = [Parameter(torch.zeros(size)) for size in sizes]
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(xs, lr=1.0), rule)
        for _ in range(4):
            step(optimizer, (1.0 + 2.0 * sr.ring().rank) * sum(x.sum() for x in xs))  # type: ignore[arg-type]
        optimizer.drain()
        return [x.tolist() for x in xs]

    place = -4.0 if rule == "bsp:accumulate=2" else -8.0
    assert sr.VirtualCluster(2).run(rank) == [[[place] * size for size in sizes]] * 2


def test_torchft_fixtures_histories_of_a_fixed_gradient() -> None:
    """https://github.com/meta-pytorch/torchft/blob/main/torchft/diloco_regression_test.py: gradients 2 (and 6), by step."""
    histories: dict[str, tuple[list[float], list[float]]] = {
        "bsp": ([-4, -8, -12, -16, -20, -24], [-4, -8, -12, -16, -20, -24]),
        "bsp:accumulate=2": ([0, -4, -4, -8, -8, -12], [0, -4, -4, -8, -8, -12]),
        "anytime:compute_time=0.1,staleness=1": ([0, -4, -8, -12, -16, -20], [0, -4, -8, -12, -16, -20]),
        "local_sgd:steps=2": ([-2, -8, -10, -16, -18, -24], [-6, -8, -14, -16, -22, -24]),
        # At every second step: the mean of the window before, and the own deltas of this one.
        "cocod:steps=2": ([-2, -4, -6, -12, -14, -20], [-6, -12, -18, -20, -26, -28]),
        "osp:k_min=2,k_max=2": ([-2, 0, -2, -8, -10, -16], [-6, 0, -6, -8, -14, -16]),
        "losp:k_min=2,k_max=2,compensation=0.5": ([-2, -2, -4, -10, -12, -18], [-6, -6, -12, -14, -20, -22]),
    }
    for rule, (mine, theirs) in histories.items():
        one, two = train(rule, slope(2, 6), [6, 6], optimizer=sgd(1.0), end="drain")
        assert (models(one), models(two)) == (mine, theirs), rule
        ended = -12 if rule == "bsp:accumulate=2" else -24
        assert (one.last.item(), two.last.item()) == (ended, ended), rule


def test_hivemind_394_adding_the_delta_keeps_the_mean() -> None:
    """https://github.com/learning-at-home/hivemind/issues/394: snapshots 2, 6 and local 4, 12 become 6, 10; the mean stays 8."""
    one, two = train("cocod:steps=2", slope(-1, -3), [4, 4], optimizer=sgd(1.0))
    assert [one.own[1].item(), two.own[1].item()] == [2, 6]
    assert [one.own[3].item(), two.own[3].item()] == [4, 12]
    assert [one.model[3].item(), two.model[3].item()] == [6, 10]


@pytest.mark.parametrize("rule", ["losp", "osp"])
def test_hivemind_progress_tracker_a_faster_peer_shortens_the_time_to_a_number_of_samples(rule: str) -> None:
    """https://github.com/learning-at-home/hivemind/blob/master/tests/test_optimizer.py: a 4th, faster peer: 0.5 to 0.95."""

    def seconds(speeds: list[float]) -> float:
        traces = train(
            rule, slope(*[1.0] * len(speeds)), [400] * len(speeds), speeds=speeds, budget=sr.Budget(samples=300)
        )
        return max(trace.rounds[-1].landed for trace in traces)

    assert 0.5 <= seconds([0.1, 0.1, 0.1, 0.05]) / seconds([0.1, 0.1, 0.1]) <= 0.95


# -- weights ---------------------------------------------------------------------------------------------------------------


def test_flower_weighted_loss_avg_is_one_and_a_half() -> None:
    """https://github.com/adap/flower (weighted_loss_avg): [(1, 2.0), (2, 1.0), (1, 2.0)] averages to 1.5."""
    traces = train("bsp", slope(2, 1, 2), [1] * 3, optimizer=sgd(1.0), samples=lambda rank, step: [1, 2, 1][rank])
    for trace in traces:
        assert trace.last.item() == -1.5


@pytest.mark.parametrize("rule", GRADIENT_RULES)
def test_fairseq_494_every_token_counts_alike(rule: str) -> None:
    """https://github.com/facebookresearch/fairseq/issues/494 and https://github.com/pytorch/pytorch/issues/67253."""
    tokens = torch.arange(1.0, 41.0, dtype=torch.float64)

    def rank() -> float:
        x = vector(0.0)
        mine = tokens[:30] if sr.ring().rank else tokens[30:]  # the mean over ranks would be (15.5 + 35.5) / 2
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        optimizer.set_samples(len(mine))
        step(optimizer, (mine * x).mean(), samples=len(mine))
        optimizer.drain()
        return x.item()

    assert sr.VirtualCluster(2).run(rank) == [pytest.approx(-tokens.mean().item(), abs=1e-12)] * 2


def test_horovod_2298_accumulation_on_all_ranks_is_one_step_on_the_union() -> None:
    """https://github.com/horovod/horovod/issues/2298: k micro-batches on n ranks, unequal ones and a short window, too."""

    def gradient(rank: int, step: int, x: Vector) -> Vector:
        return np.array([rank + 10.0 * step])

    samples = lambda rank, step: 1.0 + rank + step  # noqa: E731
    for trace in train("bsp:accumulate=4", gradient, [4, 3], optimizer=sgd(1.0), samples=samples, end="drain"):
        pairs = [(1 + r + s, r + 10 * s) for r, n in ((0, 4), (1, 3)) for s in range(n)]
        mean = sum(b * g for b, g in pairs) / sum(b for b, _ in pairs)
        assert trace.last.item() == pytest.approx(-mean, abs=1e-12)


# -- uneven data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_horovod_832_ranks_with_uneven_data_complete(rule: str) -> None:
    """https://github.com/horovod/horovod/issues/832: 100 and 110 samples, batches of 10, 20 epochs: all 420 steps count."""
    for trace in train(rule, slope(-1, -1), [200, 220], samples=lambda rank, step: 10.0):
        assert sum(round.steps for round in trace.rounds) == 420
        assert sum(round.samples for round in trace.rounds) == 4200
        if rule == "bsp":
            assert trace.last.item() == pytest.approx(220 * 0.1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [[3, 9, 1, 4], [0, 2, 5, 5], [7, 0, 0, 0], [2, 2, 2, 2]])
def test_horovod_2083_different_numbers_of_steps_end_and_2958_join_names_the_last_rank(
    rule: str, lengths: list[int]
) -> None:
    """https://github.com/horovod/horovod/issues/2083 and 2958: the same rank everywhere, which did the last work."""
    speeds = [0.1, 0.11, 0.5, 0.27]
    traces = train(rule, slope(1, 1, 1, 1), lengths, speeds=speeds)
    assert {trace.returned for trace in traces} == {traces[0].returned}
    # It counts as training in the round that carries its last work; of several in the same round, the last to get there.
    works = [max((r.round for r in trace.rounds if r.local_steps), default=-1) for trace in traces]
    ends = [trace.steps[-1].end if trace.steps else 0.0 for trace in traces]
    last = traces[0].returned
    assert works[last] == max(works)
    assert ends[last] == pytest.approx(max(end for end, work in zip(ends, works, strict=True) if work == max(works)))


def test_horovod_2958_join_names_the_last_rank_of_synchronous_ones() -> None:
    """https://github.com/horovod/horovod/issues/2958: the one with the most steps."""
    for lengths, last in (([3, 9, 1], 1), ([9, 3, 1], 0), ([1, 3, 9], 2), ([4, 4, 2], 1)):
        assert [trace.returned for trace in train("bsp", slope(1, 1, 1), lengths)] == [last] * 3


@pytest.mark.parametrize(("rule", "delta"), [("bsp", False), ("local_sgd:steps=1", True)])
def test_pytorch_38174_a_joined_rank_is_not_in_the_divisor(rule: str, delta: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/38174: two steps on rank 0, one on rank 1: torch's Join says 2.0 or 1.5.

    2.0 if rank 1 has joined. A training rank without work is in the divisor of deltas, 1.5; averages of gradients are over
    samples, and stay 2.0.
    """
    for trace in train(rule, slope(-1, -1), [2, 1], optimizer=sgd(1.0)):
        assert trace.last.item() == 2.0
    for trace in train(rule, slope(-1, -1), [2, 1], optimizer=sgd(1.0), end="drain"):
        assert trace.last.item() == (1.5 if delta else 2.0)


@pytest.mark.parametrize("rule", RULES)
def test_horovod_403_one_rank_may_evaluate_alone(rule: str) -> None:
    """https://github.com/horovod/horovod/issues/403: rank 0 evaluates for 5 s; nothing is missing, and no step counts it."""

    def rank(evaluates: bool) -> tuple[float, int, float]:
        ring = sr.ring()
        x = vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        anchors = []
        for _ in range(8):
            step(optimizer, -(1.0 + 2.0 * ring.rank) * x.sum())
            if evaluates and ring.rank == 0:
                with optimizer.consensus():
                    anchors.append(x.item())
                    ring.clock.sleep(5.0)
        optimizer.drain()
        assert anchors == sorted(anchors)
        return x.item(), optimizer.progress.steps, ring.clock.now()

    evaluated = sr.VirtualCluster(2, step_time=0.1).run(rank, True)
    undisturbed = sr.VirtualCluster(2, step_time=0.1).run(rank, False)
    assert [found[:2] for found in evaluated] == [found[:2] for found in undisturbed]
    assert evaluated[0][2] >= 8 * 5.0 + undisturbed[0][2]


# -- accumulation ----------------------------------------------------------------------------------------------------------


def test_horovod_2466_a_window_that_the_epoch_cuts_short_counts_what_it_has() -> None:
    """https://github.com/horovod/horovod/issues/2466: 20 steps, windows of 8: 8, 8 and 4 make 3 optimizer steps an epoch."""

    def rank() -> list[float]:
        x = vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "bsp:accumulate=8")
        epochs = []
        for _ in range(2):
            for _ in range(20):
                step(optimizer, -(1.0 + sr.ring().rank) * x.sum())
            optimizer.drain()
            epochs.append(x.item())
        return epochs

    assert sr.VirtualCluster(2).run(rank) == [[3 * 1.5, 6 * 1.5]] * 2


def test_horovod_1103_the_optimizer_counts_micro_batches_itself() -> None:
    """https://github.com/horovod/horovod/issues/1103: ``step()`` after every pass; with accumulate=4 each fourth one moves."""
    for trace in train("bsp:accumulate=4", slope(-1, -3), [8, 8], optimizer=sgd(1.0)):
        assert models(trace) == [0, 0, 0, 2, 2, 2, 2, 4]
        # https://github.com/horovod/horovod/issues/2256: a global step is a round, not a pass.
        assert [round.steps for round in trace.rounds if round.steps] == [8, 8]


def test_horovod_accumulation_stopped_after_three_passes_is_their_mean() -> None:
    """https://github.com/horovod/horovod/blob/master/horovod/torch/optimizer.py: 1.0, not 3.0, and zero_grad() does not fail."""

    def rank() -> list[float]:
        x = vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "bsp:accumulate=4")
        places = []
        for _ in range(2):
            for _ in range(3):
                step(optimizer, -x.sum())
            optimizer.zero_grad()
            optimizer.drain()
            places.append(x.item())
        return places

    assert sr.VirtualCluster(2).run(rank) == [[1.0, 2.0]] * 2


# -- wrapping, state, groups, schedules ------------------------------------------------------------------------------------


def test_horovod_wrapping_keeps_state_and_defaults() -> None:
    """https://github.com/horovod/horovod/blob/master/horovod/torch/optimizer.py: 1 entry of state, not 0."""
    x = vector(1.0)
    plain = torch.optim.SGD([x], lr=0.5, momentum=0.9)
    step(plain, x.sum())
    defaults = dict(plain.defaults)
    optimizer = sr.DistributedOptimizer(plain, "losp")
    assert len(optimizer.state) == 1
    assert optimizer.defaults == defaults


@pytest.mark.parametrize("rule", RULES)
def test_horovod_a_group_added_later_has_the_settings_and_is_averaged(rule: str) -> None:
    """https://github.com/horovod/horovod/blob/master/horovod/torch/optimizer.py: .5/.9/.01, not .001/0/0; and reduced."""

    def rank() -> tuple[float, float, float, float]:
        x, added = vector(0.0), vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.5, momentum=0.9, weight_decay=0.01), rule)
        optimizer.add_param_group({"params": [added]})
        for _ in range(2 if rule == "bsp:accumulate=2" else 1):
            step(optimizer, -(1.0 + 2.0 * sr.ring().rank) * (x + added).sum())
        optimizer.drain()
        group = optimizer.param_groups[1]
        return group["lr"], group["momentum"], group["weight_decay"], added.item()

    assert sr.VirtualCluster(2).run(rank) == [(0.5, 0.9, 0.01, 1.0)] * 2


def test_horovod_3405_zero_grad_takes_set_to_none() -> None:
    """https://github.com/horovod/horovod/issues/3405: accepted, not a TypeError."""
    x = vector(1.0)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.5), "bsp")
    x.grad = torch.ones_like(x)
    optimizer.zero_grad(set_to_none=False)
    assert x.grad.tolist() == [0.0]
    optimizer.zero_grad(set_to_none=True)
    assert x.grad is None


def test_horovod_a_closures_gradient_is_reduced_once() -> None:
    """https://github.com/horovod/horovod/blob/master/horovod/torch/optimizer.py: one reduction, of the mean gradient."""

    def rank() -> tuple[int, float]:
        ring = WatchedRing(sr.ring())
        x = vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "bsp", ring=ring)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = -(1.0 + 2.0 * ring.rank) * x.sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return sum(text.endswith("[1] torch.float64") for text in ring.sent), x.item()

    assert sr.VirtualCluster(2).run(rank) == [(3, 6.0)] * 2


@pytest.mark.parametrize("made", ["before wrapping", "after wrapping", "after loading"])
def test_post_local_sgd_and_horovod_a_schedule_and_the_optimizer_share_one_rate(made: str) -> None:
    """https://github.com/pytorch/pytorch/blob/main/torch/distributed/optim/post_localSGD_optimizer.py: not .1 beside 1.0.

    Nor Horovod's .01 beside .1, nor its warning that the schedule moved before the optimizer.
    """
    x = vector(0.0)
    plain = torch.optim.SGD([x], lr=1.0)
    schedule = lr_scheduler.StepLR(plain, 1, gamma=0.1) if made == "before wrapping" else None
    optimizer = sr.DistributedOptimizer(plain, "local_sgd:steps=1")
    if made == "after wrapping":
        schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule = schedule or lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    places = []
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            step(optimizer, -x.sum())
            schedule.step()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            places.append(x.item())
    assert places == pytest.approx([1.0, 1.1, 1.11])


def test_horovod_a_wrapped_optimizer_can_be_pickled() -> None:
    """https://github.com/horovod/horovod/blob/master/horovod/torch/optimizer.py: its class is made at run time."""
    x = vector(1.0)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.5, momentum=0.9), "losp")
    step(optimizer, x.sum())
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(twin) is torch.optim.SGD
        assert [state["momentum_buffer"].tolist() for state in twin.state.values()] == [[1.0]]


def test_horovod_step_hooks_run_once_a_step() -> None:
    """https://github.com/horovod/horovod/blob/master/horovod/torch/optimizer.py: not twice."""
    x, calls = vector(1.0), []
    plain = torch.optim.SGD([x], lr=0.5)
    plain.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer = sr.DistributedOptimizer(plain, "bsp")
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step(optimizer, x.sum())
    assert calls == ["before", "after"]


@pytest.mark.parametrize("rule", GRADIENT_RULES)
def test_horovod_2844_the_rate_has_no_reference_size(rule: str) -> None:
    """https://github.com/horovod/horovod/issues/2844: from 4 to 5, 7 and 8 ranks a step stays lr times the mean gradient."""
    state: dict[str, Any] | None = None

    def rank() -> tuple[float, dict[str, Any]]:
        x = vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.25), rule)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        for _ in range(2 if rule == "bsp:accumulate=2" else 1):
            step(optimizer, -x.sum())
        optimizer.drain()
        return x.item(), copy.deepcopy(optimizer.state_dict())

    for size in (4, 5, 7, 8):
        (place, state), *others = sr.VirtualCluster(size).run(rank)
        assert place == 0.25
        assert [other for other, _ in others] == [place] * (size - 1)


def test_lightning_9446_an_optimizer_averages_its_own_parameters_alone() -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/pull/9446: the rounds of one leave the other's parameters as they are."""

    def rank() -> tuple[list[float], list[float]]:
        ours = 1.0 + 2.0 * sr.ring().rank
        x, y = vector(0.0), vector(0.0)
        one = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "local_sgd:steps=1")
        two = sr.DistributedOptimizer(torch.optim.SGD([y], lr=1.0), "local_sgd:steps=3")
        places: tuple[list[float], list[float]] = ([], [])
        for _ in range(3):
            step(one, -ours * x.sum())
            step(two, -ours * y.sum())
            places[0].append(x.item())
            places[1].append(y.item())
        return places

    assert sr.VirtualCluster(2).run(rank) == [([2, 4, 6], [1, 2, 6]), ([2, 4, 6], [3, 6, 6])]


# -- mixed precision, and parameters without a gradient --------------------------------------------------------------------


def test_horovod_3160_a_plain_scaler_step_works() -> None:
    """https://github.com/horovod/horovod/issues/3160: no recipe of synchronize() and skip_synchronize(); one reduction a step."""

    def rank() -> tuple[float, int]:
        ring = WatchedRing(sr.ring())
        x = vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "bsp", ring=ring)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((1.0 + 2.0 * ring.rank) * x.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return x.item(), sum(text.endswith("[1] torch.float64") for text in ring.sent)

    assert sr.VirtualCluster(2).run(rank) == [(-6.0, 3)] * 2


@pytest.mark.parametrize("rule", RULES)
def test_post_local_sgd_a_rank_that_overflows_hangs_nobody(rule: str) -> None:
    """https://github.com/pytorch/pytorch/blob/main/torch/distributed/optim/post_localSGD_optimizer.py: its count stays behind."""

    def rank() -> tuple[float, int]:
        x = vector(0.0)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(6):
            optimizer.zero_grad()
            overflows = sr.ring().rank == 1 and number == 1
            scaler.scale((torch.inf if overflows else -1.0) * x.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.drain()
        return x.item(), optimizer.progress.steps

    found = sr.VirtualCluster(2).run(rank)
    # The micro-batch alone is lost (of 6 on one of 2 ranks), or the step on all ranks (bsp), or nothing of a mean.
    wanted = {"bsp": 5.0, "bsp:accumulate=2": 3.0, "anytime:compute_time=0.1,staleness=1": 6.0}.get(rule, 5.5)
    assert found == [(wanted, 12)] * 2


@pytest.mark.parametrize("rule", RULES)
def test_horovod_1618_frozen_parameters_stay_and_may_thaw(rule: str) -> None:
    """https://github.com/horovod/horovod/issues/1618: no decay while frozen; averaged like the others afterwards."""

    def rank() -> tuple[float, float, float]:
        pull = -(1.0 + 2.0 * sr.ring().rank)
        x, frozen = vector(0.0), vector(1.0).requires_grad_(False)
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x, frozen], lr=1.0, weight_decay=0.5), rule)
        for _ in range(2):
            step(optimizer, pull * (x + frozen.detach()).sum())
        optimizer.drain()
        before = frozen.item()
        frozen.requires_grad_(True)
        for _ in range(2 if rule == "bsp:accumulate=2" else 1):
            step(optimizer, pull * (x + frozen).sum())
        optimizer.drain()
        return before, frozen.item(), x.item()

    for before, after, _ in (found := sr.VirtualCluster(2).run(rank)):
        assert (before, after) == (1.0, 1.0 + 2.0 - 0.5)
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", RULES)
def test_torch_averager_parameters_without_a_gradient_do_not_mix(rule: str) -> None:
    """https://github.com/pytorch/pytorch/blob/main/torch/distributed/algorithms/model_averaging/utils.py: not 5.5 for both.

    Rank 0 has a gradient for a, rank 1 for b, nobody for c; each is averaged with itself. Then nobody has any at all.
    """

    def rank() -> list[float]:
        xs = [vector(1.0), vector(10.0), vector(100.0)]
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(xs, lr=1.0, weight_decay=0.0), rule)
        for _ in range(2):
            step(optimizer, -2.0 * xs[sr.ring().rank].sum())
        optimizer.drain()
        optimizer.zero_grad()
        optimizer.step()
        optimizer.drain()
        return [x.item() for x in xs]

    moved = 1.0 if rule == "bsp:accumulate=2" else 2.0
    assert sr.VirtualCluster(2).run(rank) == [[1.0 + moved, 10.0 + moved, 100.0]] * 2


@pytest.mark.parametrize("rule", RULES)
def test_torchft_and_torch_averager_buffers_are_averaged_too(rule: str) -> None:
    """https://github.com/pytorch/pytorch/pull/74894: BatchNorm1d has 2 parameters and 3 buffers; means 1 and 3 become 2."""

    def rank() -> tuple[float, float]:
        model = torch.nn.BatchNorm1d(1, momentum=1.0)
        optimizer = sr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), rule, named_buffers=model.named_buffers()
        )
        for _ in range(2):
            step(optimizer, model((1.0 + 2.0 * sr.ring().rank) * torch.tensor([[0.0], [2.0]])).sum())
        optimizer.drain()
        assert model.running_mean is not None
        assert model.num_batches_tracked is not None
        return model.running_mean.item(), float(model.num_batches_tracked)

    assert sr.VirtualCluster(2).run(rank) == [(2.0, 2.0)] * 2


def test_pytorch_30439_lbfgs_is_refused() -> None:
    """https://github.com/pytorch/pytorch/issues/30439: an error before anything is sent, not a closed connection."""
    with pytest.raises(UnsupportedError, match="closure a different number of times on each rank"):
        sr.DistributedOptimizer(torch.optim.LBFGS([vector(0.0)]), "bsp")
