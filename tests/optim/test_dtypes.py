"""Parameters of 16 bits, alone and among others: anchors and sums are float32, the model is the anchor rounded."""

from __future__ import annotations

import pytest
import torch

import slackring as sr
from slackring.errors import UnsupportedError
from slackring.optim.flat import digest

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bfloat16": (BF16,) * 3, "float16": (FP16,) * 3, "mixed": (BF16, FP32, FP16)}
KEEPS_ALL = (
    "bsp",
    "local_sgd:steps=1",
    "local_sgd:steps=3",
    "cocod:steps=2",
    "losp:compensation=1,k_max=4",
    "relaxed:steps=1,staleness=3,compensation=1",
)
RULES = (
    *KEEPS_ALL,
    "bsp:accumulate=2",
    "osp",
    "losp:compensation=0.5",
    "losp:compensation=auto",
    "relaxed:payload=gradient,steps=1,staleness=1",
    "relaxed:steps=2,staleness=2,compensation=0.5,weighting=samples",
)


class Casting(torch.nn.Module):
    """Layers of one dtype each; what flows between them is cast."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


def steps_of(model: Casting, optimizer: torch.optim.Optimizer, number: int, seed: int = 0) -> None:
    """Local steps on data that depend on the seed and the rank."""
    data = torch.Generator().manual_seed(100 * seed + sr.ring().rank)
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.randn(6, 5, generator=data)).square().mean().backward()
        if isinstance(optimizer, sr.RelaxedOptimizer):
            optimizer.step(samples=3 + sr.ring().rank)
        else:
            optimizer.step()


@pytest.mark.parametrize(
    ("rule", "dtypes"),
    [*((rule, dtypes) for rule in KEEPS_ALL for dtypes in ("bfloat16", "float16")), ("bsp", "mixed")],
)
@pytest.mark.parametrize("adam", [False, True])
def test_alone_it_is_the_plain_optimizer_to_the_bit(rule: str, dtypes: str, adam: bool) -> None:
    def train(wrap: bool) -> list[list[torch.Tensor]]:
        torch.manual_seed(1)
        model, seen = Casting(*DTYPES[dtypes]), []
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if adam:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-4)  # float16 has no 1e-8
        if wrap:
            optimizer = sr.DistributedOptimizer(optimizer, rule)
        for step in range(12):
            steps_of(model, optimizer, 1, seed=step)
            seen.append([parameter.detach().clone() for parameter in model.parameters()])
        if isinstance(optimizer, sr.RelaxedOptimizer):
            optimizer.drain()
            seen.append([parameter.detach().clone() for parameter in model.parameters()])
        return seen

    plain = train(False)
    (found,) = sr.VirtualCluster(1, network=sr.Network(latency=0.15)).run(train, True)
    assert not torch.equal(plain[0][0], plain[-1][0])
    for mine, theirs in zip(found, [*plain, plain[-1]], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_all_ranks_end_with_the_same_bits(rule: str, dtypes: str) -> None:
    def train() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(1)
        model = Casting(*DTYPES[dtypes])
        first = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), rule)
        steps_of(model, optimizer, 9 + sr.ring().rank)
        optimizer.drain()
        with optimizer.consensus():
            agreed = [parameter.detach().clone() for parameter in model.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(agreed, model.parameters(), strict=True))
        return first, agreed

    found = sr.VirtualCluster(3, straggler="persistent:ranks=2,factor=3").run(train)
    for first, agreed in found:
        assert not any(torch.equal(one, other) for one, other in zip(first, agreed, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(agreed, found[0][1], strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rule", ["local_sgd:steps=1", "cocod:steps=1", "osp:k_max=1"])
def test_averages_below_the_parameters_precision_add_up(rule: str, dtype: torch.dtype) -> None:
    """One of eight ranks moves by the smallest step there is: after eight rounds all models have moved by it."""
    smallest = torch.finfo(dtype).eps

    def train() -> list[float]:
        x = torch.nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        seen = []
        for _ in range(8):
            x.grad = torch.full_like(x, -smallest if sr.ring().rank == 0 else 0.0)
            optimizer.step()
            with optimizer.consensus():
                seen.append(x.item())
        optimizer.drain()
        return [*seen, x.item()]

    for seen in sr.VirtualCluster(8).run(train):
        assert seen[0] == seen[2] == 1.0
        assert seen[-1] == 1.0 + smallest


@pytest.mark.parametrize("rule", ["bsp", "bsp:accumulate=4", "relaxed:payload=gradient,steps=4,staleness=1"])
def test_gradients_are_weighted_and_summed_in_float32(rule: str) -> None:
    """And rounded once, at the end; in bfloat16 257 samples count as 256, and 2 + 1/128 as 2."""

    def train() -> float:
        x = torch.nn.Parameter(torch.zeros(1, dtype=BF16))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        rank = sr.ring().rank
        for step in range(4 if "4" in rule else 1):
            optimizer.zero_grad()
            optimizer.set_samples(257 if rank else 1)
            ((-1.0078125 if rank else 2.0 + step) * x).sum().backward()
            optimizer.step(samples=257 if rank else 1)
        optimizer.drain()
        return x.item()

    slopes = [-2.0 - step for step in range(4 if "4" in rule else 1)]
    mean = (sum(slopes) + len(slopes) * 257 * 1.0078125) / (len(slopes) * 258)
    wanted = torch.tensor(mean, dtype=FP32).to(BF16).item()
    assert sr.VirtualCluster(2).run(train) == [wanted] * 2


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("rule", "wanted"), [("bsp", 2 * 1.5), ("bsp:accumulate=2", 4 / 3), ("local_sgd:steps=1", (3 + 4) / 2)]
)
def test_a_gradient_scaler_works_though_torch_refuses_it_for_float16(
    rule: str, wanted: float, dtype: torch.dtype
) -> None:
    """Slopes 1 and 2, of which rank 1's first one overflows."""

    def train() -> float:
        x, rank = torch.nn.Parameter(torch.zeros(1, dtype=dtype)), sr.ring().rank
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), rule)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(3 if "accumulate" not in rule else 2):
            optimizer.zero_grad()
            slope = torch.inf if (rank, step) == (1, 0) else 1.0 + rank
            scaler.scale(-slope * x.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.drain()
        return x.item()

    assert sr.VirtualCluster(2).run(train) == [torch.tensor(wanted).to(dtype).item()] * 2


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_averaged_buffers_of_16_bits(dtype: torch.dtype) -> None:
    def train() -> list[float]:
        x, running = torch.nn.Parameter(torch.ones(1, dtype=dtype)), torch.zeros(1, dtype=dtype)
        optimizer = sr.DistributedOptimizer(
            torch.optim.SGD([x], lr=1.0), "local_sgd:steps=1", named_buffers=[("running", running)]
        )
        seen = []
        for step in range(2):
            x.grad = torch.zeros_like(x)
            running.fill_((256.0, 2.0, 1.0)[sr.ring().rank] + step)
            optimizer.step()
            seen.append(running.item())
        return seen

    wanted = [torch.tensor(total / 3).to(dtype).item() for total in (259.0, (256.0 if dtype == BF16 else 257.0) + 5)]
    assert sr.VirtualCluster(3).run(train) == [wanted] * 3


def test_a_digest_sees_every_bit_of_16() -> None:
    for dtype in (BF16, FP16):
        tensor = torch.randn(70_001).to(dtype)
        changed = tensor.clone()
        changed[-1] = torch.nextafter(changed[-1], torch.tensor(10.0, dtype=dtype))
        assert digest([tensor]) != digest([changed])
        assert digest([tensor], 0) == digest([changed], 0)
        assert digest([tensor], 1) != digest([changed], 1)


def test_dtypes_without_an_average_are_refused_by_name() -> None:
    layer = torch.nn.Linear(2, 2, dtype=torch.complex64)
    named = list(layer.named_parameters())
    with pytest.raises(UnsupportedError, match=r"parameter 'weight' is complex64, .* parameters are float32, float64"):
        sr.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), "bsp", named_parameters=named)
    x = torch.nn.Parameter(torch.ones(2))
    count = torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"parameter 'parameter\.1' is int64"):
        sr.DistributedOptimizer(torch.optim.SGD([x, count], lr=0.1), "losp")
    optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=0.1), "losp")
    with pytest.raises(UnsupportedError, match=r"parameter 'parameter\.1' is int64"):
        optimizer.add_param_group({"params": [count]})
