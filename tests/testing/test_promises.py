"""The design's eight promises, for every rule of the package, on virtual ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import slackring as sr
from slackring.testing import PROMISES, PromiseBroken, check_rule
from slackring.testing.scenario import UNIT

RULES = [
    "bsp",
    "bsp:accumulate=3",
    "local_sgd",
    "local_sgd:steps=1,weighting=samples",
    "osp",
    "osp:k_min=2,k_max=3,weighting=ranks",
    "losp:compensation=0.5",
    "losp:compensation=1",
    "losp:compensation=1.5",
    "losp:compensation=auto",
    "cocod:steps=2",
    "cocod:weighting=samples",
    "anytime:compute_time=0.0035",
    "anytime:compute_time=0.0035,staleness=2,overshoot=yes",
    "anytime:compute_time=0.002,staleness=auto,communication_time=0.003",
    "anytime:target_batch=20,staleness=1",
    "elastic_bsp:lookahead=4",
    "elastic_bsp:objective=rate,smoothing=0.5,weighting=ranks",
    "elastic_bsp:payload=gradient",
    "elastic_bsp:weighting=sum",
    "relaxed:payload=gradient,staleness=1",
    "relaxed:payload=gradient,staleness=1,steps=1",
    "relaxed:payload=gradient,staleness=2,steps=2",
    "relaxed:payload=gradient,staleness=3,steps=1",
    "relaxed:staleness=2,compensation=1,weighting=ranks",
    "relaxed:staleness=2,compensation=auto",
    "relaxed:staleness=3,compensation=0.5",
    "relaxed:staleness=3,steps=2",
]


@pytest.mark.parametrize("rule", RULES)
def test_every_promise_on_four_ranks(rule: str) -> None:
    check_rule(rule)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rule", ["bsp", "losp", "relaxed:payload=gradient,staleness=1"])
def test_every_promise_on_fewer_ranks(rule: str, size: int) -> None:
    check_rule(rule, size=size, seed=100)


@settings(max_examples=150, print_blob=True)
@given(
    rule=st.sampled_from(RULES),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    latency=st.sampled_from([0.0, 0.3 * UNIT, 5 * UNIT]),
    bandwidth=st.sampled_from([1e5, float("inf")]),
)
def test_any_interleaving(rule: str, size: int, seed: int, latency: float, bandwidth: float) -> None:
    """Promise 8: the seed draws step times, leaves, overflows, drains and stops, and replays them."""
    network = sr.Network(latency, bandwidth)
    note(f"again: check_rule({rule!r}, size={size}, seed={seed}), with {network}")
    cluster = sr.VirtualCluster(size, UNIT, network=network)
    cluster.run(PROMISES["any_interleaving_works"], sr.parse_rule(rule), seed)


def broken(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Put a fault into the engine that leaves training plausible."""
    from slackring.optim import control, engine, gradient, payload

    if fault == "the own delta is also added to the anchor":
        land = payload.DeltaPayload.land

        def land_twice(self: payload.DeltaPayload, contribution: payload.Contribution, landed: control.Landed) -> None:
            land(self, contribution, landed)
            self._anchor.add_(contribution.buffers, 0.1)

        monkeypatch.setattr(payload.DeltaPayload, "land", land_twice)
    elif fault == "micro-batches are not weighted by their samples":
        accumulate = gradient.GradientPayload.accumulate
        monkeypatch.setattr(gradient.GradientPayload, "accumulate", lambda self, samples: accumulate(self, 1.0))
    elif fault == "a rank leaves as soon as it is done":
        monkeypatch.setattr(engine.Engine, "join", lambda self: 0)
    elif fault == "ranks do not compare what they were given":
        monkeypatch.setattr(engine, "agree", lambda ring, facts, name: None)
    elif fault == "waiting counts as computing":
        record = engine.StepRecord
        monkeypatch.setattr(
            engine,
            "StepRecord",
            lambda *values: (lambda r: r._replace(compute=r.compute + r.blocked, blocked=0.0))(record(*values)),
        )
    else:
        raise ValueError(fault)


@pytest.mark.parametrize(
    ("fault", "rule", "promise"),
    [
        ("the own delta is also added to the anchor", "osp", "nothing_is_lost_or_counted_twice"),
        ("micro-batches are not weighted by their samples", "bsp:accumulate=3", "size_one_is_the_plain_optimizer"),
        ("a rank leaves as soon as it is done", "losp", "anchor_is_the_same_everywhere"),
        ("ranks do not compare what they were given", "losp", "disagreement_is_named"),
        ("waiting counts as computing", "local_sgd", "time_is_measured"),
    ],
)
def test_a_fault_is_found(fault: str, rule: str, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, fault)
    with pytest.raises(PromiseBroken, match=promise):
        check_rule(rule)
