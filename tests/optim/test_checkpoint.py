"""Checkpoints: what a rank saves restores training exactly, and loads into plain optimizers and back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import slackring as sr
from slackring.errors import AgreementError, SlackringError, UnsupportedError

RULES = [
    "bsp",
    "bsp:accumulate=3",
    "local_sgd:steps=3",
    "cocod:steps=3",
    "anytime:compute_time=0.35",
    "anytime:compute_time=0.25,staleness=2",
    "relaxed:payload=gradient,steps=1,staleness=1",
    "relaxed:payload=gradient,steps=2,staleness=3",
    "relaxed:steps=2,staleness=1,compensation=auto",
    "relaxed:steps=2,staleness=3,compensation=0.5",
    "losp",
    "elastic_bsp",
    "elastic_bsp:payload=gradient,smoothing=0.5",
]
STEPS = 23


def start(
    rule: str, dtype: torch.dtype = torch.float64
) -> tuple[torch.nn.Module, sr.RelaxedOptimizer, torch.Generator]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)).to(dtype)
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = sr.DistributedOptimizer(
        plain, rule, named_parameters=model.named_parameters(), named_buffers=model.named_buffers()
    )
    return model, optimizer, torch.Generator().manual_seed(sr.ring().rank)


def steps(model: torch.nn.Module, optimizer: sr.RelaxedOptimizer, data: torch.Generator, number: int) -> None:
    for _ in range(number):
        x = torch.randn(6, 4, generator=data, dtype=torch.float64)
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step(samples=6)


def end(model: torch.nn.Module, optimizer: sr.RelaxedOptimizer) -> list[torch.Tensor]:
    optimizer.drain()
    return [tensor.clone() for tensor in model.state_dict().values()]


def save(model: torch.nn.Module, optimizer: sr.RelaxedOptimizer, data: torch.Generator) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.get_state()}, file)
    file.seek(0)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    return saved


def until_killed(rule: str, killed_at: int) -> dict[str, Any]:
    model, optimizer, data = start(rule)
    steps(model, optimizer, data, killed_at)
    return save(model, optimizer, data)


def undisturbed(rule: str, dtype: torch.dtype, saves_at: tuple[int, ...]) -> tuple[list[torch.Tensor], list[Any]]:
    model, optimizer, data = start(rule, dtype)
    saves = []
    for number in range(STEPS):
        if number in saves_at:
            saves.append(save(model, optimizer, data))
        steps(model, optimizer, data, 1)
    return end(model, optimizer), saves


def resumed(rule: str, saved: list[dict[str, Any]], killed_at: int, dtype: torch.dtype) -> list[torch.Tensor]:
    model, optimizer, data = start(rule, dtype)
    mine = copy.deepcopy(saved[sr.ring().rank])
    model.load_state_dict(mine["model"])
    optimizer.load_state_dict(mine["optimizer"])
    data.set_state(mine["data"])
    steps(model, optimizer, data, STEPS - killed_at)
    return end(model, optimizer)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("dtype", "saves_at"), [(torch.float64, (1, 7, 12, 16)), (torch.bfloat16, (7,)), (torch.float16, (12,))]
)
def test_a_resumed_run_ends_with_the_bits_of_the_undisturbed_one(
    rule: str, dtype: torch.dtype, saves_at: tuple[int, ...]
) -> None:
    cluster = sr.VirtualCluster(3)
    by_rank = cluster.run(undisturbed, rule, dtype, saves_at)
    ends = []
    for place, killed_at in enumerate(saves_at):
        saved = [saves[place] for _, saves in by_rank]
        ends.append(cluster.run(resumed, rule, saved, killed_at, dtype))
    if dtype == torch.float64:  # saving itself changes nothing
        ends.append([end for end, _ in cluster.run(undisturbed, rule, dtype, ())])
    for found in ends:
        for mine, (theirs, _) in zip(found, by_rank, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("rule", ["losp", "local_sgd:steps=3", "relaxed:steps=2,staleness=3,compensation=0.5"])
def test_the_dict_of_rank_0_alone_restores_the_anchor_everywhere(rule: str) -> None:
    def anchor_after(saves: list[dict[str, Any]]) -> list[torch.Tensor]:
        model, optimizer, _ = start(rule)
        optimizer.load_state_dict(copy.deepcopy(saves[0]["optimizer"]))
        optimizer.drain()  # starts, restores and lands nothing new
        return [parameter.detach().clone() for parameter in model.parameters()]

    def consensus_of(killed_at: int) -> list[torch.Tensor]:
        model, optimizer, data = start(rule)
        steps(model, optimizer, data, killed_at)
        with optimizer.consensus():
            return [parameter.detach().clone() for parameter in model.parameters()]

    cluster = sr.VirtualCluster(3)
    saves = cluster.run(until_killed, rule, 10)
    expected = cluster.run(consensus_of, 10)[0]
    for found in cluster.run(anchor_after, saves):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_plain_optimizers_dict_loads_and_ours_loads_into_a_plain_one() -> None:
    model = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    plain.step()
    other = torch.nn.Linear(3, 1)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.1), "losp")
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(optimizer.state) == 2
    other(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    plain.load_state_dict(optimizer.state_dict())
    assert torch.equal(plain.state[model.weight]["momentum_buffer"], optimizer.state[other.weight]["momentum_buffer"])


@pytest.mark.parametrize("rule", RULES)
def test_training_that_was_stopped_can_be_taken_up_again(rule: str) -> None:
    def stopped() -> dict[str, Any]:
        model, optimizer, data = start(rule)
        while not optimizer.progress.stop:
            steps(model, optimizer, data, 1)
            if sr.ring().rank == 1 and optimizer.progress.rounds == 2:
                optimizer.request_stop()
        optimizer.join()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def taken_up(saves: list[dict[str, Any]]) -> tuple[int, int]:
        model, optimizer, data = start(rule)
        saved = copy.deepcopy(saves[sr.ring().rank])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        steps(model, optimizer, data, 12)
        optimizer.join()
        return saved["optimizer"]["slackring"]["ending"]["progress"]["steps"], optimizer.progress.steps

    cluster = sr.VirtualCluster(3, step_time=0.1)
    for before, after in cluster.run(taken_up, cluster.run(stopped)):
        assert after == before + 3 * 12


def test_ranks_that_resume_from_different_rounds_are_told_so() -> None:
    def resume(saves: list[list[dict[str, Any]]]) -> None:
        model, optimizer, data = start("local_sgd:steps=1")
        rank = sr.ring().rank
        optimizer.load_state_dict(saves[rank == 2][rank]["optimizer"])
        steps(model, optimizer, data, 1)

    cluster = sr.VirtualCluster(3)
    saves = [cluster.run(until_killed, "local_sgd:steps=1", at) for at in (4, 5)]
    with pytest.raises(AgreementError, match=r"the checkpoint's round: rank 2 has 5, while most have 4"):
        cluster.run(resume, saves)


def test_a_dict_is_refused_while_rounds_are_open_or_of_another_payload() -> None:
    def load_in_between() -> None:
        model, optimizer, data = start("losp")
        steps(model, optimizer, data, 3)
        optimizer.load_state_dict(optimizer.state_dict())

    with pytest.raises(UnsupportedError, match="before the first step or after drain"):
        sr.VirtualCluster(2).run(load_in_between)
    saves = sr.VirtualCluster(1).run(until_killed, "bsp", 3)

    def load_other() -> None:
        _, optimizer, _ = start("losp")
        optimizer.load_state_dict(saves[0]["optimizer"])

    with pytest.raises(SlackringError, match="rule 'bsp' has no state that 'losp' can go on from"):
        sr.VirtualCluster(1).run(load_other)
