"""Dual averaging, the update of the Anytime Minibatch papers, as an ordinary optimizer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from slackring.errors import UnsupportedError

__all__ = ["DualAveraging", "regularisation"]


def regularisation(t: int, growth: float, staleness: int = 0) -> float:
    """How strongly update number `t` holds the model where training began: ``1 + growth * sqrt(t + staleness)``.

    Examples
    --------
    >>> regularisation(t=4, growth=0.5), regularisation(t=4, growth=0.5, staleness=5)
    (2.0, 2.5)
    """
    return 1 + growth * math.sqrt(t + staleness)


class DualAveraging(Optimizer):
    """Weighs all gradients since the start alike, against a growing pull to where training began.

    With g(t) the gradient of update t = 1, 2, ... and w(1) the model before the first one::

        z(t + 1) = z(t) + g(t)                                                 z(1) = 0
        w(t + 1) = argmin_w <z(t + 1), w> + beta(t + 1) * 1/2 ||w - w(1)||^2
                 = w(1) - z(t + 1) / beta(t + 1)
        beta(t)  = K + alpha(t) = (1 + growth * sqrt(t + staleness)) / lr

    This is the update of "Anytime Minibatch" (arXiv 2006.05752), with staleness 0, and of its form with stale gradients
    (arXiv 2012.08616). A falling step size would leave old gradients their larger steps; here they shrink with the new
    ones. With ``growth=0`` it is SGD, to the bit.

    Parameters
    ----------
    params
        Parameters, or groups of them with settings of their own.
    lr
        1 / K, the inverse of the gradient's Lipschitz constant; at least 0. A schedule may change it: a gradient keeps
        the lr of its update as its weight in z.
    growth
        ``alpha(t) = growth / lr * sqrt(t + staleness)``, at least 0. The papers' ``sqrt((t + staleness) / b)`` with b samples
        an update is ``growth = lr / sqrt(b)``.
    staleness
        tau, how many updates old the model is that gradients are taken at; at least 0.

    Raises
    ------
    UnsupportedError
        For values out of range; in ``step``, for sparse gradients.

    Notes
    -----
    Beside the model it keeps z, and moves the model by ``w(t + 1) - w(t)``, not to w(t + 1) itself. So a model that something
    else moves meanwhile, such as a rule that averages models, keeps that move.

    Examples
    --------
    >>> x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    >>> optimizer = DualAveraging([x], lr=0.5, growth=0.5)
    >>> for _ in range(3):
    ...     x.grad = torch.ones_like(x)
    ...     optimizer.step()
    >>> round(x.item(), 9), 1 - 3 * 0.5 / regularisation(t=4, growth=0.5)
    (0.25, 0.25)
    """

    def __init__(self, params: ParamsT, lr: float | Tensor, growth: float, staleness: int = 0) -> None:
        for name, value in (("lr", lr), ("growth", growth), ("staleness", staleness)):
            if not 0 <= value < math.inf:
                raise UnsupportedError(f"DualAveraging: {name} is a finite number of at least 0, not {value}.")
        super().__init__(params, {"lr": lr, "growth": growth, "staleness": staleness})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one update; parameters without a gradient stay as they are, and do not count it.

        Parameters
        ----------
        closure
            Evaluates the model anew and returns the loss.

        Returns
        -------
        object
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Nearly always one list: parameters that have had equally many updates move together.
            by_updates: dict[int, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_updates[self._state_of(parameter)["step"]].append(parameter)
            for updates, parameters in by_updates.items():
                self._move(parameters, updates, float(group["lr"]), group["growth"], group["staleness"])
        return loss

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UnsupportedError("DualAveraging sums gradients densely; build the embedding with sparse=False.")
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["z"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _move(self, parameters: list[Tensor], updates: int, lr: float, growth: float, staleness: int) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sums = [self.state[parameter]["z"] for parameter in parameters]
        before = regularisation(updates + 1, growth, staleness)
        after = regularisation(updates + 2, growth, staleness)
        torch._foreach_add_(parameters, sums, alpha=1 / before - 1 / after)
        torch._foreach_add_(parameters, gradients, alpha=-lr / after)
        torch._foreach_add_(sums, gradients, alpha=lr)
        for parameter in parameters:
            self.state[parameter]["step"] = updates + 1
