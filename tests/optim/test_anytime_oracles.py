"""The numbered oracles of Anytime Minibatch and its stale form; each test names the one it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.optim.harness import Trace, Vector, sgd, train

import slackring as sr
from slackring.testing.scenario import WatchedRing

SPEEDS = [0.1, 0.13, 0.1, 0.4]
FOREVER = [200] * 4


def bowl(rank: int, step: int, x: Vector) -> Vector:
    """Gradient of a quadratic with an optimum of its own on each rank, plus noise."""
    draw = np.random.default_rng((rank, step))
    return 0.7 * (x - rank) + 0.3 * draw.standard_normal(len(x))


def sizes(rank: int, step: int) -> float:
    return float(1 + (3 * rank + 5 * step) % 7)


def by_round(traces: list[Trace]) -> list[list[list[int]]]:
    """Local steps by round and rank."""
    rounds = len(traces[0].rounds)
    return [[[r.step for r in trace.steps if r.round == number] for trace in traces] for number in range(rounds)]


def average(traces: list[Trace], windows: list[list[int]], x: Vector) -> Vector | None:
    """Mean gradient over all samples of a round, whose gradients were taken at x."""
    parts = [(sizes(rank, i), bowl(rank, i, x)) for rank, mine in enumerate(windows) for i in mine]
    total = sum(samples for samples, _ in parts)
    return sum(samples * gradient for samples, gradient in parts) / total if total else None  # type: ignore[return-value]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_o1_each_update_is_the_mean_over_all_samples_of_its_round(staleness: int) -> None:
    """O1 and O10: g = sum(b_i g_i) / sum(b_i), with gradients of the model `staleness` updates ago."""
    rule = f"anytime:compute_time=0.5,staleness={staleness}"
    traces = train(rule, bowl, [30, 24, 28, 7], start=[1.0, -2.0], speeds=SPEEDS, samples=sizes)
    models = [np.array([1.0, -2.0])]
    for number, windows in enumerate(by_round(traces)):
        gradient = average(traces, windows, models[max(number - staleness, 0)])
        models.append(models[-1] if gradient is None else models[-1] - 0.1 * gradient)
    assert len(models) > 6
    for trace in traces:
        np.testing.assert_allclose(trace.last, models[-1], atol=1e-12)


@pytest.mark.parametrize("staleness", [0, 2])
def test_o2_equal_speeds_make_it_synchronous_training(staleness: int) -> None:
    """O2: with b_i = k for all, Anytime is BSP with k micro-batches, to the bit."""
    runs = [
        train(rule, bowl, [12] * 3, start=[3.0], samples=sizes)
        for rule in (
            f"anytime:compute_time=0.3,staleness={staleness}",
            f"relaxed:payload=gradient,steps=3,staleness={staleness}",
        )
    ]
    assert [len(trace.rounds) for trace in runs[0]] == [len(trace.rounds) for trace in runs[1]]
    assert [trace.last.tolist() for trace in runs[0]] == [trace.last.tolist() for trace in runs[1]]


def test_o3_micro_batches_and_ranks_are_only_places() -> None:
    """O3: cutting a rank's samples into micro-batches, or giving them to other ranks, leaves the average."""

    def slope(rank: int, step: int, x: Vector) -> Vector:
        return np.array([float(rank + 10 * step)])

    def mean_of_two(rank: int, step: int, x: Vector) -> Vector:
        return (slope(rank, 2 * step, x) + slope(rank, 2 * step + 1, x)) / 2

    fine = train("anytime:compute_time=0.2", slope, [8, 8])
    coarse = train("anytime:compute_time=0.2", mean_of_two, [4, 4], speeds=[0.2, 0.2], samples=lambda *_: 2.0)
    swapped = train("anytime:compute_time=0.2", lambda rank, *rest: slope(1 - rank, *rest), [8, 8])
    assert len(fine[0].rounds) == len(coarse[0].rounds)
    for other in (coarse, swapped):
        np.testing.assert_allclose(other[0].last, fine[0].last, rtol=1e-12)


def test_o4_a_rank_without_samples_disturbs_nothing() -> None:
    """O4: b_i = 0 contributes nothing; no samples at all make no step."""
    together = train("anytime:compute_time=0.25", bowl, [9, 0], start=[2.0])
    alone = train("anytime:compute_time=0.25", bowl, [9], start=[2.0])
    np.testing.assert_allclose(together[0].last, alone[0].last, rtol=1e-12)
    idle = train("anytime:compute_time=0.25", bowl, [0, 0], start=[2.0], optimizer=sgd(momentum=0.9))
    assert [trace.last.tolist() for trace in idle] == [[2.0], [2.0]]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_o5_one_rank_is_sgd_on_what_fitted_in(momentum: float) -> None:
    """O5: n = 1 is SGD with batch b(t)."""
    (trace,) = train(
        "anytime:compute_time=0.35", bowl, [20], start=[2.0], optimizer=sgd(momentum=momentum), samples=sizes
    )
    x = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    plain = sgd(momentum=momentum)([x])
    for windows in by_round([trace]):
        gradient = average([trace], windows, x.detach().numpy())
        if gradient is not None:
            x.grad = torch.from_numpy(gradient)
            plain.step()
    np.testing.assert_allclose(trace.last, x.detach().numpy(), rtol=1e-12)


def test_o8_without_staleness_the_stale_form_is_the_plain_one() -> None:
    """O8: tau = 0, found by measuring a fast network, is Anytime itself."""
    plain, measured = (
        train(f"anytime:compute_time=0.5{more}", bowl, [30] * 4, start=[1.0], speeds=SPEEDS)
        for more in ("", ",staleness=auto")
    )
    assert [trace.model for trace in measured] == [trace.model for trace in plain]


@pytest.mark.parametrize(("staleness", "models"), [(0, [0.9, 0.81, 0.729, 0.6561]), (1, [1.0, 0.9, 0.8, 0.71, 0.63])])
def test_o9_delayed_recursion(staleness: int, models: list[float]) -> None:
    """O9: f = w^2 / 2, w_1 = 1, lr = 0.1, one step a window."""
    rule = f"anytime:compute_time=0.1,staleness={staleness}"
    (trace,) = train(rule, lambda rank, step, x: x, [len(models)], start=[1.0])
    np.testing.assert_allclose(np.ravel(trace.model), models, atol=1e-12)


@pytest.mark.parametrize("tau", [0, 1, 2, 4])
def test_o10_gradients_are_tau_updates_old(tau: int) -> None:
    """O10: epoch s takes its gradient at w(max(1, s - tau)), and there are as many updates as epochs."""
    at: list[float] = []

    def count(rank: int, step: int, x: Vector) -> Vector:
        at.append(float(x[0]))
        return np.array([-1.0])

    (trace,) = train(f"anytime:compute_time=0.1,staleness={tau}", count, [9], optimizer=sgd(lr=1.0))
    assert at == [float(max(epoch - tau, 0)) for epoch in range(9)]
    assert trace.last == [9.0]


@pytest.mark.parametrize("staleness", ["0", "2", "auto"])
def test_o11_ranks_hold_the_same_bits_and_send_the_same(staleness: str) -> None:
    """O11: parameters are the same bits after every update, and so are the collectives."""
    rule = f"anytime:compute_time=0.5,staleness={staleness}"
    network = sr.Network(latency=0.7)
    traces = train(rule, bowl, [30, 24, 28, 7], start=[1.0], speeds=SPEEDS, samples=sizes, network=network)
    first = traces[0]
    for trace in traces:
        assert trace.last.tobytes() == first.last.tobytes()
        assert trace.sent == first.sent
        mine = {float(x[0]) for x in trace.anchor}
        assert mine <= {float(x[0]) for other in traces if other is not trace for x in other.anchor} | mine
        assert [record.samples for record in trace.rounds] == [record.samples for record in first.rounds]


def intervals(traces: list[Trace]) -> Vector:
    landed = [record.landed for record in traces[0].rounds]
    return np.diff(landed[1:-4])  # without the first, and those that are landed by the end


@pytest.mark.parametrize("slowest", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("communication", [0.0, 0.8])
def test_o12_an_update_takes_compute_and_communication_time(slowest: float, communication: float) -> None:
    """O12: Anytime: T + T_c, give or take one micro-batch, however slow the slowest rank is."""
    more = f",communication_time={communication}" if communication else ""
    speeds = [0.1, 0.1, 0.1, slowest]
    traces = train(f"anytime:compute_time=2{more}", bowl, [int(30 / speed) for speed in speeds], speeds=speeds)
    found = intervals(traces)
    assert len(found) > 5
    assert (found >= 2 + communication - 1e-6).all()
    assert (found <= 2 + communication + slowest + 1e-6).all()


@pytest.mark.parametrize(("tau", "communication"), [(1, 0.4), (1, 1.0), (2, 1.9), (2, 4.0), (4, 4.0)])
def test_o12_stale_updates_hide_the_communication(tau: int, communication: float) -> None:
    """O12: the stale form: max(T, T_c / tau) on average."""
    rule = f"anytime:compute_time=1,staleness={tau},communication_time={communication}"
    traces = train(rule, bowl, FOREVER, speeds=[0.1] * 4)
    assert intervals(traces).mean() == pytest.approx(max(1.0, communication / tau), rel=0.06)


def test_o17_an_update_is_worth_the_same_as_with_fixed_batches() -> None:
    """O17: at equal mean batch, error against updates is the same as BSP's; only the time differs."""

    def error(rule: str, seed: int) -> float:
        def gradient(rank: int, step: int, x: Vector) -> Vector:
            return x + np.random.default_rng((seed, rank, step)).standard_normal(len(x))

        traces = train(rule, gradient, [120] * 4, start=[3.0] * 20, speeds=speeds, budget=sr.Budget(rounds=20))
        return float(np.mean(traces[0].last ** 2))

    speeds = [0.1, 0.1, 0.2, 0.2]
    anytime = np.mean([error("anytime:compute_time=0.4", seed) for seed in range(5)])  # 4, 4, 2 and 2 steps
    fixed = np.mean([error("bsp:accumulate=3", seed) for seed in range(5)])
    assert 0.8 < anytime / fixed < 1.25


def test_o18_counts_are_exact() -> None:
    """O18: samples are counted exactly also where a float32 would round them."""
    many = float(2**24 + 1)
    traces = train("anytime:compute_time=0.2", bowl, [4, 4], samples=lambda *_: many)
    assert sum(record.samples for record in traces[0].rounds) == 8 * many


@pytest.mark.parametrize("staleness", [1, 2])
def test_o19_what_is_in_flight_is_not_touched(staleness: int) -> None:
    """O19: gradients of the next window do not change a round that has been launched."""

    def rank() -> float:
        x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(
            torch.optim.SGD([x], lr=1.0), f"anytime:compute_time=0.05,staleness={staleness}"
        )
        for _ in range(4):
            x.grad = torch.ones_like(x)
            optimizer.step()
            if x.grad is not None:
                x.grad.fill_(1e9)
        optimizer.drain()
        return float(x.detach())

    assert sr.VirtualCluster(2, network=sr.Network(latency=0.3)).run(rank) == [-4.0, -4.0]


# -- beside the oracles ----------------------------------------------------------------------------------------------------


def windows_of(trace: Trace) -> list[int]:
    return [record.local_steps for record in trace.rounds if record.local_steps][:-1]


def test_without_overshoot_a_step_that_would_be_late_is_not_begun() -> None:
    late, punctual = (
        train(f"anytime:compute_time=1,overshoot={overshoot}", bowl, [40, 40], speeds=[0.1, 0.3])
        for overshoot in ("yes", "no")
    )
    assert set(windows_of(late[1])) == {4}
    assert set(windows_of(punctual[1])) == {3}
    assert set(windows_of(punctual[0])) == {10}


def test_a_window_has_at_least_one_step() -> None:
    traces = train("anytime:compute_time=0.1,overshoot=no", bowl, [12, 12], speeds=[0.1, 0.5])
    assert set(windows_of(traces[1])) == {1}


def test_a_deadline_can_cut_injected_delays_short() -> None:
    """The step that was in the delay counts no samples, and nobody waits for it; a window's first step is never cut."""
    cut, whole = (
        train(f"anytime:compute_time=1,overshoot=yes,interrupt={interrupt}", bowl, [44, 44], speeds=[0.1, 0.7])
        for interrupt in ("yes", "no")
    )
    assert intervals(cut).max() == pytest.approx(1.0)
    assert intervals(whole).max() == pytest.approx(1.4)
    assert {record.local_samples for record in cut[1].rounds[:-3]} == {1.0}


def test_a_rank_that_is_late_once_keeps_the_grid() -> None:
    """The next deadline is the last one plus T, also after a window that overran by less than T."""

    def run(slow: float) -> list[float]:
        def rank() -> list[float]:
            ring = sr.ring()
            seconds = [0.1] * 60
            if ring.rank == 1:
                seconds[12] = slow
            x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
            trace = Trace(np.zeros(1))
            optimizer = sr.DistributedOptimizer(
                torch.optim.SGD([x], lr=0.1),
                "anytime:compute_time=1,staleness=1",
                recorder=trace,
                ring=WatchedRing(ring, seconds),
            )
            for _ in range(60):
                x.grad = torch.ones_like(x)
                optimizer.step()
            optimizer.join()
            return [record.launched for record in trace.rounds]

        return sr.VirtualCluster(2).run(rank)[1]

    assert run(0.4)[:5] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0], abs=0.11)
    late = run(2.5)[:5]
    assert late[2] - late[1] == pytest.approx(1.0, abs=0.11)  # re-anchored where it was


def test_evaluating_does_not_use_up_a_window() -> None:
    def rank() -> list[int]:
        ring = sr.ring()
        x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        trace = Trace(np.zeros(1))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "anytime:compute_time=1", recorder=trace)
        for step in range(40):
            x.grad = torch.ones_like(x)
            optimizer.step()
            if step % 10 == 4:
                with optimizer.consensus():
                    ring.clock.sleep(5.0)
        optimizer.drain()
        return [record.local_steps for record in trace.rounds[:4]]

    assert sr.VirtualCluster(1).run(rank) == [[10, 10, 10, 10]]


def test_staleness_is_measured_and_agreed() -> None:
    """With a network of 1.6 s and windows of 1 s, two rounds are in flight once three have been measured."""
    traces = train(
        "anytime:compute_time=1,staleness=auto", bowl, FOREVER, speeds=[0.1] * 4, network=sr.Network(latency=1.6)
    )
    for trace in traces:
        in_flight = [
            sum(other.launched < record.landed <= other.landed for other in trace.rounds) for record in trace.rounds
        ]
        assert in_flight[0] == 1
        assert max(in_flight) == 2


@pytest.mark.parametrize("overshoot", ["yes", "no"])
def test_a_target_batch_is_reached_on_average(overshoot: str) -> None:
    rule = f"anytime:target_batch=40,overshoot={overshoot}"
    traces = train(rule, bowl, [*FOREVER[:3], 60], speeds=SPEEDS)
    batches = [record.samples for record in traces[0].rounds][1:-6]
    assert len(batches) > 5
    assert 40 <= np.mean(batches) < 65  # 1 / mean(T_i) is below mean(1 / T_i)
    assert next(record.steps for record in traces[0].rounds) == 4  # one step each until something has been measured


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "either compute_time= .* or target_batch="),
        (":compute_time=1,target_batch=3", "either compute_time= .* or target_batch="),
        (":compute_time=0", "compute_time is a finite number above 0"),
        (":compute_time=1,communication_time=-1", "communication_time is a finite number above 0"),
        (":compute_time=1,staleness=-1", "staleness is 0 or more"),
        (":compute_time=1,staleness=often", "whole number or 'auto'"),
    ],
)
def test_impossible_windows_are_refused(options: str, words: str) -> None:
    with pytest.raises(sr.SlackringError, match=words):
        sr.parse_rule(f"anytime{options}")


def test_rounds_stay_in_order_when_staleness_grows() -> None:
    traces = train(
        "anytime:compute_time=0.5,staleness=auto",
        bowl,
        [60, 50, 60, 20],
        speeds=SPEEDS,
        network=sr.Network(latency=0.7),
    )
    for trace in traces:
        assert [record.round for record in trace.rounds] == list(range(len(trace.rounds)))
        assert all(a.landed <= b.landed for a, b in itertools.pairwise(trace.rounds))
