"""Runs on the parameter server: in the form of runs on a ring, and beside them."""

from __future__ import annotations

import dataclasses
import io
import math
import signal

import pytest
import torch
from rich.console import Console

from slackring.errors import DivergedError, RuleError, SpecError
from slackring.lab import serve
from slackring.lab.checkpoint import Checkpoints
from slackring.lab.choices import parse_choice, parse_choices
from slackring.lab.compare import compare
from slackring.lab.comparison import CompareConfig, Comparison, load_comparison
from slackring.lab.config import TrainConfig
from slackring.lab.dealt import Dealt
from slackring.lab.interrupt import Interrupt
from slackring.lab.report import print_comparison, print_run
from slackring.lab.runs import load_run, save_run
from slackring.lab.tasks import Task, load_task
from slackring.lab.timeline import lanes
from slackring.lab.train import train, train_virtual
from slackring.ring.single import SingleRing
from slackring.server import POLICIES

CONFIG = TrainConfig(
    task="digits", step_time=0.1, straggler="persistent:ranks=2+3,factor=1.3+4", seconds=8.0, seed=3, lr=0.2
)


def on_server(policy, **changed):
    return train_virtual(dataclasses.replace(CONFIG, rule=policy, **changed), 4)


# -- choosing --------------------------------------------------------------------------------------------------------------


def test_rules_and_policies_are_named_side_by_side():
    assert list(map(str, parse_choices("bsp,server/bsp,server/ssp:staleness=1,losp:k_min=2,k_max=4"))) == [
        *("bsp", "server/bsp", "server/ssp:staleness=1", "losp:k_min=2,k_max=4")
    ]
    with pytest.raises(RuleError, match="there is no rule named 'server/sps'; did you mean 'server/ssp'"):
        parse_choice("server/sps")


@pytest.mark.parametrize(("rule", "lr"), [("server/bsp", 0.8), ("server/asp", 0.2), ("bsp", 0.8), ("losp", 0.2)])
def test_a_rate_that_is_not_given_grows_with_the_ranks_where_gradients_are_averaged(rule, lr):
    assert TrainConfig(rule=rule, seconds=1.0).with_lr(4).lr == pytest.approx(lr)


def test_real_ranks_have_no_parameter_server():
    with pytest.raises(SpecError, match=r"rule 'server/asp' needs a parameter server.*add --virtual"):
        train(dataclasses.replace(CONFIG, rule="server/asp"), ring=SingleRing())
    with pytest.raises(SpecError, match=r"rule 'server/asp' needs a parameter server.*add --virtual"):
        CompareConfig(CONFIG, ("bsp", "server/asp"))


def test_a_parameter_server_takes_no_checkpoints():
    with pytest.raises(SpecError, match="a parameter server takes no checkpoints; leave --checkpoint-every out"):
        train_virtual(dataclasses.replace(CONFIG, rule="server/asp"), 4, checkpoints=Checkpoints(every=1.0))


# -- one run ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_and_accounts_for_its_time(policy, tmp_path):
    run = on_server(policy, network="latency=0.01,bandwidth=1e6")
    steps, rounds, curve, summary = run.steps, run.rounds, run.curve, run.summary
    assert summary.final_accuracy == curve["accuracy"].iloc[-1] > 0.5
    assert curve["loss"].iloc[-1] < 0.9 * math.log(10)  # of guessing
    wall = (steps["end"] - steps["start"]).to_numpy()
    assert wall == pytest.approx(steps[["compute", "blocked", "bookkeeping"]].sum(axis=1).to_numpy(), abs=1e-9)
    for _, mine in steps.groupby("rank"):
        assert mine["start"].to_numpy()[1:] == pytest.approx(mine["end"].to_numpy()[:-1])
    # What the curve ends with is what all ranks did.
    assert curve["steps"].iloc[-1] == len(steps) == summary.steps == len(rounds)
    assert curve["samples"].iloc[-1] == steps["samples"].sum() == 32 * len(steps)
    assert curve["rounds"].iloc[-1] == summary.rounds == rounds["round"].nunique()
    assert curve["seconds"].is_monotonic_increasing
    assert rounds["local_samples"].sum() == 32 * len(rounds)
    assert (rounds.groupby("round")["steps"].first() == rounds.groupby("round").size()).all()
    assert set(lanes(steps, rounds)["activity"]) >= {"computing", "communicating"}
    folder = save_run(run, tmp_path, "run")
    assert load_run(folder).summary == summary
    assert load_run(folder).facts["updates"] == run.facts["updates"] > 0
    with io.StringIO() as text:
        print_run(run, str(folder), Console(file=text, width=120))
        assert f"{steps['staleness'].max()}" in text.getvalue()
        assert "4 (virtual server)" in text.getvalue()


def test_bsp_is_the_rings_bsp_in_time_and_to_rounding_in_what_it_learns():
    ring, server = on_server("bsp"), on_server("server/bsp")
    columns = ["rank", "step", "round", "start", "end", "compute", "blocked", "samples"]
    assert server.steps[columns].to_numpy() == pytest.approx(ring.steps[columns].to_numpy())
    assert server.steps["loss"].to_numpy() == pytest.approx(ring.steps["loss"].to_numpy(), rel=1e-3)
    assert server.curve["seconds"].to_numpy() == pytest.approx(ring.curve["seconds"].to_numpy())
    assert server.summary.wait_share == pytest.approx(ring.summary.wait_share)
    assert server.summary.nbytes <= ring.summary.nbytes  # a ring's round carries its control block, too


def test_waits_are_what_the_server_held():
    run = on_server("server/ssp:staleness=1", network="latency=0.02")
    held = run.steps["blocked"] - 2 * 0.02
    share = held.groupby(run.steps["rank"]).sum() / run.summary.seconds
    assert run.summary.wait_share == pytest.approx(share.to_list(), abs=1e-6)
    assert run.summary.wait_share[0] > 0.6 > 0.01 > run.summary.wait_share[3]


def test_asp_meets_the_no_wait_limit_and_elastic_bsp_comes_near_it():
    asp, elastic, bsp = (on_server(f"server/{name}").summary for name in ("asp", "elastic_bsp", "bsp"))
    assert asp.limit_share == pytest.approx(1.0, abs=0.02)
    assert elastic.limit_share > 0.95
    assert bsp.limit_share == pytest.approx(0.331, abs=0.002)


def test_it_ends_at_the_target_and_on_a_signal():
    reached = on_server("server/asp", target=0.5, stop_at_target=True).summary
    assert reached.seconds_to_target is not None
    assert reached.seconds < reached.seconds_to_target + 0.41  # a step of the slowest
    interrupt = Interrupt()
    interrupt.signal = signal.SIGTERM
    cut = train_virtual(dataclasses.replace(CONFIG, rule="server/asp"), 4, interrupt=interrupt).summary
    assert cut.interrupted
    assert cut.seconds < 0.41


def test_a_run_that_diverges_says_where(monkeypatch):
    task = load_task("digits")
    monkeypatch.setattr(
        serve, "load_task", lambda text: dataclasses.replace(task, loss=lambda x, y: x.sum() * math.nan)
    )
    with pytest.raises(DivergedError, match="the loss of worker 0 was not a finite number at its local step 0"):
        on_server("server/asp")


def test_workers_share_what_a_task_deals(monkeypatch):
    """Each epoch once over all workers, the fast ones getting more of it."""
    data = torch.utils.data.TensorDataset(torch.arange(60.0).reshape(60, 1), torch.zeros(60, 1))
    seen = []

    def loss(output, labels):
        if torch.is_grad_enabled():
            seen.append(len(labels))
        return output.square().mean()

    task = Task(
        name="dealt",
        model=lambda: torch.nn.Linear(1, 1),
        loss=loss,
        loaders=lambda batch_size, rank, size, seed: (
            Dealt(data, batch_size, seed),
            [(data.tensors[0], data.tensors[1])],
        ),
        metric=lambda model, batches: 0.0,
    )
    monkeypatch.setattr(serve, "load_task", lambda text: task)
    run = on_server("server/asp", batch_size=8, lr=1e-5, seconds=None, samples=120)
    assert seen[:8] == seen[8:16] == [8] * 7 + [4]
    taken = run.steps.groupby("rank").size()
    assert taken[0] == taken[1] > 2 * taken[3]


# -- beside the ring -------------------------------------------------------------------------------------------------------


def test_server_and_ring_stand_in_one_table(tmp_path):
    rules = ("bsp", "server/bsp", "server/ssp:staleness=1")
    base = dataclasses.replace(CONFIG, seconds=3.0, target=0.3)
    config = CompareConfig(base, rules, lr_grid=(0.2, 0.8), tuning_runs=1, virtual=True)
    comparison = compare(config, tmp_path, name="one", say=lambda line: None)
    assert [row.rule for row in comparison.rows] == list(rules)
    assert Comparison.from_json(comparison.to_json()) == load_comparison(comparison.folder) == comparison
    ring, server, _ = comparison.rows
    assert server.speedup == ring.speedup == 1.0
    with io.StringIO() as text:
        print_comparison(comparison, Console(file=text, width=160))
        lines = [line.split()[0] for line in text.getvalue().splitlines() if line.split()]
    assert set(rules) <= set(lines)
    assert (comparison.folder / "accuracy.png").exists()
