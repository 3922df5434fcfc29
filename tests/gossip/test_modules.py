"""A torch model as a function of a flat vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from slackring import gossip
from slackring.errors import UnsupportedError


def test_gradients_are_those_of_the_model_at_the_vector() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    asked: list[tuple[int, int]] = []

    def draw(node: int, samples: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        asked.append((node, samples))
        return torch.from_numpy(rng.normal(size=(samples, 3))), torch.from_numpy(rng.integers(0, 2, size=samples))

    gradient, start = gossip.module_gradient(model, torch.nn.functional.cross_entropy, draw)
    assert start.shape == (3 * 4 + 4 + 4 * 2 + 2,)
    found = gradient(5, start + 0.1, 7, np.random.default_rng(1))
    assert asked == [(5, 7)]
    inputs, labels = draw(5, 7, np.random.default_rng(1))
    w = torch.from_numpy(start + 0.1).requires_grad_()
    weights, biases = (w[0:12].view(4, 3), w[16:24].view(2, 4)), (w[12:16], w[24:26])
    output = torch.tanh(inputs @ weights[0].T + biases[0]) @ weights[1].T + biases[1]
    torch.nn.functional.cross_entropy(output, labels).backward()
    assert w.grad is not None
    np.testing.assert_allclose(found, w.grad.numpy(), rtol=1e-10)


def test_shared_statistics_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(UnsupportedError, match=r"nodes would share the buffer '1.running_mean'; use GroupNorm"):
        gossip.module_gradient(model, torch.nn.functional.mse_loss, lambda *_: (torch.ones(1), torch.ones(1)))
