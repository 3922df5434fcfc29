"""Compressed payloads, and parameters of 16 bits, on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slackring as sr
from slackring.ring.ambient import ring as ambient
from slackring.testing.scenario import WatchedRing

RULES = ("bsp", "bsp:accumulate=2", "local_sgd:steps=3", "losp:k_max=4", "relaxed:steps=1,staleness=2,compensation=1")


def train(rule, compression, dtype=torch.float32, growth_at=None):
    """A model at the end, as one vector, and what was sent."""
    ring = WatchedRing(ambient())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 3)).to(dtype)
    optimizer = sr.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), rule, compression=compression, ring=ring
    )
    data = torch.Generator().manual_seed(ring.rank)
    for step in range(12):
        x = torch.randn(4, 8, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), x.sum(1).gt(0).long())
        (1e4 * loss if (ring.rank, step) == (1, growth_at) else loss).backward()
        optimizer.step(samples=4)
    optimizer.join()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), ring.sent


def check_compression(pool, rule):
    plain, compressed = (pool.run(train, rule, how) for how in (None, "fp16"))
    assert all(torch.equal(model, compressed[0][0]) for model, _ in compressed)
    assert all(sent == compressed[0][1] for _, sent in compressed)
    assert any(text.endswith("float16") for text in compressed[0][1])
    if "losp" not in rule:  # its windows depend on the clock
        torch.testing.assert_close(compressed[0][0], plain[0][0], rtol=1e-2, atol=1e-4)
        assert not torch.equal(compressed[0][0], plain[0][0])


def check_growth(pool, rule):
    """Ranks reduce one round again, whatever else is in flight, and none hangs."""
    plain, compressed = (pool.run(train, rule, how, growth_at=7) for how in (None, "fp16"))
    assert any(".again" in text for text in compressed[0][1])
    assert all(sent == compressed[0][1] for _, sent in compressed)
    assert all(torch.equal(model, compressed[0][0]) for model, _ in compressed)
    torch.testing.assert_close(compressed[0][0], plain[0][0], rtol=5e-2, atol=5e-2)


def check_narrow(pool, rule, dtype):
    models = [model for model, _ in pool.run(train, rule, None, dtype)]
    assert models[0].dtype == dtype
    assert all(torch.equal(model, models[0]) for model in models)
    assert torch.isfinite(models[0]).all()


@pytest.mark.parametrize("rule", RULES)
def test_compression(ranks, size, rule):
    check_compression(ranks(size), rule)


@pytest.mark.parametrize("rule", [rule for rule in RULES if "losp" not in rule])
def test_a_round_that_would_overflow_is_reduced_again(ranks, size, rule):
    check_growth(ranks(size), rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_parameters_of_16_bits(ranks, size, rule, dtype):
    check_narrow(ranks(size), rule, dtype)


def train_with_horovods_words():
    import horovod.torch as hvd

    named, ours = (train("bsp", how)[0] for how in (hvd.Compression.fp16, "fp16"))
    none, plain = (train("bsp", how)[0] for how in (hvd.Compression.none, None))
    return torch.equal(named, ours), torch.equal(none, plain), torch.equal(named, none)


def test_horovods_names_of_compressions(ranks):
    assert ranks(2).run(train_with_horovods_words) == [(True, True, False)] * 2


@pytest.mark.parametrize("rule", RULES[1:])
def test_compression_and_16_bits_over_torch(torch_ranks, rule):
    check_compression(torch_ranks(2), rule)
    check_narrow(torch_ranks(2), rule, torch.bfloat16)
    if "losp" not in rule:
        check_growth(torch_ranks(2), rule)


def where_sums_are_made():
    ring = ambient()
    return tuple(ring.reduces(torch.device(kind)) for kind in ("cpu", "cuda", "mps"))


def test_horovod_sums_on_a_gpu_only_with_nccl(ranks):
    hvd = pytest.importorskip("horovod.torch")
    assert ranks(2).run(where_sums_are_made) == [(True, bool(hvd.nccl_built()), False)] * 2


def test_torch_sums_where_its_group_has_a_backend(torch_ranks):
    """Gloo takes tensors on a GPU, too."""
    assert torch_ranks(2).run(where_sums_are_made) == [(True, True, False)] * 2


def train_on_the_gpu(rule):
    """Ranks that share a GPU, with sums on the CPU unless the ring can do better."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3).cuda()
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device="cuda")).square().mean().backward()
        optimizer.step(samples=4)
    optimizer.join()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("rule", RULES)
def test_a_model_on_a_gpu_with_a_horovod_that_knows_none(ranks, rule):
    hvd = pytest.importorskip("horovod.torch")
    if hvd.nccl_built():
        pytest.skip("NCCL refuses two ranks on one GPU")
    one, two = ranks(2).run(train_on_the_gpu, rule)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))
