"""What users report of other packages that only real ranks can show; each test is named after its source."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest
import torch
from tests.multirank.launchers import horovodrun, torchrun

import slackring as sr
from slackring.ring import polling

hvd = pytest.importorskip("horovod.torch")

OPTIMIZERS = {
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "SGD with momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, betas=(0.8, 0.9 + lr)),
    "AdamW, amsgrad": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, amsgrad=True),
    "Adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr),
    "SparseAdam": lambda parameters, lr: torch.optim.SparseAdam(parameters, lr=lr),
}


def step(optimizer, parameter):
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step()


def step_tables(optimizer, tables):
    optimizer.zero_grad()
    sum(table(torch.tensor([hvd.rank(), 2])).sum() for table in tables).backward()
    optimizer.step()


def broadcast_state(rule, trained, frozen):
    """By optimizer: its settings and state in bits, after the broadcast, and again after training under a rule."""
    found = {}
    for name, make in OPTIMIZERS.items():
        sparse = name == "SparseAdam"
        if sparse and sr.parse_rule(rule).payload == "gradient":
            continue
        tables = [torch.nn.Embedding(4, 2, sparse=sparse) for _ in range(4)]
        for table in tables[: 2 * frozen]:
            table.weight.requires_grad_(False)
        optimizer = make([table.weight for table in tables], 0.01 * (1 + hvd.rank()))
        for _ in range(3 * trained if hvd.rank() == 0 else 0):
            step_tables(optimizer, tables)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for table in tables:
            hvd.broadcast_parameters(table.state_dict(), root_rank=0)
        if name == "SGD":
            optimizer.param_groups[0]["lr"] = 0.01  # Horovod sends nothing of an optimizer without state
        before = repr(optimizer.state_dict())
        optimizer = sr.DistributedOptimizer(optimizer, rule)
        for _ in range(3):
            step_tables(optimizer, tables)
        optimizer.drain()
        found[name] = before, [table.weight.detach() for table in tables], optimizer.param_groups[0]["lr"]
    return found


@pytest.mark.parametrize(
    ("rule", "trained", "frozen"),  # each two of them in all combinations
    [("bsp", False, False), ("bsp", True, True), ("losp:k_max=2", True, False), ("losp:k_max=2", False, True)],
    ids=["bsp-fresh-all", "bsp-after 3 steps-half frozen", "losp-after 3 steps-all", "losp-fresh-half frozen"],
)
def test_horovod_392_526_1608_a_broadcast_optimizer_state_is_the_same_everywhere(ranks, size, rule, trained, frozen):
    """https://github.com/horovod/horovod/issues/392 and others: 6 optimizers, with rank 0's lr 0.01, betas and None."""
    answers = ranks(size).run(broadcast_state, rule, trained, frozen)
    for name, (before, weights, lr) in answers[0].items():
        assert lr == 0.01, name
        for answer in answers[1:]:
            assert answer[name][0] == before, name
            assert answer[name][2] == lr, name
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(answer[name][1], weights, strict=True)), name


def stay_away(folder):
    """The last rank stays away until all others have said that they wait; returns what this rank has said, and its steps."""
    rank, last = hvd.rank(), hvd.size() - 1
    said, handler = [], logging.Handler()
    x = torch.nn.Parameter(torch.zeros(1))
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "bsp")
    optimizer.drain()

    def note(record):
        said.append(record.getMessage())
        (Path(folder) / f"{rank} waits").touch()

    handler.emit = note
    logging.getLogger("slackring").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polling, "_PATIENCE", 0.3)
        while rank == last and len(list(Path(folder).iterdir())) < last:
            time.sleep(0.01)
        for _ in range(3):
            step(optimizer, x)
    logging.getLogger("slackring").removeHandler(handler)
    optimizer.join()
    return said, optimizer.progress.steps


def test_horovod_457_ranks_that_wait_say_for_which_round_and_go_on_when_it_comes(ranks, size, tmp_path):
    """https://github.com/horovod/horovod/issues/457, 2107 and 3950: each names itself and the round; all then exit."""
    *waited, (_, steps) = ranks(size).run(stay_away, str(tmp_path))
    for rank, (said, steps_seen) in enumerate(waited):
        assert re.match(
            rf"rank {rank} has waited \d+ s in 'slackring\.\d+\.0', which another rank has not entered", said[0]
        )
        assert steps_seen == steps == 3 * size


EXIT = """
import time, torch, slackring as sr
{init}
x = torch.nn.Parameter(torch.zeros(4))
optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), {rule!r})
for _ in range(5):
    optimizer.zero_grad()
    x.sum().backward()
    optimizer.step()
    if sr.ring().rank == 0:
        time.sleep(0.3)
print("the end")
"""
INIT = {
    horovodrun: "import horovod.torch as hvd; hvd.init(); sr.ring(); hvd.shutdown(); hvd.init()",
    torchrun: "torch.distributed.init_process_group('gloo')",
}


@pytest.mark.parametrize("start", INIT)
@pytest.mark.parametrize("rule", ["relaxed:steps=1,staleness=2,compensation=1", "bsp"])
def test_bagua_110_a_script_ends_cleanly_without_a_call(start, rule, tmp_path):
    """https://github.com/BaguaSys/bagua/pull/110: rounds are in flight at the end; exit code 0, and no abort() is needed."""
    script = tmp_path / "script.py"
    script.write_text(EXIT.format(init=INIT[start], rule=rule))
    done = start(2, str(script), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the end") == 2
