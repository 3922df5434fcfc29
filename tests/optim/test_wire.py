"""Compressed payloads: what float16 rounds, what it must not lose, and rounds that would overflow."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import slackring as sr
from slackring.errors import AgreementError, UnsupportedError
from slackring.optim.records import RoundRecord, StepRecord
from slackring.optim.wire import Wire, read_compression
from slackring.ring.base import ArrivedFlight
from slackring.testing.scenario import WatchedRing

RULES = (
    "bsp",
    "bsp:accumulate=2",
    "relaxed:payload=gradient,steps=1,staleness=1",
    "relaxed:payload=gradient,steps=1,staleness=3",
    "local_sgd:steps=2",
    "osp",
    "losp:compensation=0.5",
    "losp:compensation=auto",
    "cocod:steps=2",
    "relaxed:steps=1,staleness=3,compensation=1,weighting=samples",
)
STEPS = 12
ROUNDING = 2.0**-11  # float16's


class Rows:
    """Bytes of each round."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def step(self, record: StepRecord) -> None:
        pass

    def round(self, record: RoundRecord) -> None:
        self.nbytes.append(record.nbytes)


def train(
    rule: str,
    slope: Callable[[int, int], float],
    compression: str | None = "fp16",
    *,
    shape: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    ranks: int = 2,
) -> list[tuple[torch.Tensor, list[str], list[int]]]:
    """Move a parameter from 0 by slopes: by rank the model at the end, what was sent, and bytes by round."""

    def rank() -> tuple[torch.Tensor, list[str], list[int]]:
        ring, rows = WatchedRing(sr.ring(), [0.1 * (1 + sr.ring().rank % 2)] * steps), Rows()
        x = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = sr.DistributedOptimizer(
            torch.optim.SGD([x], lr=1.0), rule, compression=compression, ring=ring, recorder=rows
        )
        for step in range(steps):
            optimizer.zero_grad()
            (-slope(ring.rank, step) * x).sum().backward()
            optimizer.step(samples=2)
        optimizer.join()
        return x.detach().clone(), ring.sent, rows.nbytes

    found = sr.VirtualCluster(ranks).run(rank)
    for model, sent, nbytes in found:
        assert torch.equal(model, found[0][0])
        assert sent == found[0][1]
        assert nbytes == found[0][2]
    return found


def wild(rank: int, step: int) -> float:
    """Slopes of no pattern, of about the same size."""
    return float(np.random.default_rng((rank, step)).uniform(0.5, 1.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_sums_are_those_of_float32_to_the_rounding_of_float16(rule: str, dtype: torch.dtype) -> None:
    model, sent, _ = train(rule, wild, dtype=dtype)[0]
    exact, *_ = train(rule, wild, None, dtype=dtype)[0]
    torch.testing.assert_close(model, exact, rtol=2 * ROUNDING, atol=0)
    assert not torch.equal(model, exact)
    assert not any(".again" in text for text in sent)
    # Until the first round has landed nothing is known of sizes.
    payloads = [text for text in sent if "[3]" in text]
    whole = max(int("staleness=3" in rule) * 3, int(rule[:4] in ("osp", "losp", "coco", "rela")), 1)
    assert [text.endswith("float16") for text in payloads] == [number >= whole for number in range(len(payloads))]


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-3, 1e6, 1e30])
@pytest.mark.parametrize("rule", ["bsp", "local_sgd:steps=1", "cocod:steps=1"])
def test_neither_tiny_nor_huge_contributions_are_lost(rule: str, size: float) -> None:
    model, *_ = train(rule, lambda rank, step: size * wild(rank, step))[0]
    exact, *_ = train(rule, lambda rank, step: size * wild(rank, step), None)[0]
    torch.testing.assert_close(model, exact, rtol=2 * ROUNDING, atol=0)


@pytest.mark.parametrize("growth", [1000.0, 1e30])
@pytest.mark.parametrize("rule", RULES)
def test_what_grows_a_thousandfold_from_one_round_to_the_next_is_exact(rule: str, growth: float) -> None:
    """One rank alone tells; all reduce the round again."""

    def slope(rank: int, step: int) -> float:
        return growth if (rank, step) == (1, 8) else 1.0

    model, sent, _ = train(rule, slope)[0]
    exact, *_ = train(rule, slope, None)[0]
    torch.testing.assert_close(model, exact, rtol=1e-6, atol=0)
    assert any(".again" in text for text in sent)
    assert all(text.endswith("float32") for text in sent if ".again" in text)


@pytest.mark.parametrize("ranks", [2, 64])
def test_what_grows_32_fold_is_not_reduced_again(ranks: int) -> None:
    """Nor is what one rank of many has, while the others have nothing."""
    for slope in (lambda rank, step: 31.0 ** (step % 2), lambda rank, step: float(rank == 0)):
        _, sent, _ = train("local_sgd:steps=1", slope, ranks=ranks, steps=6)[0]
        assert not any(".again" in text for text in sent)


def test_the_bytes_of_a_round_are_recorded() -> None:
    for rule in ("bsp", "losp"):
        plain, compressed = (train(rule, wild, how, shape=(1000,))[0][2] for how in (None, "fp16"))
        assert compressed[0] == plain[0]
        assert compressed[-1] == plain[-1] - 2000
    again = train("local_sgd:steps=1", lambda rank, step: 1e3 if step == 5 else 1.0, shape=(1000,))[0][2]
    assert again[5] == again[4] + 4000


def test_averaged_buffers_and_control_blocks_are_not_compressed() -> None:
    def rank() -> tuple[float, list[str]]:
        ring = WatchedRing(sr.ring())
        x, running = torch.nn.Parameter(torch.zeros(3)), torch.zeros(1)
        optimizer = sr.DistributedOptimizer(
            torch.optim.SGD([x], lr=1.0),
            "local_sgd:steps=1",
            named_buffers=[("running", running)],
            compression="fp16",
            ring=ring,
        )
        for step in range(3):
            x.grad = torch.ones(3)
            running.fill_(1e6 * (ring.rank + step) + 1)
            optimizer.step()
        return running.item(), [text.split("] ")[1] for text in ring.sent[-3:]]

    assert sr.VirtualCluster(2).run(rank) == [(2.5e6 + 1, ["torch.float16", "torch.float32", "torch.float64"])] * 2


def test_contributions_of_nothing_leave_the_scale_alone() -> None:
    model, sent, _ = train("local_sgd:steps=1", lambda rank, step: float(step in (2, 3, 6)))[0]
    assert model.tolist() == [3.0] * 3
    assert not any(".again" in text for text in sent)
    dtypes = [text.rpartition(".")[2] for text in sent if "[3]" in text]
    assert dtypes[:STEPS] == ["float32"] * 3 + ["float16"] * (STEPS - 3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("rule", ["bsp", "local_sgd:steps=1"])
def test_what_is_not_finite_is_skipped_and_does_not_spoil_the_scale(rule: str, bad: float) -> None:
    def slope(rank: int, step: int) -> float:
        return bad if (rank, step) == (1, 6) else 1.0

    def rank() -> tuple[float, list[str]]:
        ring = WatchedRing(sr.ring())
        x = torch.nn.Parameter(torch.zeros(3))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule, compression="fp16", ring=ring)
        for step in range(9):
            with torch.no_grad():
                x.nan_to_num_()  # what the rank's own step on it has spoilt
            optimizer.reset_anchor()
            optimizer.zero_grad()
            (-slope(ring.rank, step) * x).sum().backward()
            optimizer.step()
        return x[0].item(), ring.sent

    for place, sent in sr.VirtualCluster(2).run(rank):
        assert place == (8.0 if rule == "bsp" else 8.5)
        assert not any(".again" in text for text in sent)


def test_a_reduction_repeated_for_other_reasons_is_not_compressed() -> None:
    """Wrongly announced samples: the gradients are summed anew, as they are."""

    def rank() -> tuple[list[float], set[str]]:
        ring = WatchedRing(sr.ring())
        x = torch.nn.Parameter(torch.zeros(3))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), "bsp", compression="fp16", ring=ring)
        for step in range(5):
            optimizer.set_samples(1)
            optimizer.zero_grad()
            (-(1 + 2 * ring.rank) * x).sum().backward()
            optimizer.step(samples=1 if step < 4 else (1, 3)[ring.rank])
        return x.tolist(), {text.rpartition(".")[2] for text in ring.sent if ".again" in text and "[3]" in text}

    assert sr.VirtualCluster(2).run(rank) == [([4 * 2 + 2.5] * 3, {"float32"})] * 2


@pytest.mark.parametrize("rule", ["bsp", "local_sgd:steps=3", "losp:compensation=1"])
def test_alone_nothing_travels_and_nothing_is_rounded(rule: str) -> None:
    model, *_ = train(rule, wild, ranks=1)[0]
    exact, *_ = train(rule, wild, None, ranks=1)[0]
    assert torch.equal(model, exact)


# -- checkpoints -----------------------------------------------------------------------------------------------------------


def start(rule: str) -> tuple[torch.nn.Parameter, sr.RelaxedOptimizer]:
    x = torch.nn.Parameter(torch.zeros(3))
    return x, sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0, momentum=0.5), rule, compression="fp16")


def go_on(x: torch.nn.Parameter, optimizer: sr.RelaxedOptimizer, first: int, last: int) -> None:
    rank = sr.ring().rank
    for step in range(first, last):
        optimizer.zero_grad()
        slope = (1e4 if (rank, step) in ((1, 5), (0, 8)) else 1.0) * wild(rank, step)
        (-slope * x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("killed_at", range(1, STEPS))
@pytest.mark.parametrize(
    "rule",
    [
        "bsp",
        "cocod:steps=1",
        "relaxed:steps=1,staleness=3,compensation=0.5",
        "relaxed:payload=gradient,steps=1,staleness=2",
    ],
)
def test_a_resumed_run_ends_with_the_bits_of_the_undisturbed_one(rule: str, killed_at: int) -> None:
    """Also if a round that has to be reduced again is in flight; saving one does not disturb it either."""

    def undisturbed() -> torch.Tensor:
        x, optimizer = start(rule)
        go_on(x, optimizer, 0, STEPS)
        optimizer.drain()
        return x.detach().clone()

    def until_killed() -> tuple[dict[str, Any], torch.Tensor]:
        x, optimizer = start(rule)
        go_on(x, optimizer, 0, killed_at)
        file = io.BytesIO()
        torch.save({"x": x.detach(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        go_on(x, optimizer, killed_at, STEPS)
        optimizer.drain()
        return torch.load(file, weights_only=True), x.detach().clone()

    def resumed() -> torch.Tensor:
        x, optimizer = start(rule)
        saved = copy.deepcopy(saves[sr.ring().rank][0])
        with torch.no_grad():
            x.copy_(saved["x"])
        optimizer.load_state_dict(saved["optimizer"])
        go_on(x, optimizer, killed_at, STEPS)
        optimizer.drain()
        return x.detach().clone()

    cluster = sr.VirtualCluster(2)
    expected = cluster.run(undisturbed)
    saves = cluster.run(until_killed)
    for mine, theirs, (_, saved_on_the_way) in zip(cluster.run(resumed), expected, saves, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(saved_on_the_way, theirs)


# -- what is given, and what is agreed -------------------------------------------------------------------------------------


def test_what_compression_may_be() -> None:
    assert [read_compression(value) for value in (None, "none", "fp16")] == [None, None, "fp16"]
    x = torch.nn.Parameter(torch.ones(1))
    for value, told in {
        "bf16": "'bf16' would save nothing.*use 'fp16'",
        "fp61": "no compression named 'fp61'; did you mean 'fp16'",
        True: r"is None, 'fp16' or hvd\.Compression\.fp16, not True",
        int: "compressors of your own are not called",
    }.items():
        with pytest.raises(UnsupportedError, match=told):
            sr.DistributedOptimizer(torch.optim.SGD([x], lr=1), "bsp", compression=value)


def test_ranks_that_compress_differently_are_told_so() -> None:
    def rank() -> None:
        x = torch.nn.Parameter(torch.ones(1))
        how = "fp16" if sr.ring().rank == 2 else None
        sr.DistributedOptimizer(torch.optim.SGD([x], lr=1), "bsp", compression=how).drain()

    with pytest.raises(AgreementError, match='compression: rank 2 has "fp16", while most have null'):
        sr.VirtualCluster(3).run(rank)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("peak", [1e-45, 1e-30, 1.0, 3.0, 1e34])
def test_the_scale_leaves_room_for_growth(size: int, peak: float) -> None:
    wire = Wire(size)
    wire.learn(np.array([0.0, peak]))
    flight = wire.open(ArrivedFlight())
    flight.send(torch.full((2,), peak))
    assert flight.peak() == pytest.approx(peak)
    assert not flight.too_wide(peak)
    assert not flight.too_wide(31 * peak)
    assert flight.too_wide(65 * peak) == (peak > 1e-37)  # there the scale is as large as float32 has it
