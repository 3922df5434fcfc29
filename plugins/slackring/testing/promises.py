"""The promises that every rule keeps, one function each.

Each function is called on every rank of a ring, plays plans that all ranks know, exchanges diaries, and comes to the same
conclusion on every rank; so the same functions run on a virtual cluster and under Horovod.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from slackring.cluster import VirtualCluster
from slackring.errors import AgreementError
from slackring.optim.optimizer import DistributedOptimizer
from slackring.optim.progress import Budget
from slackring.ring.ambient import ring as ambient_ring
from slackring.ring.network import Network
from slackring.rules import BSP, LocalSGD, Moment, Rule
from slackring.testing.scenario import (
    UNIT,
    Act,
    Diary,
    Plan,
    WatchedRing,
    draw_plan,
    loss_of,
    make_model,
    make_optimizer,
    micro_batch,
    play,
    written,
)

__all__ = ["PROMISES", "PromiseBroken"]

_ROUNDING = 1e-9  # float64 all along; sums over ranks may associate differently
_CLOCK = 1e-6  # seconds that floating times may be off


class PromiseBroken(AssertionError):
    """A rule, or a ring under it, does not do what every rule promises; the message says which promise and how."""


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PromiseBroken(otherwise)


def _close(found: Sequence[float], expected: Sequence[float], what: str) -> None:
    if len(found) != len(expected) or not np.allclose(found, expected, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=False):
        raise PromiseBroken(f"{what}: found {_few(found)}, expected {_few(expected)}.")


def _few(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{number:.9g}" for number in numbers[:4])
    return f"[{shown}{', ...' if len(numbers) > 4 else ''}]"


# -- 1 -------------------------------------------------------------------------------------------------------------------


def size_one_is_the_plain_optimizer(rule: Rule, seed: int = 0) -> None:
    """A rank that trains alone does what the plain optimizer does.

    A gradient rule applies the window's sample-weighted mean gradient, `staleness` windows late; to the bit if a window is one
    micro-batch. A delta rule that discards nothing (compensation 1, or staleness 0) takes the plain optimizer's steps.
    """
    # A ring of one of its own, wherever this is called; with a network, so that "when the ring is free" means something.
    network = Network(latency=1.7 * UNIT)
    for name, dtype in (("sgd", torch.float64), ("momentum", torch.float32), ("adam", torch.float64)):
        VirtualCluster(1, UNIT, network=network).run(_compare_alone, rule, seed, name, dtype)


def _compare_alone(rule: Rule, seed: int, name: str, dtype: torch.dtype) -> None:
    model, twin = make_model(dtype), make_model(dtype)
    plain, diary = make_optimizer(name, twin), Diary()
    optimizer = DistributedOptimizer(make_optimizer(name, model), rule, recorder=diary)
    counts = [1 + (seed + 2 * i) % 4 for i in range(13)]
    keeps_all = rule.most_in_flight == 0 or rule.compensation == 1
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    parameters = list(model.parameters())
    gradients: list[list[torch.Tensor]] = []
    for step, samples in enumerate(counts):
        inputs = micro_batch(seed, 0, step, samples, dtype)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, inputs))
        gradients.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        optimizer.step(samples=samples)
        if rule.payload == "delta":
            plain.zero_grad()
            torch.autograd.backward(loss_of(twin, inputs))
            plain.step()
            if keeps_all:
                _same(model, twin, tolerance, f"after local step {step} with {name}")
    optimizer.drain()
    if rule.payload == "gradient":
        single = _delayed_recursion(rule, seed, counts, diary, twin, plain, gradients)
        _same(model, twin, 0.0 if single else tolerance, f"after all rounds with {name}")
    elif keeps_all:
        _same(model, twin, tolerance, f"after drain() with {name}")
    rounds, steps = optimizer.progress.rounds, optimizer.progress.steps
    _require(steps == len(counts), f"{len(counts)} local steps were taken, but {steps} landed in {rounds} rounds.")


def _delayed_recursion(
    rule: Rule,
    seed: int,
    counts: Sequence[int],
    diary: Diary,
    twin: torch.nn.Module,
    plain: torch.optim.Optimizer,
    gradients: Sequence[Sequence[torch.Tensor]],
) -> bool:
    """Train the twin on the windows that were recorded; return whether each of them was a single micro-batch."""
    windows = [list(group) for _, group in itertools.groupby(range(len(counts)), key=lambda i: diary.steps[i].round)]
    waiting: list[list[torch.Tensor]] = []
    parameters = list(twin.parameters())

    def apply() -> None:
        for parameter, gradient in zip(parameters, waiting.pop(0), strict=True):
            parameter.grad = gradient
        plain.step()

    for number, window in enumerate(windows):
        total = sum(counts[i] for i in window)
        means = []
        for i in window:
            plain.zero_grad()
            torch.autograd.backward(loss_of(twin, micro_batch(seed, 0, i, counts[i], parameters[0].dtype)))
            means.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
            for mine, theirs in zip(means[-1], gradients[i], strict=True):
                _require(
                    bool(torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)),
                    f"local step {i} took its gradient on another model than the delayed recursion says.",
                )
        if len(window) == 1:
            waiting.append(means[0])
        else:
            columns = zip(*means, strict=True)
            waiting.append([sum(counts[i] * g for i, g in zip(window, c, strict=True)) / total for c in columns])
        end = diary.steps[window[-1]].end
        landed = sum(record.landed <= end + _CLOCK for record in diary.rounds)
        if window is not windows[-1] and isinstance(rule.staleness, int):  # the last one is landed by drain()
            expected = max(number + 1 - rule.staleness, 0)
            _require(landed == expected, f"{landed} averages had been used after window {number}, not {expected}.")
        for _ in range(landed - (number + 1 - len(waiting))):
            apply()
    while waiting:
        apply()
    return all(len(window) == 1 for window in windows)


def _same(model: torch.nn.Module, twin: torch.nn.Module, tolerance: float, when: str) -> None:
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        equal = (
            torch.equal(mine, theirs)
            if tolerance == 0
            else torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)
        )
        _require(
            equal,
            f"a rank that trains alone differs from the plain optimizer {when}: {_few(written([mine], [mine]))} instead of "
            f"{_few(written([theirs], [theirs]))}.",
        )


# -- 2 -------------------------------------------------------------------------------------------------------------------


def anchor_is_the_same_everywhere(rule: Rule, seed: int = 0) -> None:
    """The anchor is bitwise equal on all ranks at the same round, and so is the model after ``drain()``."""
    size = ambient_ring().size
    even = Plan.even(size, 8, optimizer="momentum", seed=seed)
    halves = tuple((*acts[:4], Act(kind="drain"), *acts[4:]) for acts in even.acts)
    diaries = play(rule, Plan(halves, even.optimizer, seed=seed))
    _anchors_agree(diaries)
    landed = {rounds for rounds, _ in diaries[0].anchors}
    _require(len(landed) > 2, f"only {len(landed)} different anchors were seen, which proves nothing.")


def _anchors_agree(diaries: Sequence[Diary]) -> None:
    seen: dict[int, tuple[str, int]] = {}
    for rank, diary in enumerate(diaries):
        for rounds, found in diary.anchors:
            expected, other = seen.setdefault(rounds, (found, rank))
            _require(found == expected, f"after {rounds} rounds the anchors of ranks {other} and {rank} differ.")
    # Ranks drain together, but one that joined early drains less often.
    for rank, diary in enumerate(diaries):
        _require(diary.drained[-1] == diaries[0].drained[-1], f"the models of ranks 0 and {rank} differ after join().")
        _require(
            diary.last == diaries[0].last and all(map(math.isfinite, diary.last)),
            f"the last model of rank {rank} is not finite, or is not rank 0's.",
        )
    drains = [diary.drained[:-1] for diary in diaries]
    for rank, drained in enumerate(drains):
        for number, (found, expected) in enumerate(zip(drained, drains[0], strict=False)):
            _require(found == expected, f"the models of ranks 0 and {rank} differ after drain() number {number + 1}.")


# -- 3 -------------------------------------------------------------------------------------------------------------------


def nothing_is_lost_or_counted_twice(rule: Rule, seed: int = 0) -> None:
    """Delta rules: last anchor - first anchor = sum of the averaged deltas. All rules: every step lands exactly once."""
    size = ambient_ring().size
    for optimizer in ("momentum", "adam"):
        diaries = play(rule, _uneven(size, seed, optimizer=optimizer))
        _steps_land_once(diaries)
        if rule.payload == "delta":
            _deltas_are_conserved(rule, diaries)


def _uneven(size: int, seed: int, **choices: object) -> Plan:
    """Ranks of different speeds run out of data at different times; the last one first."""
    even = Plan.even(size, 9, seed=seed, **choices)
    return Plan(
        tuple(acts[: 9 - 3 * rank // max(size - 1, 1)] for rank, acts in enumerate(even.acts)),
        even.optimizer,
        even.scaled,
        even.budget,
        seed,
    )


def _steps_land_once(diaries: Sequence[Diary]) -> None:
    for rank, diary in enumerate(diaries):
        sent = sum(record.local_steps for record in diary.rounds)
        _require(sent == len(diary.steps), f"rank {rank} took {len(diary.steps)} local steps and sent {sent}.")
        rounds = Counter(record.round for record in diary.steps)
        for record in diary.rounds:
            _require(
                rounds[record.round] == record.local_steps,
                f"round {record.round} of rank {rank} carried {record.local_steps} local steps, not the "
                f"{rounds[record.round]} that were taken for it.",
            )
    total = sum(len(diary.steps) for diary in diaries)
    for rank, diary in enumerate(diaries):
        rounds_landed, steps, _ = diary.progress
        _require(steps == total, f"rank {rank} has seen {steps} local steps land, of {total} taken by all ranks.")
        _require(
            rounds_landed == len(diary.rounds), f"rank {rank} counts {rounds_landed} rounds, not {len(diary.rounds)}."
        )


def _windows(diary: Diary) -> dict[int, list[int]]:
    """The local steps that each round carries."""
    windows: dict[int, list[int]] = defaultdict(list)
    for index, record in enumerate(diary.steps):
        windows[record.round].append(index)
    return windows


def _deltas_are_conserved(rule: Rule, diaries: Sequence[Diary]) -> None:
    moved = np.zeros(len(diaries[0].first))
    windows = [_windows(diary) for diary in diaries]
    for number, record in enumerate(diaries[0].rounds):
        deltas, steps, samples = [], [], []
        for diary, window in zip(diaries, windows, strict=True):
            mine = window.get(number, [])
            with np.errstate(invalid="ignore"):
                delta = np.sum([diary.moves[i] for i in mine], axis=0)
            if mine and np.isfinite(delta).all():  # else it counts as empty
                deltas.append(delta)
                steps.append(len(mine))
                samples.append(sum(diary.steps[i].samples for i in mine))
        if not deltas or (rule.weighting == "samples" and not sum(samples)):
            continue
        mean_steps = sum(steps) / len(steps)
        if rule.weighting in ("steps", "sum"):
            weights = [1.0] * len(steps)
        elif rule.weighting == "ranks":
            weights = [mean_steps / k for k in steps]
        else:
            mean_samples = sum(samples) / sum(steps)
            weights = [b / k / mean_samples for b, k in zip(samples, steps, strict=True)]
        divisor = 1 if rule.weighting == "sum" else record.training
        moved += sum(w * d for w, d in zip(weights, deltas, strict=True)) / divisor
    first, last = np.array(diaries[0].first), np.array(diaries[0].last)
    _close((last - first).tolist(), moved.tolist(), "the anchor did not move by the sum of the averaged deltas")


# -- 4 -------------------------------------------------------------------------------------------------------------------


def collectives_match_and_nobody_hangs(rule: Rule, seed: int = 0) -> None:
    """The same collectives in the same order, when ranks run out of data, overflow or stop at different times."""
    size = ambient_ring().size
    even = Plan.even(size, 9, seed=seed)
    last = even.acts[-1]
    overflowing = (*last[:2], Act(last[2].seconds, overflow=True), *last[3:])
    stopping = (*last[:2], Act(kind="stop"), *last[2:])
    plans = {
        "run out of data at different times": _uneven(size, seed),
        "include one without any data": Plan((*even.acts[:-1], ()), seed=seed),
        "include one with an infinite gradient": Plan((*even.acts[:-1], overflowing), seed=seed),
        "include one whose gradient scaler overflows": Plan((*even.acts[:-1], overflowing), scaled=True, seed=seed),
        "stop because the last one asks for it": Plan((*even.acts[:-1], stopping), seed=seed),
        "stop after a number of rounds": Plan(even.acts, budget=Budget(rounds=rule.most_in_flight + 2), seed=seed),
    }
    for case, plan in plans.items():
        try:
            diaries = play(rule, plan)
            _collectives_agree(diaries)
            _anchors_agree(diaries)
            if plan.budget is not None and plan.budget.rounds is not None:
                rounds = diaries[0].progress[0]
                _require(rounds <= plan.budget.rounds, f"{rounds} rounds were run, {plan.budget.rounds} were allowed.")
        except PromiseBroken as broken:
            raise PromiseBroken(f"when ranks {case}: {broken}") from None


def _collectives_agree(diaries: Sequence[Diary]) -> None:
    first = diaries[0]
    for rank, diary in enumerate(diaries):
        for number, (mine, theirs) in enumerate(zip(diary.sent, first.sent, strict=False)):
            _require(mine == theirs, f"collective {number} is {mine!r} on rank {rank}, and {theirs!r} on rank 0.")
        _require(
            len(diary.sent) == len(first.sent),
            f"rank {rank} sent {len(diary.sent)} collectives, and rank 0 sent {len(first.sent)}.",
        )
        told = [(r.round, r.steps, r.samples, r.contributors, r.training) for r in diary.rounds]
        expected = [(r.round, r.steps, r.samples, r.contributors, r.training) for r in first.rounds]
        _require(told == expected, f"ranks 0 and {rank} were told different things of the same rounds.")
        _require(
            [record.round for record in diary.rounds] == list(range(len(diary.rounds))),
            f"rank {rank} did not land the rounds in their order.",
        )
        _require(
            diary.last_joiner == first.last_joiner, f"join() named rank {diary.last_joiner} on rank {rank} as the last."
        )


# -- 5 -------------------------------------------------------------------------------------------------------------------


def samples_count_alike(rule: Rule, seed: int = 0) -> None:
    """Gradient rules: the same samples, split differently, give the same averaged gradient; an empty rank disturbs nothing.

    Delta rules promise nothing here.
    """
    if rule.payload != "gradient":
        return
    ring = ambient_ring()
    _averages_are_exact(play(rule, _uneven(ring.size, seed)))
    pool = torch.cat([micro_batch(seed, rank, 0, 7) for rank in range(ring.size)])
    model = make_model()
    torch.autograd.backward(loss_of(model, pool))
    parameters = list(model.parameters())
    exact = written([parameter.grad for parameter in parameters], parameters)
    room = next(n for n in itertools.count(1) if rule.trigger.closes(Moment(n)))
    for case, split in _splits(len(pool), ring.size, room).items():
        applied = _apply_split(rule, pool, split[ring.rank])
        payload = repr(applied).encode()
        for rank, theirs in enumerate(ring.gather(payload, "slackring.testing.split")):
            _require(theirs == payload, f"ranks {rank} and {ring.rank} applied different gradients.")
        _require(len(applied) == 1, f"one round with samples made {len(applied)} optimizer steps.")
        _close(applied[0], exact, f"the averaged gradient of the same {len(pool)} samples, split {case}")


def _splits(total: int, size: int, room: int) -> dict[str, list[list[tuple[int, int]]]]:
    """Ways to give each rank micro-batches (first and past-the-last sample), at most `room` of them."""

    def cut(bounds: Sequence[int], pieces: Callable[[int], int]) -> list[list[tuple[int, int]]]:
        split = []
        for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
            count = min(pieces(rank), stop - start)
            marks = [start + (stop - start) * i // count for i in range(count + 1)] if count else []
            split.append(list(itertools.pairwise(marks)))
        return split

    even = [total * rank // size for rank in range(size + 1)]
    steep = [0, *(total - total // 2**rank for rank in range(1, size)), total]
    shy = [0, *([total] * size)]
    return {
        "evenly": cut(even, lambda _: room),
        "unevenly": cut(steep, lambda _: room),
        "into different numbers of micro-batches": cut(even, lambda rank: 1 + rank % room),
        "to one rank, the others empty": cut(shy, lambda _: room),
    }


def _apply_split(rule: Rule, pool: torch.Tensor, batches: Sequence[tuple[int, int]]) -> list[list[float]]:
    model = make_model()
    parameters = list(model.parameters())
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), rule)
    applied: list[list[float]] = []

    def note(*_: object) -> None:
        if any(group["params"] for group in optimizer.param_groups):
            applied.append(written([parameter.grad for parameter in parameters], parameters))

    handle = optimizer.register_step_pre_hook(note)
    for start, stop in batches:
        optimizer.set_samples(stop - start)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, pool[start:stop]))
        optimizer.step(samples=stop - start)
    optimizer.drain()
    handle.remove()
    return applied


def _averages_are_exact(diaries: Sequence[Diary]) -> None:
    """What went through the optimizer, round by round, is the mean over all samples that were in time for the round."""
    windows = [_windows(diary) for diary in diaries]
    for rank, diary in enumerate(diaries):
        _require(diary.applied == diaries[0].applied, f"ranks 0 and {rank} applied different gradients.")
    applied = iter(diaries[0].applied)
    pending = next(applied, None)
    for number in range(len(diaries[0].rounds)):
        expected, excluded = _expected_average(diaries, windows, number)
        if (
            expected is not None
            and pending is not None
            and np.allclose(pending, expected, rtol=_ROUNDING, atol=_ROUNDING)
        ):
            pending = next(applied, None)
        elif expected is not None and not excluded:
            found = "nothing" if pending is None else _few(pending)
            raise PromiseBroken(
                f"round {number} applied {found}, and the mean over all its samples is {_few(expected)}."
            )
    _require(pending is None, "more gradients were applied than rounds had samples.")


def _expected_average(
    diaries: Sequence[Diary], windows: Sequence[dict[int, list[int]]], number: int
) -> tuple[list[float] | None, bool]:
    """Mean gradient of a round, without what was not finite; and whether there was any such thing.

    A rule may skip a round in which something overflowed, as long as all ranks do.
    """
    total, samples, excluded = np.zeros(len(diaries[0].first)), 0.0, False
    for diary, window in zip(diaries, windows, strict=True):
        mine, mine_samples = np.zeros(len(total)), 0.0
        for i in window.get(number, []):
            if diary.steps[i].samples == 0:  # a gradient scaler saw it overflow
                excluded = True
                continue
            with np.errstate(invalid="ignore"):
                mine += diary.steps[i].samples * np.array(diary.gradients[i])
            mine_samples += diary.steps[i].samples
        if np.isfinite(mine).all():
            total, samples = total + mine, samples + mine_samples
        else:
            excluded = True
    return ((total / samples).tolist() if samples else None), excluded


# -- 6 -------------------------------------------------------------------------------------------------------------------


def time_is_measured(rule: Rule, seed: int = 0) -> None:
    """For each rank wall = compute + blocked + bookkeeping; on a virtual clock, each to the nanosecond."""
    diaries = play(rule, Plan.even(ambient_ring().size, 8, seed=seed))
    _times_add_up(diaries)


def _times_add_up(diaries: Sequence[Diary]) -> None:
    for rank, diary in enumerate(diaries):
        end = -math.inf
        for record, planned in zip(diary.steps, diary.planned, strict=False):
            where = f"local step {record.step} of rank {rank}"
            wall = record.end - record.start
            parts = record.compute + record.blocked + record.bookkeeping
            _require(abs(wall - parts) < _CLOCK, f"{where} took {wall} s, but its parts add up to {parts} s.")
            smallest = min(record.compute - record.injected, record.injected, record.blocked, record.bookkeeping)
            _require(smallest > -_CLOCK, f"{where} has a part below zero: {record}.")
            _require(record.start > end - _CLOCK, f"{where} starts before the step before it ends.")
            _require(
                record.compute > planned - _CLOCK, f"{where} computed {record.compute} s, {planned} s were injected."
            )
            if diary.kind == "virtual":
                _require(
                    abs(record.compute - planned) < _CLOCK,
                    f"{where} computed {record.compute} s instead of {planned} s.",
                )
                _require(
                    record.bookkeeping < _CLOCK, f"{where} counts virtual time as bookkeeping: {record.bookkeeping} s."
                )
            end = record.end
        in_steps = sum(record.blocked for record in diary.steps)
        in_rounds = sum(record.blocked for record in diary.rounds)
        _require(
            in_steps < in_rounds + _CLOCK,
            f"rank {rank} was blocked {in_steps} s in steps, but {in_rounds} s in all rounds.",
        )
        for trip in diary.rounds:
            flight = trip.landed - trip.launched
            _require(
                -_CLOCK < trip.blocked < flight + _CLOCK, f"round {trip.round} blocked rank {rank} longer than it flew."
            )


# -- 7 -------------------------------------------------------------------------------------------------------------------


def disagreement_is_named(rule: Rule, seed: int = 0) -> None:
    """Ranks that disagree learn so before the first round, in an error that names the rank."""
    ring = ambient_ring()
    odd = ring.size - 1
    if odd == 0:
        return
    for fact in (
        "the rule",
        "a shape",
        "a dtype",
        "the number of parameters",
        "a name",
        "the budget",
        "initial values",
    ):
        told = _disagree(rule, fact, is_odd=ring.rank == odd)
        for rank, text in enumerate(ring.gather(told.encode(), "slackring.testing.told")):
            _require(
                f"rank {odd} has" in text.decode(),
                f"ranks differed in {fact}, and rank {rank} was told {text.decode()!r}, which does not name rank {odd}.",
            )


def _disagree(rule: Rule, fact: str, is_odd: bool) -> str:
    model, budget = make_model(), None
    if is_odd:
        if fact == "the rule":
            rule = LocalSGD(steps=7) if isinstance(rule, BSP) else BSP()
        elif fact == "a shape":
            model[0], model[2] = torch.nn.Linear(3, 5).double(), torch.nn.Linear(5, 1).double()
        elif fact == "a dtype":
            model = make_model(torch.float32)
        elif fact == "the number of parameters":
            model[2].register_parameter("bias", None)
        elif fact == "the budget":
            budget = Budget(rounds=5)
        elif fact == "initial values":
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-12
    names = dict(model.named_parameters())
    if is_odd and fact == "a name":
        names = {f"module.{name}": parameter for name, parameter in names.items()}
    ring = WatchedRing(ambient_ring())
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), rule, named_parameters=names.items(), budget=budget, ring=ring
    )
    torch.autograd.backward(loss_of(model, micro_batch(0, 0, 0, 2, next(model.parameters()).dtype)))
    try:
        optimizer.step(samples=2)
    except AgreementError as error:
        return str(error) if not ring.sent else "an error, but after a round had been launched"
    return "nothing"


# -- 8 -------------------------------------------------------------------------------------------------------------------


def any_interleaving_works(rule: Rule, seed: int = 0) -> None:
    """All of the above hold for any interleaving of step times, leaves, overflows, drains, stops, looks and collectives."""
    diaries = play(rule, draw_plan(seed, ambient_ring().size))
    _collectives_agree(diaries)
    _anchors_agree(diaries)
    _steps_land_once(diaries)
    _times_add_up(diaries)
    if rule.payload == "delta":
        _deltas_are_conserved(rule, diaries)
    else:
        _averages_are_exact(diaries)


PROMISES: dict[str, Callable[[Rule, int], None]] = {
    function.__name__: function
    for function in (
        size_one_is_the_plain_optimizer,
        anchor_is_the_same_everywhere,
        nothing_is_lost_or_counted_twice,
        collectives_match_and_nobody_hangs,
        samples_count_alike,
        time_is_measured,
        disagreement_is_named,
        any_interleaving_works,
    )
}
"""What every rule promises, by name, in the order of the promises; call each on every rank of a ring, with a rule and a seed."""
