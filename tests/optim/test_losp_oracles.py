"""The numbered oracles of the OSP and LOSP papers and their all-reduce form; each test names the one it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.optim.harness import Gradient, MakeOptimizer, Trace, Vector, sgd, train

import slackring as sr

SPEEDS = [0.1, 0.13, 0.1, 0.4]
LATE = sr.Network(latency=0.25)
RHOS = ["0", "0.5", "1", "1.5", "auto"]
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [sgd(), sgd(momentum=0.9), lambda parameters: torch.optim.Adam(parameters, lr=0.05)],
    ids=["sgd", "momentum", "adam"],
)


def losp(rho: str, **options: int) -> str:
    more = "".join(f",{key}={value}" for key, value in options.items())
    return f"losp:compensation={rho}{more}"


def noisy_bowl(seed: int = 0, dimension: int = 3) -> Gradient:
    """Gradient of a quadratic with a random optimum on each rank, plus noise."""

    def gradient(rank: int, step: int, x: Vector) -> Vector:
        draw = np.random.default_rng((seed, rank, step))
        return np.linspace(0.5, 2.0, dimension) * (x - rank) + 0.3 * draw.standard_normal(dimension)

    return gradient


def uneven(rule: str, optimizer: MakeOptimizer | None = None) -> list[Trace]:
    """Four ranks of three speeds, so that windows differ in length."""
    traces = train(
        rule, noisy_bowl(), [24, 20, 24, 7], start=[1.0, -1.0, 2.0], optimizer=optimizer, speeds=SPEEDS, network=LATE
    )
    assert len({window[-1] for trace in traces for window in trace.windows()}) > 1
    return traces


def common_windows(traces: list[Trace]) -> list[list[tuple[Vector, Vector, Vector, Vector, int]]]:
    """The windows of all ranks by round, while all have steps and train."""
    return [list(together) for together in zip(*(trace.windows() for trace in traces), strict=False)]


def test_o1_full_compensation_starts_every_window_like_cocod() -> None:
    """O1: rho=1, any K_i: the next window starts from mean(s) + (p_i - s_i)."""
    rounds = common_windows(uneven(losp("1")))
    assert len(rounds) > 3
    for together in rounds[1:]:
        mean_start = np.mean([start for start, *_ in together], axis=0)
        for start, own, merged, _, _ in together:
            np.testing.assert_allclose(merged, mean_start + (own - start), atol=1e-12)


def test_o2_full_compensation_adds_what_the_others_did() -> None:
    """O2: rho=1: x_new = x_old + D - d_i, with D and d_i of the round before."""
    rounds = common_windows(uneven(losp("1")))
    for before, together in itertools.pairwise(rounds):
        deltas = [own - start for start, own, *_ in before]
        for delta, (_, own, merged, _, _) in zip(deltas, together, strict=True):
            np.testing.assert_allclose(merged, own + np.mean(deltas, axis=0) - delta, atol=1e-12)


@OPTIMIZERS
def test_o3_full_compensation_preserves_the_mean_model(optimizer: MakeOptimizer) -> None:
    """O3: rho=1, equal 1/P: a merge leaves the mean over ranks where it is, for any K_i and optimizer."""
    for together in common_windows(uneven(losp("1"), optimizer)):
        owns, merges = [own for _, own, *_ in together], [merged for _, _, merged, *_ in together]
        np.testing.assert_allclose(np.mean(merges, axis=0), np.mean(owns, axis=0), atol=1e-12)


@pytest.mark.parametrize("rule", [losp("0.5"), losp("auto"), "losp:compensation=1,weighting=ranks"])
def test_o3_does_not_hold_otherwise(rule: str) -> None:
    """O3, negative control: false for rho != 1, for a rho of each rank's own, and for the mean over ranks' means."""
    gaps = [
        np.abs(np.mean([merged - own for _, own, merged, *_ in together], axis=0)).max()
        for together in common_windows(uneven(rule))[1:]
    ]
    assert max(gaps) > 1e-3


@OPTIMIZERS
@pytest.mark.parametrize("rule", [losp("1"), losp("1", k_min=2, k_max=3), "cocod:steps=5"])
def test_o4_one_rank_with_full_compensation_is_sequential(rule: str, optimizer: MakeOptimizer) -> None:
    """O4: rho=1, P=1: sequential training, for any window lengths."""
    gradient = noisy_bowl()
    (trace,) = train(rule, gradient, [17], start=[1.0, -1.0, 2.0], optimizer=optimizer, network=LATE)
    np.testing.assert_allclose(trace.model, sequential(gradient, 17, optimizer), atol=1e-12)
    np.testing.assert_allclose(trace.last, trace.model[-1], atol=1e-12)


def sequential(gradient: Gradient, steps: int, optimizer: MakeOptimizer) -> list[Vector]:
    x = torch.nn.Parameter(torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64))
    plain, models = optimizer([x]), []
    for step in range(steps):
        x.grad = torch.from_numpy(gradient(0, step, x.detach().numpy().copy()))
        plain.step()
        models.append(x.detach().numpy().copy())
    return models


def test_o5_identical_ranks_are_sequential() -> None:
    """O5: rho=1, the same data, seeds and K on all ranks: all models are equal, and sequential SGD's."""
    gradient = noisy_bowl()
    traces = train(
        losp("1", k_max=4), lambda _, step, x: gradient(0, step, x), [12] * 3, start=[1.0, -1.0, 2.0], network=LATE
    )
    expected = sequential(gradient, 12, sgd())
    for trace in traces:
        np.testing.assert_allclose(trace.model, expected, atol=1e-12)


def test_o6_one_rank_without_compensation_is_one_window_late() -> None:
    """O6, negative control: rho=0, P=1 is not sequential; every window starts without the one before it."""
    gradient, steps, width = noisy_bowl(), 12, 3
    (trace,) = train("relaxed:steps=3,staleness=1", gradient, [steps], start=[1.0, -1.0, 2.0])
    anchor, in_flight, expected = np.array([1.0, -1.0, 2.0]), np.zeros(3), []
    for window in range(steps // width):
        x = anchor
        for step in range(window * width, (window + 1) * width):
            x = x - 0.1 * gradient(0, step, x)
            expected.append(x)
        anchor, in_flight = anchor + in_flight, x - anchor
    np.testing.assert_allclose(trace.own, expected, atol=1e-12)
    assert np.abs(np.array(trace.own) - sequential(gradient, steps, sgd())).max() > 0.01


@pytest.mark.parametrize("steps", [1, 3])
def test_o9_blocking_is_local_sgd(steps: int) -> None:
    """O9: waiting right after the launch is Local SGD with that K."""
    gradient = noisy_bowl()
    traces = train(f"local_sgd:steps={steps}", gradient, [6] * 3, start=[1.0, -1.0, 2.0], speeds=[0.1, 0.2, 0.3])
    w = np.array([1.0, -1.0, 2.0])
    for window in range(6 // steps):
        ends = []
        for rank in range(3):
            x = w.copy()
            for step in range(window * steps, (window + 1) * steps):
                x = x - 0.1 * gradient(rank, step, x)
            ends.append(x)
        w = np.mean(ends, axis=0)
        for trace in traces:
            np.testing.assert_allclose(trace.model[(window + 1) * steps - 1], w, atol=1e-12)


def test_o9_blocking_every_step_is_bsp() -> None:
    """O9: with one step a window, blocking deltas are synchronous SGD on the averaged gradient."""
    local = train("local_sgd:steps=1", noisy_bowl(), [6] * 3, start=[1.0, -1.0, 2.0])
    bsp = train("bsp", noisy_bowl(), [6] * 3, start=[1.0, -1.0, 2.0])
    for mine, theirs in zip(local, bsp, strict=True):
        np.testing.assert_allclose(mine.model, theirs.model, atol=1e-12)


@pytest.mark.parametrize("rho", RHOS)
def test_o10_the_anchor_lags_exactly_one_round(rho: str) -> None:
    """O10: the anchor is the same bits everywhere; w_(t+1) - w_t is the average of round t-1; after round 0 it is w_0."""
    rounds = common_windows(uneven(losp(rho)))
    for together in rounds:
        for *_, anchor, _ in together:
            assert anchor.tobytes() == together[0][3].tobytes()
    assert rounds[0][0][3].tolist() == [1.0, -1.0, 2.0]
    for number in range(1, len(rounds)):
        moved = rounds[number][0][3] - rounds[number - 1][0][3]
        sent = [own - start for start, own, *_ in rounds[number - 1]]
        np.testing.assert_allclose(moved, np.mean(sent, axis=0), atol=1e-12)


@pytest.mark.parametrize("rho", RHOS)
def test_o11_the_anchor_moves_by_the_sum_of_averaged_deltas(rho: str) -> None:
    """O11: w_final - w_0 = sum over rounds of the averaged deltas, for every rho."""
    traces = uneven(losp(rho))
    moved = np.zeros(3)
    for number, record in enumerate(traces[0].rounds):
        for trace in traces:
            mine = [i for i, step in enumerate(trace.steps) if step.round == number]
            if mine:
                start = trace.model[mine[0] - 1] if mine[0] else trace.start
                moved += (trace.own[mine[-1]] - start) / record.training
    for trace in traces:
        np.testing.assert_allclose(trace.last - trace.start, moved, atol=1e-12)


def test_o12_linear_functions_end_in_the_same_place() -> None:
    """O12: F = c.x: every rho and every K gives the same final anchor, since gradients do not depend on where they are taken."""
    lasts = [
        train(rule, lambda rank, step, x: np.array([1.0 + rank, -float(step)]), [12, 12, 12], start=[0.0, 0.0],
              speeds=[0.1, 0.2, 0.3], network=LATE, end="drain")[0].last
        for rule in [*(losp(rho) for rho in RHOS), losp("1", k_max=2), "cocod:steps=5", "osp:k_min=3", "local_sgd:steps=5"]
    ]  # fmt: skip
    for last in lasts:
        np.testing.assert_allclose(last, [-0.1 * 12 * 2.0, 0.1 * 66.0], atol=1e-12)


@pytest.mark.parametrize("rho", RHOS)
def test_o14_every_step_is_counted_and_all_stop_in_the_same_round(rho: str) -> None:
    """O14: the sum of K over rounds is the number of local steps; all stop in the same round, after as many collectives."""
    traces = train(
        losp(rho), noisy_bowl(), [500] * 4, start=[0.0] * 3, speeds=SPEEDS, network=LATE, budget=sr.Budget(samples=150)
    )
    taken = sum(len(trace.steps) for trace in traces)
    assert 150 <= taken < 250
    for trace in traces:
        assert sum(record.steps for record in trace.rounds) == taken
        assert sum(record.local_steps for record in trace.rounds) == len(trace.steps)
        assert len(trace.rounds) == len(traces[0].rounds)
        assert trace.sent == traces[0].sent


def test_o15_a_sleeping_rank_holds_nobody_up_before_k_max() -> None:
    """O15: nobody takes more than k_max steps in a window, and no step but the last of a full window waits."""
    traces = train(losp("0.5", k_max=6), noisy_bowl(), [60, 60, 4], start=[0.0] * 3, speeds=[0.1, 0.1, 3.0])
    for trace in traces[:2]:
        longest = max(record.local_steps for record in trace.rounds)
        assert longest == 6
        waited = [record for record in trace.steps if record.blocked > 0]
        assert waited, "the sleeper must be felt at the cap"
        full = {record.round for record in trace.rounds if record.local_steps == 6}
        last_of_window = {trace.steps[i].round: i for i in range(len(trace.steps))}
        for record in waited:
            assert record.round in full
            assert record.step == last_of_window[record.round]
        for record in trace.steps:
            assert record.compute == pytest.approx(0.1)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("rho", ["0", "0.5", "0.75", "1", "1.5"])
def test_o16_a_quadratic_follows_its_recursion(share: float, rho: str) -> None:
    """O16, exactly: with a = 1 - (1 - lr * curvature)^K, window starts follow x' = (1 - rho a) x + (rho - 1) a x_before.

    Its roots decide what is stable and how fast; for a large a they are 0.975 without compensation, and 0.05 with all of it.
    """
    steps = 3
    curvature = (1 - (1 - share) ** (1 / steps)) / 0.1
    rule = f"relaxed:steps={steps},staleness=1,compensation={rho}"
    (trace,) = train(rule, lambda rank, step, x: curvature * x, [steps * 12], start=[1.0])
    starts = [start.item() for start, *_ in trace.windows()]
    for before, now, after in zip(starts, starts[1:], starts[2:], strict=False):
        assert after == pytest.approx((1 - float(rho) * share) * now + (float(rho) - 1) * share * before, abs=1e-12)


def softmax_task(sort: bool, seed: int) -> tuple[Callable[[int, int, Vector], Vector], Callable[[Vector], float]]:
    """Linear classification of four clouds, dealt evenly to four ranks or one cloud to each."""
    draw = np.random.default_rng(seed)
    centres = 1.5 * draw.standard_normal((4, 5))
    labels = np.arange(400) % 4
    points = centres[labels] + draw.standard_normal((400, 5))
    owner = labels if sort else np.arange(400) // 100
    shards = [np.flatnonzero(owner == rank) for rank in range(4)]

    def slope(x: Vector, chosen: np.ndarray) -> tuple[float, Vector]:
        logits = points[chosen] @ x.reshape(5, 4)
        logits -= logits.max(1, keepdims=True)
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        loss = -np.log(shares[np.arange(len(chosen)), labels[chosen]] + 1e-300).mean()
        shares[np.arange(len(chosen)), labels[chosen]] -= 1
        return float(loss), (points[chosen].T @ shares / len(chosen)).ravel()

    def gradient(rank: int, step: int, x: Vector) -> Vector:
        chosen = np.random.default_rng((seed, rank, step)).choice(shards[rank], 16)
        return slope(x, chosen)[1]

    return gradient, lambda x: slope(x, np.arange(400))[0]


def final_loss(rho: str, sort: bool, lr: float, seed: int) -> float:
    gradient, loss = softmax_task(sort, seed)
    rule = f"relaxed:steps=8,staleness=1,compensation={rho}"
    traces = train(rule, gradient, [64] * 4, start=[0.0] * 20, optimizer=sgd(lr))
    return loss(traces[0].last)


def test_o16_compensation_helps_on_even_shards_and_hurts_on_sorted_ones() -> None:
    """O16, statistically: IID shards and a large lr * K: loss(rho=0) > loss(rho=1); label-sorted shards: the reverse."""
    even = [(final_loss("0", False, 2.0, seed), final_loss("1", False, 2.0, seed)) for seed in range(5)]
    assert np.median([osp - full for osp, full in even]) > 0
    sorted_ = [(final_loss("0", True, 0.3, seed), final_loss("1", True, 0.3, seed)) for seed in range(5)]
    assert np.median([full - osp for osp, full in sorted_]) > 0


def test_o17_auto_on_identical_ranks_is_one() -> None:
    """O17: ranks that do the same confirm each other's delta wholly."""
    traces = train(losp("auto", k_max=4), lambda _, step, x: x - 1.0, [12] * 3, start=[3.0, 2.0], network=LATE)
    for trace in traces:
        assert [record.compensation for record in trace.rounds] == pytest.approx([1.0] * len(trace.rounds))


def test_o17_auto_on_independent_noise_is_one_over_the_ranks() -> None:
    """O17: independent zero-mean deltas confirm their own share of the average only."""

    def noise(rank: int, step: int, x: Vector) -> Vector:
        return np.random.default_rng((rank, step)).standard_normal(len(x))

    traces = train(losp("auto"), noise, [20] * 5, start=[0.0] * 4000)
    # The last rounds are empty, and measure nothing.
    found = [record.compensation for trace in traces for record in trace.rounds[2:]]
    assert found == pytest.approx([1 / 5] * len(found), abs=0.08)


def test_o17_auto_on_opposite_deltas_is_zero() -> None:
    """O17: two ranks that undo each other's work keep none of their own."""
    traces = train(losp("auto"), lambda rank, step, x: np.array([1.0 - 2.0 * rank]), [9] * 2, start=[0.0])
    for trace in traces:
        assert [record.compensation for record in trace.rounds[2:]] == [0.0] * (len(trace.rounds) - 2)


@pytest.mark.parametrize("rule", ["bsp", "bsp:accumulate=2", "local_sgd:steps=2", "osp", losp("1"), losp("1.5")])
def test_o19_averaged_statistics_are_equal_and_never_negative(rule: str) -> None:
    """O19: after a sync running_var >= 0 and equal on all ranks; the anchor evaluates like its reloaded checkpoint."""

    def rank() -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        ring = sr.ring()
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = sr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            rule,
            named_parameters=model.named_parameters(),
            named_buffers=model.named_buffers(),
        )
        data = torch.Generator().manual_seed(ring.rank)
        for _ in range(5 + ring.rank):
            inputs = (1 + ring.rank) * torch.randn(6, 3, generator=data)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step(samples=6)
        probe = torch.randn(10, 3, generator=torch.Generator().manual_seed(7))
        model.eval()
        with optimizer.consensus():
            saved = {key: value.clone() for key, value in model.state_dict().items()}
            expected = model(probe)
        reloaded = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        reloaded.load_state_dict(saved)
        reloaded.eval()
        assert torch.equal(reloaded(probe), expected)
        optimizer.join()
        norm = model[1]
        return norm.running_mean.tolist(), norm.running_var.tolist()

    speeds = "persistent:ranks=0+3,factor=1.3+4"
    found = sr.VirtualCluster(4, straggler=speeds, network=sr.Network(latency=0.15)).run(rank)
    assert found == [found[0]] * 4
    assert min(found[0][1]) >= 0
    assert found[0][1] != [1.0] * 4
