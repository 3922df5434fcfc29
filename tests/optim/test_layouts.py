"""Models of odd layouts: mixed dtypes, frozen, empty, strided and shared parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slackring as sr
from slackring.optim.flat import FlatSpace, digest


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.single = torch.nn.Parameter(torch.full((2, 3), 0.5))
        self.second = torch.nn.Parameter(torch.full((3,), 0.25, dtype=torch.float64))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.strided = torch.nn.Parameter(torch.full((2, 3, 4, 5), 0.1).contiguous(memory_format=torch.channels_last))
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs @ self.single + self.frozen
        hidden = hidden * self.single.sum()  # used twice
        return (hidden * self.second).sum() * self.scalar + self.strided.square().sum() + self.empty.sum()


@pytest.mark.parametrize("rule", ["bsp", "bsp:accumulate=2", "local_sgd:steps=1", "losp:compensation=1"])
@pytest.mark.parametrize("small_buckets", [False, True])
def test_odd_models_train_like_the_plain_optimizer(
    rule: str, small_buckets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank does the same, so that every average is what each of them has."""
    if small_buckets:
        monkeypatch.setattr("slackring.optim.gradient._BUCKET_BYTES", 32)

    def train(wrap: bool) -> list[torch.Tensor]:
        model = Odd()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
        if wrap:
            optimizer = sr.DistributedOptimizer(optimizer, rule, named_parameters=model.named_parameters())
        for step in range(4):
            for _ in range(2 if wrap and "accumulate" in rule else 1):
                optimizer.zero_grad()
                model(torch.full((2, 2), 0.1 * (step + 1))).backward()
                optimizer.step()
        if wrap:
            optimizer.drain()  # type: ignore[attr-defined]
        return [parameter.detach() for parameter in model.parameters()]

    expected = train(False)
    for found in sr.VirtualCluster(2).run(train, True):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
            assert mine.stride() == theirs.stride()


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=8)
dtypes = st.sampled_from([torch.float32, torch.float64])


@settings(max_examples=50)
@given(shapes, st.data(), st.integers(1, 200))
def test_every_tensor_lies_in_exactly_one_bucket(
    shapes: list[tuple[int, ...]], data: st.DataObject, limit: int
) -> None:
    """Some packages drop a tensor that does not fit into what is left of a bucket."""
    tensors = [torch.randn(shape).to(data.draw(dtypes)) for shape in shapes]
    space = FlatSpace(tensors)
    buffers = space.new()
    buffers.load(tensors)
    for tensor, view in zip(tensors, buffers.views, strict=True):
        assert torch.equal(tensor, view)
    assert sum(flat.nbytes for flat in buffers.flats) == space.nbytes == sum(tensor.nbytes for tensor in tensors)
    buckets = space.slices(limit)
    assert sorted(index for *_, members in buckets for index in members) == list(range(len(tensors)))
    for which, start, stop, members in buckets:
        inside = torch.cat([tensors[index].reshape(-1) for index in members])
        assert torch.equal(buffers.flats[which][start:stop], inside)
        assert len(members) == 1 or inside.nbytes <= limit
    back = [torch.zeros_like(tensor) for tensor in tensors]
    buffers.store(back)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(back, tensors, strict=True))


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2), torch.zeros(0)]
    buffers = FlatSpace(tensors).new()
    buffers.load(tensors)
    assert buffers.not_finite() is None
    for index in (2, 1, 0):
        for bad in (torch.inf, -torch.inf, torch.nan):
            buffers.views[index].view(-1)[0] = bad
            assert buffers.not_finite() == index


def test_a_digest_sees_every_bit_and_walks_over_all_pieces() -> None:
    tensors = [torch.randn(70_000), torch.randn(10, dtype=torch.float64)]
    whole = digest(tensors)
    pieces = [digest(tensors, turn) for turn in range(3)]
    assert digest(tensors, 3) == pieces[0]
    for which, place, piece in ((0, 5, 0), (0, 69_999, 1), (1, 3, 2)):
        changed = [tensor.clone() for tensor in tensors]
        changed[which][place] = torch.nextafter(changed[which][place], torch.tensor(10.0, dtype=changed[which].dtype))
        assert digest(changed) != whole
        assert [digest(changed, turn) != pieces[turn] for turn in range(3)] == [turn == piece for turn in range(3)]
    assert digest([]) == digest([], 4) == 0.0
    assert float(whole).is_integer()
    assert 0 <= whole < 2**52
