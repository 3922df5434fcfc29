"""A torch model's loss as the function of a flat vector that gossip trains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from slackring.errors import UnsupportedError

__all__ = ["module_gradient"]

Array = NDArray[np.float64]


def module_gradient(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    draw: Callable[[int, int, np.random.Generator], tuple[Tensor, Tensor]],
) -> tuple[Callable[[int, Array, int, np.random.Generator], Array], Array]:
    """Make the `gradient` and `start` that :meth:`AnytimeMinibatch.run` takes out of a model.

    Parameters
    ----------
    model
        Serves all nodes in turn: its parameters are those of the node that was asked for last. To evaluate a node's model,
        ``torch.nn.utils.vector_to_parameters`` puts it back.
    loss
        Mean loss of a minibatch, from the model's output and the labels.
    draw
        Called with a node, a number of samples and the node's random generator; returns inputs and labels.

    Returns
    -------
    gradient : callable
    start : ndarray
        The model's parameters, shape ``(d,)``.

    Raises
    ------
    UnsupportedError
        For a model with floating buffers, such as BatchNorm's statistics, which nodes would share.

    Examples
    --------
    >>> from slackring.gossip import AnytimeMinibatch, ring
    >>> def draw(node, samples, rng):
    ...     x = torch.from_numpy(rng.normal(size=(samples, 2))).float()
    ...     return x, x.sum(dim=1, keepdim=True)
    >>> gradient, start = module_gradient(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, draw)
    >>> nodes = AnytimeMinibatch(graph=ring(3), compute_time=1.0, share=50, rounds=4)
    >>> bool(abs(nodes.run(gradient, start, epochs=50, lr=0.3).models - [1.0, 1.0, 0.0]).max() < 0.001)
    True
    """
    shared = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if shared:
        raise UnsupportedError(f"nodes would share the buffer {shared[0]!r}; use GroupNorm or LayerNorm for BatchNorm.")
    parameters = list(model.parameters())

    def gradient(node: int, w: Array, samples: int, rng: np.random.Generator) -> Array:
        vector_to_parameters(torch.from_numpy(w).to(parameters[0].dtype), parameters)
        inputs, labels = draw(node, samples, rng)
        found = torch.autograd.grad(loss(model(inputs), labels), parameters)
        return np.asarray(parameters_to_vector(found).numpy(), dtype=np.float64)

    return gradient, np.asarray(parameters_to_vector(parameters).detach().numpy(), dtype=np.float64)
