"""Training as a user writes it, on real ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.multirank.scripts import batches, flat, make_model
from torch import nn

import slackring as sr
from slackring.dask.board import Board
from slackring.dask.telemetry import Telemetry
from slackring.errors import AgreementError
from slackring.optim.ambient import stop_wish
from slackring.ring.ambient import ring as ambient

hvd = pytest.importorskip("horovod.torch")

BY_STEPS = (
    "bsp",
    "bsp:accumulate=2",
    "local_sgd:steps=3",
    "cocod:steps=2",
    "relaxed:steps=2,staleness=1",
    "relaxed:steps=1,staleness=2,compensation=0.5,weighting=samples",
    "relaxed:payload=gradient,steps=1,staleness=1",
)


def train(rule, steps, *, dtype=torch.float32, broadcast=False, wrap=sr.DistributedOptimizer):
    """The script of the README, on whatever ring there is; rank r gets r more samples in each micro-batch."""
    ring = ambient()
    model = make_model(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(optimizer, rule=rule, named_parameters=model.named_parameters())
    for x, y in batches(ring.rank, steps, 4 + ring.rank, dtype):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step(samples=len(x))
    optimizer.join()
    return flat(model).tolist(), optimizer.progress.rounds, optimizer.progress.samples


@pytest.mark.parametrize("rule", BY_STEPS)
def test_the_virtual_ring_and_horovod_give_the_same_model(ranks, size, rule):
    """To rounding; to the bit on two ranks, where no order of summing differs."""
    real = ranks(size).run(train, rule, 12, dtype=torch.float64)
    virtual = sr.VirtualCluster(size).run(train, rule, 12, dtype=torch.float64)
    assert all(answer == real[0] for answer in real)
    assert real[0][1:] == virtual[0][1:]
    tolerance = 0 if size == 2 else 1e-12
    torch.testing.assert_close(torch.tensor(real[0][0]), torch.tensor(virtual[0][0]), rtol=tolerance, atol=tolerance)


def train_by_horovod(steps):
    """The same script before migration; Horovod counts ranks alike, so all have the same samples."""
    results = []
    for relaxed in (True, False):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if relaxed:
            optimizer = sr.DistributedOptimizer(optimizer, "bsp", named_parameters=model.named_parameters())
        else:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for x, y in batches(hvd.rank(), steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append(flat(model))
        if relaxed:
            optimizer.join()
    return results


def test_bsp_is_horovods_own_optimizer(ranks, size):
    for ours, theirs in ranks(size).run(train_by_horovod, 10):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def train_from_different_models(rule):
    model = make_model(seed=hvd.rank())
    if rule is None:
        rule = "bsp" if hvd.rank() == 0 else "local_sgd"
    else:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = torch.optim.Adam(model.parameters())
    optimizer = sr.DistributedOptimizer(plain, rule, named_parameters=model.named_parameters())
    for x, y in batches(hvd.rank(), 5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step(samples=len(x))
    optimizer.drain()
    return flat(model)


@pytest.mark.parametrize("rule", ["bsp", "losp:k_max=4"])
def test_broadcast_parameters_comes_before_the_first_step(ranks, size, rule):
    models = ranks(size).run(train_from_different_models, rule)
    assert all(torch.equal(model, models[0]) for model in models)
    assert torch.isfinite(models[0]).all()


def start_apart(what):
    """What a rank is told when rank 1 differs in something; and that the ring is fine afterwards."""
    odd = hvd.rank() == 1
    model = make_model(seed=int(odd and what == "model"))
    if odd and what == "shape":
        model = nn.Linear(8, 3)
    if odd and what == "dtype":
        model = model.double()
    rule = "losp:k_max=8" if odd and what == "rule" else "losp:k_max=4"
    budget = sr.Budget(rounds=5) if odd and what == "budget" else None
    optimizer_class = torch.optim.Adam if odd and what == "optimizer" else torch.optim.SGD
    plain = optimizer_class(model.parameters(), lr=0.1)
    optimizer = sr.DistributedOptimizer(plain, rule, named_parameters=model.named_parameters(), budget=budget)
    model(torch.ones(1, 8, dtype=next(model.parameters()).dtype)).sum().backward()
    with pytest.raises(AgreementError) as caught:
        optimizer.step(samples=1)
    assert float(sr.allreduce(torch.ones(1), average=False)) == hvd.size()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "fact"),
    [
        ("rule", "rule"),
        ("model", "initial parameters (broadcast them first)"),
        ("shape", "parameters"),
        ("dtype", "parameters"),
        ("budget", "budget"),
        ("optimizer", "optimizer"),
    ],
)
def test_ranks_that_differ_learn_so(ranks, size, what, fact):
    told = ranks(size).run(start_apart, what)
    assert all(message == told[0] for message in told)
    assert told[0].startswith(f"ranks differ in {fact}: rank {'1' if size > 2 else ''}")
    assert "start every rank alike" in told[0]


def run_out_of_data(rule, use_allreduce):
    """Ranks of different speed and with different amounts of data; a metric is averaged in the middle."""
    ring = ambient()
    model = make_model()
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), rule)
    means = []
    for index, (x, y) in enumerate(batches(ring.rank, 6 + 5 * ring.rank)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        time.sleep(0.002 * (ring.size - ring.rank))
        optimizer.step(samples=len(x))
        if use_allreduce and index == 3:
            means.append(float(sr.allreduce(torch.tensor(float(ring.rank)))))
            drained = flat(model).clone()
            means.append(torch.equal(sr.broadcast(drained), drained))
    last = optimizer.join()
    first = flat(model).clone()
    # A second epoch; rank 0 has no data at all.
    for x, y in batches(ring.rank, ring.rank):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step(samples=len(x))
    again = optimizer.join()
    return last, again, means, optimizer.progress.steps, first, flat(model)


@pytest.mark.parametrize("rule", ["bsp", "osp:k_max=4", "losp:k_max=4", "cocod:steps=3", "local_sgd:steps=4"])
def test_ranks_that_run_out_of_data_at_different_times(ranks, size, rule):
    answers = ranks(size).run(run_out_of_data, rule, use_allreduce=True)
    steps = sum(6 + 5 * rank + rank for rank in range(size))
    last, again, means, landed, first, model = answers[0]
    assert (means, landed) == ([(size - 1) / 2, True], steps)
    # Who joins last depends on what the processors do meanwhile, unless every step waits for all; but all say the same.
    assert (last, again) == (size - 1, size - 1) or rule != "bsp"
    for answer in answers[1:]:
        assert answer[:4] == answers[0][:4]
        assert torch.equal(answer[4], first)
        assert torch.equal(answer[5], model)
    assert not torch.equal(first, model)


def stop_early(rule):
    """The last rank asks everyone to stop after its third step; the others would go on for ever."""
    model = make_model()
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), rule)
    steps = 0
    while not optimizer.progress.stop:
        x, y = next(batches(hvd.rank(), 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        time.sleep(0.002 * hvd.rank())
        optimizer.step(samples=len(x))
        steps += 1
        if hvd.rank() == hvd.size() - 1 and steps == 3:
            optimizer.request_stop()
    optimizer.join()
    return optimizer.progress.rounds, optimizer.progress.steps, steps, flat(model)


@pytest.mark.parametrize("rule", ["bsp", "losp:k_max=4", "local_sgd:steps=2", "relaxed:steps=1,staleness=3"])
def test_one_rank_stops_all_after_the_same_round(ranks, size, rule):
    answers = ranks(size).run(stop_early, rule)
    assert sum(answer[2] for answer in answers) == answers[0][1]
    for answer in answers[1:]:
        assert answer[:2] == answers[0][:2]
        assert torch.equal(answer[3], answers[0][3])


def overlap(accumulate):
    """What had been sent when the backward pass reached the input, and when it was over."""
    model = nn.Sequential(*[nn.Linear(1200, 1200) for _ in range(6)])  # 5.8 MB each, so a bucket each
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), f"bsp:accumulate={accumulate}")
    sent = []
    allreduce = hvd.allreduce_async_

    def watch(tensor, **options):
        sent.append(tensor.numel())
        return allreduce(tensor, **options)

    hvd.allreduce_async_ = watch
    seen = []
    try:
        for _ in range(3):
            x = torch.ones(8, 1200, requires_grad=True)
            x.register_hook(lambda _: seen.append(len(sent)))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            seen.append(len(sent))
            optimizer.step(samples=8)
            seen.append(len(sent))
            sent.clear()
    finally:
        hvd.allreduce_async_ = allreduce
    optimizer.join()
    return seen


def test_bsp_sends_buckets_while_the_backward_pass_runs(ranks, size):
    for seen in ranks(size).run(overlap, 1):
        # The first step has yet to agree; later ones send all buckets on the way, only the control block in step().
        assert seen[0:2] == [0, 0]
        for input_reached, over, stepped in (seen[3:6], seen[6:9]):
            assert input_reached >= 5
            assert (over, stepped) == (6, 7)


def test_with_accumulation_nothing_is_sent_during_the_backward_pass(ranks, size):
    for seen in ranks(size).run(overlap, 2):
        assert seen[0:2] == seen[3:5] == seen[6:8] == [0, 0]


def clip_and_average_statistics(max_grad_norm):
    """Two ranks with one half of the data each, against one model on all of it."""
    torch.manual_seed(3)
    data = torch.randn(8, 5, dtype=torch.float64)

    def make():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1)).double()

    model = make()
    model[1].eval()  # normalising by the batch would make the halves differ from the whole
    optimizer = sr.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        "bsp",
        named_buffers=model.named_buffers(),
        max_grad_norm=max_grad_norm,
    )
    part = data[hvd.rank() :: hvd.size()]
    for step in range(3):
        optimizer.zero_grad()
        model(part).exp().mean().backward()
        model[1].running_mean.fill_(float(hvd.rank() + step))  # what a rank's own batches say
        optimizer.step(samples=len(part))
        model[1].running_mean.zero_()
    optimizer.join()
    plain = make()
    plain[1].eval()
    alone = torch.optim.SGD(plain.parameters(), lr=1.0)
    for _ in range(3):
        alone.zero_grad()
        plain(data).exp().mean().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
        assert norm > max_grad_norm
        alone.step()
    return flat(model), flat(plain), model[1].running_mean


def test_bsp_clips_the_average_and_averages_buffers(ranks, size):
    for ours, plain, mean in ranks(size).run(clip_and_average_statistics, 0.01):
        torch.testing.assert_close(ours, plain)
        assert mean.tolist() == [(size - 1) / 2 + 2] * 4


def migrate_with_state(rule, after):
    """Horovod's habit of broadcasting the optimizer's state, before and after wrapping."""
    model = make_model(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (1 + hvd.rank()))
    if after:
        optimizer = sr.DistributedOptimizer(optimizer, rule)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if not after:
        optimizer = sr.DistributedOptimizer(optimizer, rule)
    for x, y in batches(hvd.rank(), 4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step(samples=len(x))
    optimizer.drain()
    total = hvd.allreduce(torch.ones(3), op=hvd.Sum)  # safe after drain()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer.param_groups[0]["lr"], total.tolist(), flat(model)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("rule", ["bsp", "losp:k_max=4"])
def test_horovods_own_helpers_go_on_working(ranks, size, rule, after):
    answers = ranks(size).run(migrate_with_state, rule, after)
    for lr, total, model in answers:
        assert lr == 0.01
        assert total == [size] * 3
        assert torch.equal(model, answers[0][2])


def resume_on_rank_0_alone():
    """Rank 0 comes with AdamW's state, the others with none."""
    model = make_model(seed=hvd.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + hvd.rank()), weight_decay=0.1)
    if hvd.rank() == 0:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    # Horovod lets ranks without state take a step with zero gradients, which weight decay moves: the model comes second.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = sr.DistributedOptimizer(optimizer, "losp:k_max=4")
    averages = [state["exp_avg"].tolist() for state in optimizer.state.values()]
    for x, y in batches(hvd.rank(), 3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step(samples=len(x))
    optimizer.join()
    return optimizer.param_groups[0]["lr"], averages, flat(model).tolist()


def test_horovod_392_state_that_rank_0_alone_has_is_broadcast(ranks, size):
    answers = ranks(size).run(resume_on_rank_0_alone)
    assert answers == [answers[0]] * size
    lr, averages, _ = answers[0]
    assert lr == 0.01
    assert any(value for layer in averages for value in torch.tensor(layer).ravel().tolist())


def train_until_told(rule):
    """Rank 1 is told to stop by another thread of its process."""
    model = make_model()
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule)
    teller = threading.Timer(0.2, stop_wish.set)
    if ambient().rank == 1:
        teller.start()
    for x, y in batches(ambient().rank, 100_000):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if optimizer.progress.stop:
            break
    optimizer.join()
    teller.cancel()
    stop_wish.clear()
    return optimizer.progress.stop, optimizer.progress.rounds, flat(model).tolist()


@pytest.mark.parametrize("rule", ["bsp", "local_sgd:steps=3", "losp:k_max=4"])
def test_a_thread_of_one_rank_stops_all_of_them_after_the_same_round(ranks, size, rule):
    answers = ranks(size).run(train_until_told, rule)
    assert answers == [answers[0]] * size
    assert answers[0][0]


def train_with_a_slow_rank():
    """Rank 1 sleeps ten times as long as the others in each step; what a watch on rank 0 and its telemetry say."""
    rank, said, events = ambient().rank, [], []
    with Telemetry(rank, events.append):
        model = make_model()
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "local_sgd:steps=1")
        if rank == 0:
            optimizer.on_landed(sr.stragglers.StragglerWatch(say=said.append))
        for x, y in batches(rank, 130):
            time.sleep(0.02 if rank == 1 else 0.002)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step(samples=len(x))
            sr.report(loss=loss)
        optimizer.join()
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    return said, warnings, events[-1]


def test_a_rank_that_is_slow_is_named_and_the_others_wait(ranks, size):
    answers = ranks(size).run(train_with_a_slow_rank)
    (sentence,), warnings, _ = answers[0]
    assert sentence.startswith("rank 1 takes ") and warnings == [sentence]
    assert all(not said and not warnings for said, warnings, _ in answers[1:])
    board = Board([f"worker{rank}" for rank in range(size)])
    for rank, (_, _, last) in enumerate(answers):
        assert (last["steps"], last["samples"]) == (130, 520.0)
        board.take(rank, last)
    board.end()
    rows, _ = board.rows()
    assert [row.waits_for for row in rows] == [None if rank == 1 else 1 for rank in range(size)]
    assert rows[1].waiting + 0.3 < rows[0].waiting
    assert all(0 < row.values["loss"] < 2 for row in rows)
