"""ElasticBSP on virtual ranks: its schedule, what it is equal to, and what each way to combine comes to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.optim.harness import Trace, Vector, sgd, train
from tests.rules.test_planner import SUPERSTEPS

import slackring as sr
from slackring.errors import UnsupportedError

FOREVER = 400
SPEEDS = [0.1, 0.1, 0.13, 0.4]
STEPS = (4, 4, 3, 1)  # of a superstep at these speeds


def bowl(rank: int, step: int, x: Vector) -> Vector:
    """Gradient of a quadratic with an optimum of its own on each rank, plus noise."""
    draw = np.random.default_rng((rank, step))
    return 0.7 * (x - rank) + 0.3 * draw.standard_normal(len(x))


def slope(rank: int, step: int, x: Vector) -> Vector:
    return np.array([1.0 + rank])


def supersteps(traces: list[Trace]) -> list[tuple[int, ...]]:
    """Local steps of the ranks by round."""
    return list(zip(*([record.local_steps for record in trace.rounds] for trace in traces), strict=True))


def run(rule: str, speeds: list[float], rounds: int = 8, **options: object) -> list[Trace]:
    return train(
        rule,
        bowl,
        [FOREVER] * len(speeds),
        start=[2.0],
        speeds=speeds,
        budget=sr.Budget(rounds=rounds),
        **options,  # type: ignore[arg-type]
    )


# -- the schedule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("milliseconds", "lookahead", "steps"), SUPERSTEPS)
def test_constant_speeds_give_the_same_superstep_every_time(
    milliseconds: list[int], lookahead: int, steps: tuple[int, ...]
) -> None:
    rule = f"elastic_bsp:lookahead={lookahead},minimum_gain=0,resolution=0.001"
    found = supersteps(run(rule, [speed / 1000 for speed in milliseconds], rounds=6))
    assert found == [(1,) * 4] * 2 + [steps] * 4


@pytest.mark.parametrize("objective", ["gap", "rate"])
def test_stragglers_meet_the_others_after_each_of_their_steps(objective: str) -> None:
    assert supersteps(run(f"elastic_bsp:objective={objective}", SPEEDS))[2:] == [STEPS] * 6


def test_ranks_hardly_wait() -> None:
    """(100, 100, 200, 200) ms: half as many steps again as BSP in the same time, and no wait."""

    def rate(rule: str) -> float:
        traces = run(rule, [0.1, 0.1, 0.2, 0.2], rounds=30)
        records = [record for trace in traces for record in trace.steps if record.round >= 2]
        return len(records) / (max(r.end for r in records) - min(r.start for r in records))

    assert rate("elastic_bsp") / rate("bsp") == pytest.approx(1.5)
    waits = [sum(r.blocked for r in trace.rounds[2:]) for trace in run("elastic_bsp", [0.1, 0.1, 0.2, 0.2])]
    assert waits == pytest.approx([0.0] * 4, abs=1e-9)


@pytest.mark.parametrize(
    ("elastic", "plain"), [("elastic_bsp:payload=gradient", "bsp"), ("elastic_bsp", "local_sgd:steps=1")]
)
@pytest.mark.parametrize("objective", ["gap", "rate"])
def test_equal_speeds_are_bsp_to_the_bit(elastic: str, plain: str, objective: str) -> None:
    separator = "," if ":" in elastic else ":"
    network = sr.Network(latency=0.5)
    found, expected = (
        run(rule, [0.1] * 4, network=network, optimizer=sgd(momentum=0.9))
        for rule in (f"{elastic}{separator}objective={objective}", plain)
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.model == theirs.model
        assert mine.steps == theirs.steps
        assert [(r.launched, r.landed, r.local_steps) for r in mine.rounds] == [
            (r.launched, r.landed, r.local_steps) for r in theirs.rounds
        ]


def test_ranks_that_joined_leave_the_plan() -> None:
    """The slow rank runs out of data after five steps; the others, equally fast, then meet after every step."""
    traces = train("elastic_bsp", bowl, [40, 40, 5], start=[2.0], speeds=[0.1, 0.1, 0.4])
    found = supersteps(traces)
    gone = next(number for number, steps in enumerate(found) if steps[2] == 0)
    assert set(found[2:gone]) == {(4, 4, 1)}
    assert set(found[gone + 1 :]) <= {(1, 1, 0), (0, 0, 0)}
    assert len({trace.last.item() for trace in traces}) == 1


# -- what is averaged ------------------------------------------------------------------------------------------------------


def test_gradients_make_one_step_on_all_of_the_supersteps_samples() -> None:
    def samples(rank: int, step: int) -> float:
        return float(1 + (3 * rank + 5 * step) % 7)

    traces = run("elastic_bsp:payload=gradient", SPEEDS, samples=samples, optimizer=sgd(0.1))
    assert supersteps(traces)[-1] == STEPS
    x = np.array([2.0])
    for number in range(8):
        parts = [
            (samples(rank, record.step), bowl(rank, record.step, x))
            for rank, trace in enumerate(traces)
            for record in trace.steps
            if record.round == number
        ]
        x = x - 0.1 * sum(b * g for b, g in parts) / sum(b for b, _ in parts)
    for trace in traces:
        np.testing.assert_allclose(trace.last, x, atol=1e-12)


@pytest.mark.parametrize(
    ("weighting", "moved"),
    [
        ("steps", (4 * 1 + 4 * 2 + 3 * 3 + 1 * 4) / 4),
        ("ranks", 3 * (1 + 2 + 3 + 4) / 4),  # three steps on average
        ("sum", 4 * 1 + 4 * 2 + 3 * 3 + 1 * 4),
    ],
)
def test_deltas_are_combined_as_the_weighting_says(weighting: str, moved: float) -> None:
    """At slopes 1, 2, 3 and 4, and a learning rate of 1."""
    traces = train(
        f"elastic_bsp:weighting={weighting}",
        slope,
        [FOREVER] * 4,
        speeds=SPEEDS,
        optimizer=sgd(1.0),
        budget=sr.Budget(rounds=4),
    )
    assert supersteps(traces)[2:] == [STEPS] * 2
    for trace in traces:
        *_, before, after = [trace.anchor[last] for last in last_steps(trace)]
        assert (before - after).item() == pytest.approx(moved)


def last_steps(trace: Trace) -> list[int]:
    return [max(i for i, r in enumerate(trace.steps) if r.round == number) for number in range(len(trace.rounds))]


# -- two optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [("elastic_bsp", "bsp"), ("bsp", "anytime:compute_time=1")])
def test_a_second_optimizer_waits_until_the_first_has_drained(rules: tuple[str, str]) -> None:
    def rank() -> None:
        parameters = [torch.nn.Parameter(torch.ones(1)) for _ in rules]
        one, other = (
            sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule)
            for x, rule in zip(parameters, rules, strict=True)
        )
        for x in parameters:
            x.grad = torch.ones(1)
        one.step()
        with pytest.raises(UnsupportedError, match="another optimizer of this process"):
            other.step()
        one.drain()
        other.step()
        with pytest.raises(UnsupportedError, match="drain\\(\\) the other one first"):
            one.step()
        other.join()
        one.step()
        one.join()

    sr.VirtualCluster(2, straggler="persistent:ranks=1,factor=2").run(rank)
